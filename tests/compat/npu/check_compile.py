"""Programs that are compiled, on the device: every node by its operator, on the device."""

from __future__ import annotations

import pathlib
import warnings

import pytest
import torch
from torch import nn

import torchgraft as graft
import torchgraft.compat
from torchgraft.compat import simulated

pytestmark = pytest.mark.feature("torch_npu", "simulated device: torch.compile, packages")


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).npu()


@pytest.mark.parametrize("mode", ["eager", "default"])
@pytest.mark.filterwarnings("ignore:torchgraft")
def test_compile(model: nn.Module, mode: str) -> None:
    x = torch.randn(3, 4, device="npu")
    compiled = torch.compile(model, backend="torchgraft", options={"mode": mode})
    for seed in range(3):
        with simulated.adversary(seed):
            found = compiled(x)
            torch.testing.assert_close(found, model(x))
    found.sum().backward()
    grads = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for one, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(grad, one.grad)


@pytest.mark.filterwarnings("ignore:torchgraft")
def test_the_report_says_why_no_code_was_made(model: nn.Module) -> None:
    x = torch.randn(3, 4, device="npu")
    compiled = graft.compile(model.eval(), (x,))
    torch.testing.assert_close(compiled(x), model(x))
    assert "no code is generated for the device npu" in str(compiled.report)


def test_a_package_runs_on_the_device(model: nn.Module, tmp_path: pathlib.Path) -> None:
    x = torch.randn(3, 4, device="npu")
    compiled = graft.compile(model.eval(), (x,), mode="eager")
    compiled.save(tmp_path / "model.graft")
    torch.testing.assert_close(graft.load(tmp_path / "model.graft")(x), model(x))
    profile = compiled.profile((x,), repeat=2)
    assert {span.stream for span in profile.timeline.spans} == {"main"}
    assert all(kernel.seconds > 0 for kernel in profile.kernels)


def test_a_module_of_torch_aie_runs_on_the_device(tmp_path: pathlib.Path) -> None:
    torchgraft.compat.install()
    import torch_aie

    host = nn.Linear(4, 2).eval()
    traced, x = torch.jit.trace(host, torch.randn(3, 4)), torch.randn(3, 4)
    given = [torch_aie.Input((3, 4))]
    torch_aie.compile(traced, inputs=given).save(str(tmp_path / "linear.ts"))
    torch_aie.finalize()
    loaded = torch.jit.load(str(tmp_path / "linear.ts"))
    for module in (loaded, loaded.to("npu")):
        for where in (x, x.npu(), x.double()):
            result = module(where)
            assert result.is_npu
            torch.testing.assert_close(result.cpu(), host(x))
    torch_aie.finalize()
    torch.testing.assert_close(loaded(x).cpu(), host(x))  # its engine is on the device, too


@pytest.mark.parametrize("kind", ["module", "exported", "traced"])
def test_a_model_on_the_host_is_compiled_for_the_device(kind: str) -> None:
    """Nothing is generated for the device, so that nothing is missing from a full compilation."""
    torchgraft.compat.install()
    import mindietorch

    host, x = nn.Linear(4, 2).eval(), torch.randn(3, 4)
    made = {
        "module": lambda: host,
        "exported": lambda: torch.export.export(host, (x,)),
        "traced": lambda: torch.jit.trace(host, x),
    }
    given = [mindietorch.Input((3, 4))]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = made[kind]()
        compiled = mindietorch.compile(model, inputs=given, require_full_compilation=True)
        assert len(mindietorch.export_engine(model, inputs=given)) > 0
    for where in (x, x.npu()):
        torch.testing.assert_close(compiled(where).cpu(), host(x))
    assert compiled(x).is_npu
    assert not host.weight.is_npu


def test_what_a_trace_made_on_the_host_is_made_on_the_device() -> None:
    """A traced model names the CPU where it makes positions and masks."""
    torchgraft.compat.install()
    import mindietorch

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Embedding(9, 4), nn.Linear(4, 4)])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            at = self.layers[0](torch.arange(ids.shape[1]))
            mask = torch.ones(ids.shape).tril()
            return self.layers[1](self.layers[0](ids) + at) * mask[..., None]

    model, ids = Model().eval(), torch.randint(0, 9, (2, 5))
    traced = torch.jit.trace(model, ids)
    given = [mindietorch.Input(min_shape=(1, 2), max_shape=(3, 9), dtype=torch.int64)]
    compiled = mindietorch.compile(traced, inputs=given)
    for rows, columns in ((2, 5), (3, 9)):
        ids = torch.randint(0, 9, (rows, columns))
        torch.testing.assert_close(compiled(ids.npu()).cpu(), model(ids))
    torch.testing.assert_close(traced(ids), model(ids))  # itself stays on the host
