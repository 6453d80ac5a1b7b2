"""3 x 3 convolutions by Winograd's algorithm, for which code is generated.

Four outputs take 16 multiplications a channel where the sums themselves take 36, and oneDNN, which
computes those, is at the processor's limit (docs/performance.md).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft._torch import winograd as code
from torchgraft.codegen import convolution, own

aten = torch.ops.aten

PANEL, LEAST = code.PANEL, code.LEAST
SHARE = 24
"""Tiles of each of several threads: each reads all weights, and fewer were not measured."""


def as_code(gm: GraphModule, mode: Any) -> bool:
    """Replace 3 x 3 convolutions with constant weights on CPU; whether there are any. What follows
    one is part of it: constant normalisation, a sum, relu. `mode` is the fake mode of the graph."""
    if not own.is_ahead("amd", "intel"):
        return False
    return convolution.replace(gm, mode, _Winograd)


def _fewest(threads: int) -> int:
    """Tiles from which it pays; they are shared out among threads."""
    return code.ROWS if threads == 1 else SHARE * threads


class _Winograd(convolution.Convolution):
    """Four outputs at a time, from sixteen products."""

    def fits(self) -> bool:
        held, out = (node.meta["val"].shape for node in (self.weight, self.node))
        return (
            self.groups == 1
            and list(held[2:]) == [3, 3]
            and all(number == 1 for number in (*self.steps, *self.dilation))
            and held[0] % LEAST == held[1] % LEAST == 0
            and out[0] * code.tiles_of(*out[2:]) >= _fewest(torch.get_num_threads())
        )

    def made(self, weight: Node, bias: Node | None, out: Tensor) -> Node:
        how = self.pads, self.then, list(out.shape), list(out.stride())
        return self.call(winograd(), self.data, self._packed(weight), bias, self.other, *how)

    def _packed(self, weight: Node) -> Node:
        """GwG' as panels [panel][16][channel][output of the panel], one after the other."""
        for dim in (2, 3):
            first, middle, last = (self.call(aten.select.int, weight, dim, i) for i in range(3))
            half = self._half(self.call(aten.add.Tensor, first, last))
            other = self._half(middle)
            both = (self.call(op.Tensor, half, other) for op in (aten.add, aten.sub))
            weight = self.call(aten.stack.default, [first, *both, last], dim)
        outs, depth = weight.meta["val"].shape[:2]
        whole = outs // PANEL * PANEL
        panels = [
            self._panels(self.call(aten.slice.Tensor, weight, 0, start, end), width, depth)
            for start, end, width in ((0, whole, PANEL), (whole, outs, LEAST))
            if start < end
        ]
        return self.call(aten.cat.default, panels) if len(panels) > 1 else panels[0]

    def _panels(self, weight: Node, width: int, depth: int) -> Node:
        parts = self.call(aten.reshape.default, weight, [-1, width, depth, 16])
        parts = self.call(aten.permute.default, parts, [0, 3, 2, 1])
        laid = self.call(aten.clone.default, parts, memory_format=torch.contiguous_format)
        return self.call(aten.reshape.default, laid, [-1])

    def _half(self, value: Node) -> Node:
        return self.call(aten.mul.Tensor, value, 0.5)


# --- The operator that stands for it in a graph ---


@functools.cache
def winograd() -> Any:
    """What follows convolution + bias + other, with weights that are transformed and packed; `size`
    and `stride` are the result's."""
    schema = (
        "winograd(Tensor x, Tensor weight, Tensor? bias, Tensor? other, int[] padding, str then, "
        "int[] size, int[] stride) -> Tensor"
    )
    op = own.declared(schema, _plain, Meta=convolution.fake)
    code.generate_for(op, convolution.source)
    return op


def _plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    padding: Sequence[int],
    then: str,
    size: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    depth, outs = x.shape[1], size[1]
    parts = torch.tensor_split(weight, [outs // PANEL * PANEL * depth * 16])
    laid = (
        part.reshape(-1, 16, depth, width).permute(0, 3, 2, 1).reshape(-1, depth, 4, 4)
        for part, width in zip(parts, (PANEL, LEAST), strict=True)
    )
    kernel = torch.cat(list(laid))
    for dim in (2, 3):  # G has (1, 0, 0), (0, 1, 0) and (0, 0, 1) in the sums of its rows
        first, more, less, last = kernel.unbind(dim)
        kernel = torch.stack([first, more - less, last], dim)
    made = aten.convolution(x, kernel, bias, [1, 1], padding, [1, 1], False, [0, 0], 1)
    return convolution.finished(made, other, then, size, stride)
