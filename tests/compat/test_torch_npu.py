"""Names of torch_npu that are torch's own in other words: what they give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchgraft.errors import NotOnThisDevice


@pytest.mark.feature("torch_npu", "scatter_update: keys and values written to a cache")
@pytest.mark.parametrize(("axis", "shape"), [(-2, (3, 2, 5, 4)), (1, (3, 5, 2, 4)), (-1, (3, 6))])
def test_a_cache_is_written_from_each_index_on(
    ascend: Path, axis: int, shape: tuple[int, ...]
) -> None:
    import torch_npu

    length = [2 if dim == axis % len(shape) else size for dim, size in enumerate(shape)]
    cache, new, start = torch.randn(shape), torch.randn(length), torch.tensor([0, 3, 1])
    expected = cache.clone()
    for row, at in enumerate(start.tolist()):
        expected[row].narrow(axis if axis < 0 else axis - 1, at, 2).copy_(new[row])
    kept = cache.clone()
    assert torch.equal(torch_npu.scatter_update(cache, start, new, axis), expected)
    assert torch.equal(cache, kept)
    compiled = torch.compile(
        lambda *args: torch_npu.scatter_update_(*args, axis), backend="npu", fullgraph=True
    )
    assert torch.equal(compiled(cache, start.int(), new), expected)
    assert torch.equal(cache, expected)


@pytest.mark.feature("torch_npu", "npu.amp: GradScaler(dynamic=), custom_fwd, custom_bwd")
def test_a_scale_that_is_not_dynamic_stays(ascend: Path) -> None:
    import torch_npu
    from torch_npu.npu.amp.grad_scaler import GradScaler

    for dynamic, expected in ((False, 8.0), (True, 4.0)):
        weight = torch.ones(2, requires_grad=True)
        optimizer = torch_npu.optim.NpuFusedSGD([weight], lr=0.5)
        scaler = GradScaler(8.0, 2.0, 0.5, 1, dynamic)
        scaler.scale((weight * float("inf")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected
        assert weight.tolist() == [1, 1], "a step that overflows is left out"

    class Twice(torch.autograd.Function):
        @staticmethod
        @torch_npu.npu.amp.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        @torch_npu.npu.amp.custom_bwd
        def backward(ctx: object, given: torch.Tensor) -> torch.Tensor:
            return given * 2

    x = torch.ones(2, requires_grad=True)
    with torch.npu.amp.autocast():  # type: ignore[attr-defined]
        assert torch.npu.is_autocast_enabled()  # type: ignore[attr-defined]
        assert torch.npu.get_autocast_dtype() == torch.float16  # type: ignore[attr-defined]
        assert Twice.apply(x.half()).dtype == torch.float32
    assert not torch.npu.is_autocast_enabled()  # type: ignore[attr-defined]


def test_tensors_of_tests_are_the_same_on_both_devices(ascend: Path) -> None:
    import numpy
    from torch_npu.testing import common_utils, testcase

    on_cpu, on_npu = common_utils.create_common_tensor([numpy.float16, 2, (3, 4)], 1, 2)
    assert on_npu.is_npu  # type: ignore[attr-defined]
    assert torch.equal(on_cpu, on_npu.cpu())
    assert (on_cpu.dtype, on_cpu.shape) == (torch.float16, (3, 4))
    assert on_cpu.min() >= 1
    found, _ = common_utils.create_dtype_tensor((50,), torch.int32, no_zero=True)
    assert (found != 0).all()
    with common_utils.freeze_rng_state():
        drawn = torch.rand(2)
    assert torch.equal(drawn, torch.rand(2))
    same = testcase.TestCase().assertEqual
    same(torch.ones(2), torch.full((2,), 1.0001), 0.001)
    with pytest.raises(AssertionError):
        same(1.0, 1.1, prec=0.01)


def test_formats_and_memory(ascend: Path) -> None:
    import torch_npu

    made = torch_npu.empty_with_format((2, 3), dtype=torch.float16, device="npu")
    assert (made.shape, made.dtype, torch_npu.get_npu_format(made)) == ((2, 3), torch.float16, 2)
    torch_npu.copy_memory_(made, torch.ones(2, 3).half())
    assert made.sum() == 6
    assert torch_npu.get_storage_size(made[0]) == 6
    assert torch_npu.npu_format_cast_(made, torch.zeros(2, 3).half()).sum() == 0
    npu = torch.npu  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="calls that wait are not watched"):
        npu.set_sync_debug_mode("warn")
    assert npu.get_sync_debug_mode() == 1
    npu.set_sync_debug_mode(0)
    with pytest.raises(RuntimeError, match="expected one of default, warn, error"):
        npu.set_sync_debug_mode("loud")


def test_other_paths_are_the_same_things(ascend: Path) -> None:
    import torch_npu
    import torchair
    from torch_npu.dynamo.torchair.ge.ge_custom import custom_op
    from torch_npu.npu.memory import empty_cache
    from torch_npu.profiler.experimental_config import ProfilerLevel

    assert custom_op is torchair.ge.custom_op
    assert empty_cache is torch_npu.npu.empty_cache
    settings = torch_npu.profiler._ExperimentalConfig(profiler_level="Level1")
    assert settings.profiler_level is ProfilerLevel.Level1
    assert torch_npu.profiler.schedule(wait=0, active=1)(0) is not None
    with pytest.raises(NotOnThisDevice, match=r"roi_align|ROIAlign needs .*torch\.nn"):
        from torch_npu.contrib.module.roi_align import ROIAlign  # noqa: F401
    with pytest.raises(NotOnThisDevice, match=r"SyncBatchNorm needs .*torch\.nn\.SyncBatchNorm"):
        from torch_npu.utils.syncbatchnorm import SyncBatchNorm  # noqa: F401
    with pytest.raises(ImportError, match=r"NpuFusedLamb needs an NPU. Use .*AdamW"):
        from torch_npu.optim import NpuFusedLamb  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        import torch_npu.no_such_thing


def test_what_names_no_device_or_stream_is_refused(ascend: Path) -> None:
    npu = torch.npu  # type: ignore[attr-defined]
    npu.set_device(3)  # a CPU stands for every NPU: each rank of a job has its own
    assert torch.ones(1, device="npu:3").to("npu:7").device.type == "cpu"
    for name in ("npu:x", "npu:-1", "npu:"):
        for use in (torch.device, npu.set_device, npu.Stream, torch.ones(1).to):
            with pytest.raises(RuntimeError, match=f"Invalid device string: '{name}'"):
                use(name)
    for use in (npu.set_device, npu.device, npu.Stream):
        with pytest.raises(ValueError, match="Expected an npu device, but got: cuda:0"):
            use("cuda:0")
        for odd in (True, 1.5):
            with pytest.raises(TypeError):
                use(odd)
    with pytest.raises(TypeError, match=r"expected a torch.npu.Stream, got 3"), npu.stream(3):
        pass
    with pytest.raises(TypeError, match=r"expected a torch.npu.Stream, got 3"):
        npu.set_stream(3)
    assert npu.current_stream() is npu.default_stream()
