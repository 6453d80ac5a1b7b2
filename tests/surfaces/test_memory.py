"""What a compiled program keeps alive, and for how long."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import torchgraft as graft

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
