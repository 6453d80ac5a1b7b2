"""The signature of a compiled program, and whether a call fits it."""

from __future__ import annotations

import dataclasses
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgraft import _torch
from torchgraft.errors import InputMismatch
from torchgraft.inputs import Declared


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor input: sizes are ints, or sympy expressions of the program's symbols."""

    name: str
    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...] | None  # None: contiguous in `format`
    mutated: bool = False
    format: torch.memory_format = torch.contiguous_format
    layout: torch.layout = torch.strided

    def __str__(self) -> str:
        return self.shown(", ".join(map(str, self.shape)))

    def shown(self, sizes: str) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}] on {self.device}"


@dataclasses.dataclass(frozen=True)
class ConstSpec:
    """A number, string or None that the program was compiled with."""

    name: str
    value: Any

    def __str__(self) -> str:
        return repr(self.value)


@dataclasses.dataclass(frozen=True)
class TypeSpec:
    """A number, string or None that the program takes as an argument: any value of its type."""

    name: str
    type: type

    def __str__(self) -> str:
        return self.type.__name__


Spec = TensorSpec | ConstSpec | TypeSpec
_FIX = "Declare such a size as a gear, or change the line that assumes it."


@dataclasses.dataclass(frozen=True)
class Signature:
    """The inputs and outputs of one compiled program."""

    specs: tuple[Spec, ...]
    tree: Any
    out_tree: Any
    ranges: Mapping[str, tuple[int, int | None]]  # by symbol
    guards: tuple[tuple[Any, str], ...] = ()  # sympy condition over the symbols, source line

    def misfit(self, leaves: Sequence[Any]) -> InputMismatch | None:
        """Why these leaves do not fit, or None. Strides are not a reason: the call adapts them."""
        symbols: dict[str, int] = {}
        for spec, leaf in zip(self.specs, leaves, strict=True):
            if isinstance(spec, TensorSpec) and isinstance(leaf, Tensor) and not leaf.is_nested:
                for want, size in zip(spec.shape, leaf.shape, strict=False):
                    if str(want) in self.ranges:
                        symbols.setdefault(str(want), int(size))
        for spec, leaf in zip(self.specs, leaves, strict=True):
            if (error := _misfit(spec, leaf, symbols, self)) is not None:
                return error
        if (
            pair := entangled([leaves[i] for i, _ in tensors(self.specs)], self.written)
        ) is not None:
            one, two = (list(tensors(self.specs))[i][1].name for i in pair)
            return InputMismatch(
                one,
                "memory of its own, because the program writes to it",
                f"memory that {two!r} has, too",
                f"Pass a copy: {two}.clone().",
            )
        for condition, line in self.guards:
            if not _torch.evaluate(condition, tuple(symbols.items())):
                used = {str(symbol) for symbol in condition.free_symbols}
                sizes = [f"{self.named(k)} = {v}" for k, v in symbols.items() if k in used]
                return InputMismatch(
                    "sizes",
                    f"sizes with {self.named(condition)} (assumed at {line})",
                    ", ".join(sizes),
                    _FIX,
                )
        return None

    def excluded(self) -> list[str]:
        """The ends of declared ranges that calls are refused for: what compiling assumed fails
        there."""
        found: dict[str, str] = {}
        for condition, line in self.guards:
            names = [str(symbol) for symbol in condition.free_symbols]
            for end in self.ranges[names[0]] if len(names) == 1 else ():
                if end is not None and not _torch.evaluate(condition, ((names[0], end),)):
                    why = f"compiling assumed {self.named(condition)} at {line}"
                    found.setdefault(f"{self.named(names[0])} = {end}", why)
        return [
            f"calls with {size}, which was declared, will be refused: {why}. {_FIX}"
            for size, why in found.items()
        ]

    @property
    def written(self) -> tuple[int, ...]:
        """Which of the tensor inputs the program writes to."""
        return tuple(i for i, (_, spec) in enumerate(tensors(self.specs)) if spec.mutated)

    def named(self, expr: Any) -> str:
        """An expression of symbols as the user knows them: `x.shape[0]` for `s77`."""
        text = str(expr)
        for _, spec in tensors(self.specs):
            for dim, size in enumerate(spec.shape):
                if str(size) in self.ranges:
                    text = re.sub(rf"\b{size}\b", f"{spec.name}.shape[{dim}]", text)
        return text

    def sizes(self, spec: TensorSpec) -> str:
        """The sizes of an input as the user declared them: `1 to 32, 8`."""
        return ", ".join(
            span(*self.ranges[str(size)]) if str(size) in self.ranges else self.named(size)
            for size in spec.shape
        )


def span(low: int, high: int | None) -> str:
    """A range of sizes in words."""
    return f"{low} to {'any' if high is None else high}"


