"""Convolutions of each channel by itself, with constant weights on CPU, as generated code."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft._torch import depthwise as code
from torchgraft.codegen import convolution, own

aten = torch.ops.aten

MOST = 4096
"""Pixels of a kernel: a table of what a few outputs see lies on the stack."""


def as_code(gm: GraphModule, mode: Any) -> bool:
    """Replace such convolutions; whether there are any. What follows one is part of it. `mode` is
    the fake mode of the graph's values."""
    return own.is_ahead("amd") and convolution.replace(gm, mode, _Depthwise)


class _Depthwise(convolution.Convolution):
    """One group for each channel."""

    def fits(self) -> bool:
        outs, depth, *kernel = self.weight.meta["val"].shape
        return bool(outs == self.groups and depth == 1 and math.prod(kernel) <= MOST)

    def made(self, weight: Node, bias: Node | None, out: Tensor) -> Node:
        kernel = list(weight.meta["val"].shape[2:])
        rows = self.call(aten.permute.default, weight, [2, 3, 1, 0])
        rows = self.call(aten.clone.default, rows, memory_format=torch.contiguous_format)
        how = kernel, self.steps, self.pads, self.dilation, self.groups, self.then
        size, stride = list(out.shape), list(out.stride())
        return self.call(depthwise(), self.data, rows, bias, self.other, *how, size, stride)


@functools.cache
def depthwise() -> Any:
    """The operator that stands for it in a graph: what follows convolution + bias + other; `size`
    and `stride` are the result's."""
    op = own.declared(f"depthwise{convolution.SCHEMA}", _plain, Meta=convolution.fake)
    code.generate_for(op, convolution.source)
    return op


def _plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    kernel: Sequence[int],
    steps: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    then: str,
    size: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    laid = weight.permute(3, 2, 0, 1)
    made = aten.convolution(x, laid, bias, steps, padding, dilation, False, [0, 0], groups)
    return convolution.finished(made, other, then, size, stride)
