"""3 x 3 convolutions by Winograd's algorithm, for which code is generated.

Four outputs take 16 multiplications a channel where the sums themselves take 36, and oneDNN, which
computes those, is at the processor's limit (docs/performance.md).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft._torch import winograd as code
from torchgraft.codegen import own
from torchgraft.fx import meta

aten = torch.ops.aten

PANEL, LEAST = code.PANEL, code.LEAST
SHARE = 24
"""Tiles of each of several threads: each reads all weights, and fewer were not measured."""


def as_code(gm: GraphModule, mode: Any) -> bool:
    """Replace 3 x 3 convolutions with constant weights on CPU; whether there are any. What follows
    one is part of it: constant normalisation, a sum, relu. `mode` is the fake mode of the graph."""
    if not own.is_ahead("amd", "intel"):
        return False
    found = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    chosen = [node for node in found if _fits(*node.args, out=node.meta["val"])]
    gm.meta["fake_mode"] = mode
    for node in chosen:
        _Convolution(gm, node).replace()
    return bool(chosen)


def _fits(
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
    x, held = data.meta["val"], weight.meta["val"]
    return (
        out.device.type == "cpu"
        and out.dtype == torch.float32
        and out.ndim == 4
        and not transposed
        and groups == 1
        and list(held.shape[2:]) == [3, 3]
        and all(number == 1 for number in (*steps, *dilation))
        and all(isinstance(size, int) for size in x.shape)
        and weight.op == "get_attr"
        and held.shape[0] % LEAST == held.shape[1] % LEAST == 0
        and min(out.shape) > 0
        and out.shape[0] * code.tiles_of(*out.shape[2:]) >= _fewest(torch.get_num_threads())
    )


def _fewest(threads: int) -> int:
    """Tiles from which it pays; they are shared out among threads."""
    return code.ROWS if threads == 1 else SHARE * threads


class _Convolution:
    """One call of `aten.convolution`, what follows it, and what takes the place of both."""

    def __init__(self, gm: GraphModule, node: Node) -> None:
        self.gm, self.node = gm, node
        args: Any = node.args
        self.data, self.weight, self.bias, _, self.pads = args[:5]
        self.other: Node | None = None
        self.relu = False

    def replace(self) -> None:
        norm = self._normalised()
        end = norm[-1] if norm else self.node
        total = self._summed(end)
        end = total or end
        if relu := _only(end, aten.relu.default):
            end, self.relu = relu, True
        with self.gm.graph.inserting_before(end):
            weight, bias = self._normalise(norm[0]) if norm else (self.weight, self.bias)
            packed, value = self._packed(weight), end.meta["val"]
            how = list(self.pads), self.relu, list(value.shape), list(value.stride())
            made = self._call(winograd(), self.data, packed, bias, self.other, *how)
        end.replace_all_uses_with(made)
        for node in dict.fromkeys((end, *filter(None, (total,)), *reversed(norm), self.node)):
            self.gm.graph.erase_node(node)

    def _normalised(self) -> list[Node]:
        """The batch normalisation of this convolution alone, by constants, and its result."""
        norm = _only(self.node, aten._native_batch_norm_legit_no_training.default)
        if norm is None or self.node in norm.args[1:5]:
            return []
        result = _only(norm, operator.getitem)
        given = [value for value in norm.args[1:5] if isinstance(value, Node)]
        held = all(n.op == "get_attr" and n.meta["val"].dtype == torch.float32 for n in given)
        return [norm, result] if held and result is not None and result.args[1] == 0 else []

    def _normalise(self, norm: Node) -> tuple[Node, Node]:
        """Weight and bias with the normalisation in them."""
        scale, shift, mean, variance, _, eps = norm.args[1:]
        factor = self._call(aten.rsqrt.default, self._call(aten.add.Tensor, variance, eps))
        if scale is not None:
            factor = self._call(aten.mul.Tensor, factor, scale)
        if self.bias is not None:
            mean = self._call(aten.sub.Tensor, mean, self.bias)
        bias = self._call(aten.neg.default, self._call(aten.mul.Tensor, mean, factor))
        if shift is not None:
            bias = self._call(aten.add.Tensor, bias, shift)
        each = self._call(aten.reshape.default, factor, [-1, 1, 1, 1])
        return self._call(aten.mul.Tensor, self.weight, each), bias

    def _summed(self, end: Node) -> Node | None:
        """The sum of `end`, which has no other use, and an image like it."""
        total = _only(end, aten.add.Tensor)
        if total is None or total.kwargs or total.args[0] is total.args[1]:
            return None
        [other] = (arg for arg in total.args if arg is not end)
        value, mine = getattr(other, "meta", {}).get("val"), end.meta["val"]
        if not isinstance(value, Tensor) or value.shape != mine.shape or value.dtype != mine.dtype:
            return None
        self.other = other  # type: ignore[assignment]
        return total

    def _packed(self, weight: Node) -> Node:
        """GwG' as panels [panel][16][channel][output of the panel], one after the other."""
        for dim in (2, 3):
            first, middle, last = (self._call(aten.select.int, weight, dim, i) for i in range(3))
            half = self._half(self._call(aten.add.Tensor, first, last))
            other = self._half(middle)
            both = (self._call(op.Tensor, half, other) for op in (aten.add, aten.sub))
            weight = self._call(aten.stack.default, [first, *both, last], dim)
        outs, depth = weight.meta["val"].shape[:2]
        whole = outs // PANEL * PANEL
        panels = [
            self._panels(self._call(aten.slice.Tensor, weight, 0, start, end), width, depth)
            for start, end, width in ((0, whole, PANEL), (whole, outs, LEAST))
            if start < end
        ]
        return self._call(aten.cat.default, panels) if len(panels) > 1 else panels[0]

    def _panels(self, weight: Node, width: int, depth: int) -> Node:
        parts = self._call(aten.reshape.default, weight, [-1, width, depth, 16])
        parts = self._call(aten.permute.default, parts, [0, 3, 2, 1])
        laid = self._call(aten.clone.default, parts, memory_format=torch.contiguous_format)
        return self._call(aten.reshape.default, laid, [-1])

    def _half(self, value: Node) -> Node:
        return self._call(aten.mul.Tensor, value, 0.5)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return meta.call(self.gm, self.node, target, *args, **kwargs)


def _only(node: Node, target: Any) -> Node | None:
    """The call of `target` that is all there is done with a value."""
    [*users] = node.users
    return users[0] if len(users) == 1 and users[0].target is target else None


# --- The operator that stands for it in a graph ---


@functools.cache
def winograd() -> Any:
    """relu(convolution + bias + other) with weights that are transformed and packed; `size` and
    `stride` are the result's."""
    schema = (
        "winograd(Tensor x, Tensor weight, Tensor? bias, Tensor? other, int[] padding, bool relu, "
        "int[] size, int[] stride) -> Tensor"
    )
    op = own.declared(schema, _plain, Meta=_fake)
    code.generate_for(op)
    return op


def _plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    padding: Sequence[int],
    relu: bool,
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
    made = made if other is None else made + other
    laid_out = x.new_empty_strided(size, stride)
    return laid_out.copy_(made.relu() if relu else made)


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    padding: Sequence[int],
    relu: bool,
    size: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    return x.new_empty_strided(size, stride)
