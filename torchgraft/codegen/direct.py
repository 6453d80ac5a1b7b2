"""Convolutions with constant weights on CPU as sums over what each output sees.

A library reaches 75 to 95 % of what the processor can (docs/performance.md), and its calls split
what is one piece otherwise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft._torch import direct as code
from torchgraft.codegen import convolution, own

aten = torch.ops.aten

LEAST = 8
"""Numbers beside each other in memory that each pixel of the kernel adds: fewer are a loop that
ends before it has begun."""
MOST = 1.4
"""Times as many outputs as there are, at most, where they fill up vectors."""


def as_code(gm: GraphModule, mode: Any) -> bool:
    """Replace convolutions with constant weights on CPU; whether there are any. What follows one is
    part of it. `mode` is the fake mode of the graph's values."""
    if not own.is_ahead("amd"):
        return False
    return convolution.replace(gm, mode, _Direct)


class _Direct(convolution.Convolution):
    """Sums over what each output sees."""

    def fits(self) -> bool:
        outs, depth, _, wide = self.weight.meta["val"].shape
        count, _, *sides = self.node.meta["val"].shape
        each = outs // self.groups
        together = depth * wide if self.groups == self.dilation[1] == 1 else depth
        return bool(
            together >= LEAST and fills(each) and count * math.prod(sides) >= min(code.ROWS)
        )

    def made(self, weight: Node, bias: Node | None, out: Tensor) -> Node:
        kernel = list(weight.meta["val"].shape[2:])
        how = kernel, self.steps, self.pads, self.dilation, self.groups, self.then
        held = packed(self.call, weight, self.groups)
        size, stride = list(out.shape), list(out.stride())
        return self.call(direct(), self.data, held, bias, self.other, *how, size, stride)


def fills(outs: int) -> bool:
    """Whether so many outputs are most of the vectors that they fill up."""
    return code.filled(outs) <= MOST * outs


def packed(call: Callable[..., Node], weight: Node, groups: int = 1) -> Node:
    """Panels [panel][pixel of the kernel][channel][output of the panel], one after the other, for
    each group; what is left in the last of a group is zero."""
    outs, depth, high, wide = weight.meta["val"].shape
    each = outs // groups
    rows = call(aten.permute.default, weight, [0, 2, 3, 1])
    rows = call(aten.reshape.default, rows, [groups, each, high * wide * depth])
    if more := code.filled(each) - each:
        rows = call(aten.constant_pad_nd.default, rows, [0, 0, 0, more])
    kinds, start = [], 0
    for count, width, _ in code.panels(each):
        part = call(aten.slice.Tensor, rows, 1, start, start + count * width)
        part = call(aten.reshape.default, part, [groups, count, width, -1])
        part = call(aten.permute.default, part, [0, 1, 3, 2])
        part = call(aten.clone.default, part, memory_format=torch.contiguous_format)
        kinds.append(call(aten.reshape.default, part, [groups, -1]))
        start += count * width
    made = call(aten.cat.default, kinds, 1) if len(kinds) > 1 else kinds[0]
    return call(aten.reshape.default, made, [-1])


# --- The operator that stands for it in a graph ---


@functools.cache
def direct() -> Any:
    """What follows convolution + bias + other, with weights that are packed; `size` and `stride`
    are the result's."""
    op = own.declared(f"direct{convolution.SCHEMA}", _plain, Meta=convolution.fake)
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
    each, depth = size[1] // groups, x.shape[1] // groups
    inner = math.prod(kernel) * depth
    rows = weight.reshape(groups, -1)
    kinds, start = [], 0
    for count, width, real in code.panels(each):
        part = rows[:, start : start + count * width * inner].reshape(groups, count, inner, width)
        kinds.append(part.transpose(2, 3)[:, :, :real].flatten(1, 2))
        start += count * width * inner
    laid = torch.cat(kinds, 1).reshape(size[1], *kernel, depth).permute(0, 3, 1, 2)
    made = aten.convolution(x, laid, bias, steps, padding, dilation, False, [0, 0], groups)
    return convolution.finished(made, other, then, size, stride)
