"""What a compiled program keeps alive, and for how long."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import torchgraft as graft
from torchgraft._torch import aot

MODES = ["eager", pytest.param("default", marks=pytest.mark.slow)]
SHAPE = (37, 41)


def weights() -> set[int]:
    """The addresses of the living tensors that are as large as the weight of `compiled`."""
    gc.collect()
    found = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    strided = [t for t in found if t.layout == torch.strided and not t.is_nested]
    return {
        t.untyped_storage().data_ptr() for t in strided if tuple(t.shape) in (SHAPE, SHAPE[::-1])
    }


def compiled(mode: str) -> graft.Compiled:
    return graft.compile(nn.Linear(*SHAPE), (torch.ones(1, SHAPE[0]),), mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_not_piled_up_and_freed_with_the_program(mode: str) -> None:
    program = compiled(mode)
    once = len(weights())
    assert once <= (1 if mode == "eager" else 2)  # the graph's, and the generator's own layout
    state = {"weight": torch.ones(SHAPE[::-1]), "bias": torch.ones(SHAPE[1])}
    for _ in range(2):
        program.load_state_dict(state)
    del state
    assert len(weights()) <= once
    assert program(torch.ones(1, SHAPE[0])).unique().tolist() == [SHAPE[0] + 1.0]
    del program
    assert not weights()


def test_a_package_lets_go_of_its_weights_in_the_middle_of_a_trace() -> None:
    class Tracing(TorchFunctionMode):
        def __torch_function__(self, *call: Any) -> Any:
            raise AssertionError("the trace saw a call that is none of the program's")

    weight = torch.ones(8)
    with Tracing():
        aot._empty([weight])
    assert weight.untyped_storage().nbytes() == 0


def test_weights_go_also_where_garbage_is_collected_within_a_fake_kernel() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager

    weight, mode = torch.randn(4), FakeTensorMode()
    with mode, in_kernel_invocation_manager(mode):
        aot._empty([weight])
        assert torch._C._meta_in_tls_dispatch_include()  # the kernel goes on as it was
    assert weight.numel() == 0
    assert weight.device.type == "cpu"
