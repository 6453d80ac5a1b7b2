"""Programs against float64, and layers that are many in one program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import torchgraft as graft
from torchgraft.fx import returned


def check(model: nn.Module, *inputs: Tensor, program: Any = None) -> None:
    """The program's answers are those of float64, to within what float32 rounds."""
    program = program or graft.compile(model, inputs)
    with torch.no_grad():
        found = program(*inputs)
        expected = model(*inputs)
        exact = model.double()(*(x.double() for x in inputs))
    model.float()
    for one, other, right in zip(*map(_tensors, (found, expected, exact)), strict=True):
        assert returned.strides(one) == returned.strides(other)
        assert (one - right).norm() <= 2e-6 * right.norm()


def _tensors(values: Any) -> Sequence[Tensor]:
    return [values] if isinstance(values, Tensor) else values


class Several(nn.Module):
    """One layer for each input."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *images: Tensor) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.layers, images, strict=True)]
