"""Two devices, in debug mode: freed memory is poisoned, and using it is an error."""

from __future__ import annotations

import pytest
import torch

from torchgraft.compat import simulated

pytestmark = pytest.mark.feature(
    "torch_npu", "simulated device: a host pointer used as device memory is caught"
)


def test_two_devices() -> None:
    assert torch.npu.device_count() == 2
    x = torch.arange(4.0, device="npu:1")
    assert x.device.index == 1
    assert torch.npu.current_device() == 0
    with torch.npu.device(1):
        assert torch.npu.current_device() == 1
        assert torch.empty(1, device="npu").device.index == 1
    assert torch.npu.memory_allocated(1) > torch.npu.memory_allocated(0)
    for seed in range(6):
        with simulated.adversary(seed):
            there = (x * 3).to("npu:0")
            assert (there + 1).tolist() == [1, 4, 7, 10]
    with torch.npu.device_of(x):
        assert torch.npu.current_device() == 1


def test_a_use_after_free_reads_nan() -> None:
    x = torch.ones(256, device="npu")
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        out = torch.zeros(256, device="npu")
    torch.npu.synchronize()
    seen = set()
    for seed in range(12):
        with simulated.adversary(seed):
            x = torch.ones(256, device="npu")
            torch.npu.synchronize()
            with torch.npu.stream(side):
                out.copy_(x)  # and nothing keeps x until it has run
            del x
            torch.npu.synchronize()
            seen.add(bool(out.isnan().any().item()))
    assert True in seen


def test_mixing_devices_is_an_error() -> None:
    import pytest

    with pytest.raises(RuntimeError, match="npu:0 and npu:1"):
        torch.ones(2, device="npu:0") + torch.ones(2, device="npu:1")


def test_ordinary_work_is_no_error() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Flatten()).npu()
    x = torch.randn(2, 1, 5, 5)
    torch.testing.assert_close(model(x.npu()).cpu(), model.cpu()(x))
