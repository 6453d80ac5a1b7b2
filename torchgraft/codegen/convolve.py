"""Small convolutions as matrix products, for which code is generated.

A library's convolution costs more to call than a small one takes to compute, and little fuses with
it. As a product of the pixels that each output sees with a constant matrix, it is generated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft._torch import direct, generator
from torchgraft._torch import patches as code
from torchgraft.codegen import own
from torchgraft.codegen.convolution import both
from torchgraft.fx import meta, returned
from torchgraft.fx.cost import flops_of

aten = torch.ops.aten

SMALL = 8e6
"""Up to so many operations a convolution becomes a product: 1.5 times as fast with 3.6 million,
the same with 14 (docs/performance.md)."""
FEW = 16
"""Channels, fewer than which do not fill a vector: pixels are copied by a kernel of their own."""


def as_products(gm: GraphModule, mode: Any) -> None:
    """Replace small two-dimensional convolutions with constant weights on CPU by products, where
    they are most of the work of all, or have few outputs. `mode` is the fake mode of the graph's
    values."""
    found = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    small = [node for node in found if _is_small(*node.args, out=node.meta["val"])]
    if 2 * sum(map(flops_of, small)) <= sum(map(flops_of, found)):
        small = [node for node in small if _has_few_rows(node.meta["val"])]
    if not small:
        return  # little to gain, and a kernel to compile for each: 25 of them in GoogLeNet
    gm.meta["fake_mode"] = mode
    before, given = meta.snapshot(gm.graph), meta.output_values(gm)
    for node in small:
        _Convolution(gm, node).replace()
    meta.refresh(gm, before, "products")  # what follows lies channels last, too
    returned.keep_strides(gm, given)


def _is_small(
    data: Node,
    weight: Node,
    bias: Node | None,
    steps: Any,
    pads: Any,
    dilation: Any,
    transposed: Any,
    grown: Any,
    groups: Any,
    *,
    out: Any,
) -> bool:
    return (
        out.device.type == "cpu"
        and out.dtype == torch.float32
        and out.ndim == 4
        and not transposed
        and groups == 1
        and all(step == 1 for step in dilation)
        and all(isinstance(size, int) for size in data.meta["val"].shape)
        and weight.op == "get_attr"
        and 0 < 2 * out.numel() * weight.meta["val"][0].numel() <= SMALL
    )


def _has_few_rows(out: Tensor) -> bool:
    """Whether a product would be of few rows, such as what gates the channels of an image."""
    return out.numel() // out.shape[1] < min(direct.ROWS)


class _Convolution:
    """One call of `aten.convolution`, and what takes its place."""

    def __init__(self, gm: GraphModule, node: Node) -> None:
        self.gm, self.node = gm, node
        args: Any = node.args
        self.data, self.weight, self.bias = args[:3]
        self.steps, self.pads = map(both, args[3:5])
        _, self.depth, *self.kernel = self.weight.meta["val"].shape

    def replace(self) -> None:
        """A product; its rows are pixels, so that the answer lies channels last."""
        count, outs, height, width = self.node.meta["val"].shape
        inner = math.prod(self.kernel) * self.depth
        with self.gm.graph.inserting_before(self.node):
            rows = self._call(aten.reshape.default, self._rows(), [-1, inner])
            matrix = self._copy(self._call(aten.permute.default, self.weight, [2, 3, 1, 0]))
            matrix = self._call(aten.reshape.default, matrix, [inner, outs])
            product = self._call(aten.mm.default, rows, matrix)
            if self.bias is not None:
                product = self._call(aten.add.Tensor, product, self.bias)
            image = self._call(aten.reshape.default, product, [count, height, width, outs])
            image = self._call(aten.permute.default, image, [0, 3, 1, 2])
        self.node.replace_all_uses_with(image)
        self.gm.graph.erase_node(self.node)

    def _rows(self) -> Node:
        """What each output sees: [image, row, column, row and column of the kernel, channel]."""
        if self.depth < FEW and (self.kernel != [1, 1] or list(self.steps) != [1, 1]):
            return self._call(patches(), self.data, self.kernel, list(self.steps), list(self.pads))
        pixels = self._call(aten.permute.default, self.data, [0, 2, 3, 1])
        if any(self.pads):
            high, wide = self.pads
            pixels = self._call(
                aten.constant_pad_nd.default, pixels, [0, 0, wide, wide, high, high]
            )
        if self.kernel == [1, 1] and list(self.steps) == [1, 1]:
            return pixels
        # Both are laid out, so that what is copied is rows of the kernel and not single pixels.
        pixels = self._lay_out(self._copy(pixels))
        each, row, pixel, one = pixels.meta["val"].stride()
        count, _, height, width = self.node.meta["val"].shape
        size = [count, height, width, *self.kernel, self.depth]
        stride = [each, row * self.steps[0], pixel * self.steps[1], row, pixel, one]
        return self._lay_out(self._copy(self._call(aten.as_strided.default, pixels, size, stride)))

    def _copy(self, value: Node) -> Node:
        return self._call(aten.clone.default, value, memory_format=torch.contiguous_format)

    def _lay_out(self, value: Node) -> Node:
        return self._call(generator.laid_out(), value, list(value.meta["val"].stride()))

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return meta.call(self.gm, self.node, target, *args, **kwargs)


# --- The operator that stands for the copies in a graph ---


@functools.cache
def patches() -> Any:
    """What each output of a convolution sees, as rows: [output, pixel of the kernel, channel]."""
    schema = "patches(Tensor x, int[] kernel, int[] stride, int[] padding) -> Tensor"
    op = own.declared(schema, _plain)
    code.generate_for(op)
    return op


def _plain(x: Tensor, kernel: Sequence[int], steps: Sequence[int], pads: Sequence[int]) -> Tensor:
    high, wide = pads
    seen = torch.nn.functional.pad(x, [wide, wide, high, high])
    for dim in (0, 1):
        seen = seen.unfold(2 + dim, kernel[dim], steps[dim])
    return seen.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(0, 2)
