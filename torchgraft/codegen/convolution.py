"""A convolution with constant weights on CPU, and what follows it, as one call of ours."""

from __future__ import annotations

import abc
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from torchgraft.fx import meta
from torchgraft.fx.dialect import is_held

aten = torch.ops.aten


def replace(gm: GraphModule, mode: Any, kind: type[Convolution]) -> bool:
    """Replace those that are of a kind; whether there are any. `mode` is the fake mode of the
    graph's values."""
    gm.meta["fake_mode"] = mode
    found = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    chosen = [node for node in found if _is_plain(node) and kind(gm, node).fits()]
    for node in chosen:
        kind(gm, node).replace()  # anew: what it reads may have been replaced
    return bool(chosen)


def _is_plain(node: Node) -> bool:
    """Two-dimensional, of float32 on CPU, with constant weights and known sizes."""
    data, weight, *_, transposed, _, _ = node.args
    x, out = data.meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return (
        out.device.type == "cpu"
        and out.dtype == torch.float32
        and out.ndim == 4
        and not transposed
        and all(isinstance(size, int) for size in x.shape)
        and is_held(weight)  # type: ignore[arg-type]
        and min(out.shape) > 0
    )


def both(numbers: Sequence[int]) -> list[int]:
    """One for rows and one for columns, where a call may give one for both."""
    return [*numbers] if len(numbers) == 2 else [*numbers] * 2


class Convolution(abc.ABC):
    """One call of `aten.convolution`, what follows it, and what takes the place of both."""

    def __init__(self, gm: GraphModule, node: Node) -> None:
        self.gm, self.node = gm, node
        args: Any = node.args
        self.data, self.weight, self.bias = args[:3]
        self.steps, self.pads, self.dilation = (both(numbers) for numbers in args[3:6])
        self.groups: int = args[8]
        self.other: Node | None = None
        self.then = ""

    @abc.abstractmethod
    def fits(self) -> bool:
        """Whether this kind is for it and pays."""

    @abc.abstractmethod
    def made(self, weight: Node, bias: Node | None, out: Tensor) -> Node:
        """The call that stands for all of it and gives `out`."""

    def replace(self) -> None:
        """Constant normalisation, a sum and what is done number by number become part of it."""
        parts = [self.node]
        if norm := self._normalised():
            parts += norm
        if total := self._summed(parts[-1]):
            parts.append(total)
        self.then, after = _followed(parts[-1])
        parts += after
        with self.gm.graph.inserting_before(parts[-1]):
            weight, bias = self._normalise(norm[0]) if norm else (self.weight, self.bias)
            made = self.made(weight, bias, parts[-1].meta["val"])
        parts[-1].replace_all_uses_with(made)
        for node in reversed(parts):
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
        factor = self.call(aten.rsqrt.default, self.call(aten.add.Tensor, variance, eps))
        if scale is not None:
            factor = self.call(aten.mul.Tensor, factor, scale)
        if self.bias is not None:
            mean = self.call(aten.sub.Tensor, mean, self.bias)
        bias = self.call(aten.neg.default, self.call(aten.mul.Tensor, mean, factor))
        if shift is not None:
            bias = self.call(aten.add.Tensor, bias, shift)
        each = self.call(aten.reshape.default, factor, [-1, 1, 1, 1])
        return self.call(aten.mul.Tensor, self.weight, each), bias

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

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return meta.call(self.gm, self.node, target, *args, **kwargs)


def _only(node: Node, target: Any) -> Node | None:
    """The call of `target` that is all there is done with a value."""
    [*users] = node.users
    return users[0] if len(users) == 1 and users[0].target is target else None


# --- What is done number by number ---

_THEN: dict[str, tuple[Callable[..., Tensor], str]] = {
    "relu": (F.relu, "at::vec::maximum(v, Vec(0.0f))"),
    "clamp": (torch.clamp, "at::vec::clamp(v, Vec({}f), Vec({}f))"),
    "silu": (F.silu, "v / (Vec(1.0f) + v.neg().exp_u20())"),
    "gelu": (F.gelu, "Vec(0.5f) * v * (Vec(1.0f) + (v * Vec(0.70710678f)).erf())"),
}


def _followed(node: Node) -> tuple[str, list[Node]]:
    """What is done with a value and nothing else is, and the calls that do it: a name in `_THEN`,
    with numbers."""
    match list(node.users):
        case [then] if then.target is aten.relu.default:
            return "relu", [then]
        case [then] if limits := _limits(then):
            return f"clamp {limits[0]} {limits[1]}", [then]
        case [then] if then.target is aten.gelu.default and not then.kwargs:
            return "gelu", [then]
        case [gate, then] if gate.target is aten.sigmoid.default and [*gate.users] == [then]:
            if then.target is aten.mul.Tensor and set(then.args) == {node, gate}:
                return "silu", [gate, then]
    return "", []


def _limits(node: Node) -> list[float]:
    """Between which numbers a call keeps its values."""
    given: list[Any] = list(node.args[1:])
    if node.target is aten.hardtanh.default:
        given += [-1.0, 1.0][len(given) :]
    elif node.target is not aten.clamp.default:
        return []
    known = [float(limit) for limit in given if isinstance(limit, (int, float))]
    return known if len(known) == 2 and all(map(math.isfinite, known)) else []


def source(then: str) -> str:
    """What follows, in C++, for kernels whose vectors are `Vec`."""
    name, *numbers = then.split() or [""]
    text = _THEN[name][1].format(*numbers) if name else "v"
    return f"\ninline Vec then(const Vec& v) {{ return {text}; }}\n"


# --- What the operators that stand for convolutions have in common ---

SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? other, int[] kernel, int[] steps, "
    "int[] padding, int[] dilation, int groups, str then, int[] size, int[] stride) -> Tensor"
)


def finished(
    made: Tensor, other: Tensor | None, then: str, size: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """A convolution's values with what follows them, laid out as declared."""
    made = made if other is None else made + other
    name, *numbers = then.split() or [""]
    made = _THEN[name][0](made, *map(float, numbers)) if name else made
    return made.new_empty_strided(size, stride).copy_(made)


def fake(x: Tensor, *args: Any) -> Tensor:
    """A tensor of the size and stride that an operator of these is told last."""
    *_, size, stride = args
    return x.new_empty_strided(size, stride)