def _misfit(
    spec: Spec,
    leaf: Any,
    symbols: dict[str, int],
    signature: Signature,
) -> InputMismatch | None:
    if isinstance(spec, TypeSpec):
        if type(leaf) is spec.type:
            return None
        return InputMismatch(spec.name, f"a {spec}", repr(leaf), f"Pass a {spec}.")
    if isinstance(spec, ConstSpec):
        if type(leaf) is type(spec.value) and repr(leaf) == repr(spec.value):  # nan is nan
            return None
        return InputMismatch(
            spec.name,
            f"the constant {spec.value!r}",
            repr(leaf),
            "The program was compiled for that value; compile again for another one.",
        )
    if not isinstance(leaf, Tensor):
        kind, shape = type(leaf).__name__, getattr(leaf, "shape", None)
        got = f"{kind} {reprlib.repr(leaf)}" if shape is None else f"{kind} of shape {shape}"
        fix = "Pass a tensor." if shape is None else "Pass a tensor: torch.as_tensor(x)."
        return InputMismatch(spec.name, spec.shown(signature.sizes(spec)), got, fix)
    if type(leaf).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        fix = "Pass the tensor that it stands for; a compiled program reads its memory."
        return InputMismatch(spec.name, "a plain tensor", type(leaf).__name__, fix)
    if leaf.is_nested or leaf.layout != spec.layout:
        want = str(spec.layout).removeprefix("torch.")
        got = "a nested tensor" if leaf.is_nested else f"layout {leaf.layout}"
        fix = "Pass it dense: .to_dense(), or torch.nested.to_padded_tensor(x, 0.0)."
        return InputMismatch(spec.name, f"a {want} tensor", got, fix)
    if leaf.dtype != spec.dtype:
        fix = f"Convert it with .to({spec.dtype}), or compile for {leaf.dtype}."
        return InputMismatch(spec.name, f"dtype {spec.dtype}", f"{leaf.dtype}", fix)
    if leaf.device != spec.device:
        fix = f"Move it with .to({str(spec.device)!r}), or compile for {leaf.device}."
        return InputMismatch(spec.name, f"device {spec.device}", f"{leaf.device}", fix)
    if leaf.ndim != len(spec.shape):
        fix = "Reshape it, or compile for that rank."
        got = f"{leaf.ndim} dims {tuple(leaf.shape)}"
        want = f"{len(spec.shape)} dims ({signature.sizes(spec)})"
        return InputMismatch(spec.name, want, got, fix)
    for dim, (want, size) in enumerate(zip(spec.shape, leaf.shape, strict=True)):
        if (problem := _size_misfit(want, int(size), symbols, signature)) is not None:
            fix = (
                "Declare graft.Input(min_shape=..., max_shape=...) or gears=[...] for other sizes."
            )
            got = f"{size} (shape {tuple(leaf.shape)})"
            return InputMismatch(spec.name, f"{problem} in dim {dim}", got, fix, is_size=True)
    return None


def _size_misfit(want: Any, size: int, symbols: dict[str, int], signature: Signature) -> str | None:
    if isinstance(want, int):
        return None if size == want else f"size {want}"
    low, high = signature.ranges.get(str(want), (0, None))
    if size < low or (high is not None and size > high):
        return f"a size from {span(low, high)}"
    expected = symbols.get(str(want))
    if expected is None:
        expected = _torch.evaluate(want, tuple(symbols.items()))
    return None if size == expected else f"size {expected} ({signature.named(want)})"


def checked(declared: Declared) -> Signature:
    """The signature of a declared call, for a program that was not captured as a whole."""
    leaves, tree = _torch.flatten((declared.args, declared.kwargs))
    specs: list[Spec] = []
    ranges: dict[str, tuple[int, int | None]] = {}
    for name, leaf, bounds in zip(declared.names, leaves, declared.ranges, strict=True):
        if not isinstance(leaf, Tensor):
            specs.append(TypeSpec(name, type(leaf)))
            continue
        shape: list[Any] = list(leaf.shape)
        for dim, (low, high) in enumerate(bounds or ()):
            if low != high:
                shape[dim] = symbol = f"{name}.shape[{dim}]"
                ranges[symbol] = (low, high)
        spec = TensorSpec(name, tuple(shape), leaf.dtype, leaf.device, None, layout=leaf.layout)
        specs.append(spec)
    return Signature(tuple(specs), tree, None, ranges)


def tensors(specs: Sequence[Spec]) -> Iterator[tuple[int, TensorSpec]]:
    """The tensor inputs with their positions among the leaves."""
    for i, spec in enumerate(specs):
        if isinstance(spec, TensorSpec):
            yield i, spec


def entangled(given: Sequence[Tensor], written: Sequence[int]) -> tuple[int, int] | None:
    """The first two tensors that share an element, where one of them is written to."""
    if not written or len(given) < 2:
        return None
    at = [t.untyped_storage().data_ptr() if t.layout == torch.strided else 0 for t in given]
    for i in written:
        for j, address in enumerate(at):
            if address and address == at[i] and i != j and _overlap(given[i], given[j]):
                return i, j
    return None


def _overlap(one: Tensor, two: Tensor) -> bool:
    if one is two or one.dtype != two.dtype:
        return True
    ends = [
        (t.storage_offset(), t.storage_offset() + sum((n - 1) * s for n, s in _strides(t)) + 1)
        for t in (one, two)
    ]
    (low, high), (low2, high2) = ends
    if 0 in (one.numel(), two.numel()) or high <= low2 or high2 <= low:
        return False
    first = min(low, low2)
    marks = torch.zeros(max(high, high2) - first, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), low - first).fill_(True)
    return bool(marks.as_strided(two.shape, two.stride(), low2 - first).any())


def _strides(tensor: Tensor) -> Iterator[tuple[int, int]]:
    return zip(tensor.shape, tensor.stride(), strict=True)
