"""What a program is called with: `Input`, the declared inputs, and the check at each call."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from torchgraft import _torch
from torchgraft.errors import BadValue, InputMismatch

_UNBOUNDED_EXAMPLE = 16


class Input:
    """An input by its type alone: no tensor needed to compile.

    One of: a fixed `shape`; `min_shape` and `max_shape`, equal where a dim is fixed (None in
    `max_shape`: no upper bound); `gears`, a list of shapes of which each gets its own program.

    >>> Input((8, 64), dtype=torch.float16)
    Input((8, 64), dtype=torch.float16)
    >>> Input(min_shape=(1, 64), max_shape=(32, 64)).ranges
    ((1, 32), (64, 64))
    """

    def __init__(
        self,
        shape: Sequence[int] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        min_shape: Sequence[int] | None = None,
        max_shape: Sequence[int | None] | None = None,
        gears: Sequence[Sequence[int]] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(dtype, torch.dtype):
            raise BadValue("Input.dtype", dtype, "a torch.dtype")
        self.dtype = dtype
        self.device = torch.device(device) if device is not None else None
        forms = (shape is not None, min_shape is not None or max_shape is not None, bool(gears))
        if sum(forms) != 1:
            raise BadValue(
                "Input", (shape, min_shape, max_shape, gears), "shape, min/max_shape or gears"
            )
        self.gears: tuple[tuple[int, ...], ...] = ()
        self.ranges: tuple[tuple[int, int | None], ...] = ()
        if gears:
            self.gears = tuple(_sizes("Input.gears", gear) for gear in gears)
            if len({len(gear) for gear in self.gears}) != 1:
                raise BadValue("Input.gears", self.gears, "shapes of one rank")
        elif shape is not None:
            self.ranges = tuple((size, size) for size in _sizes("Input.shape", shape))
        else:
            self.ranges = _ranges(min_shape, max_shape)

    @property
    def is_dynamic(self) -> bool:
        return any(low != high for low, high in self.ranges)

    def at_gear(self, index: int) -> Input:
        """This input with one of its gears as its shape (itself where it has none)."""
        if not self.gears:
            return self
        return Input(self.gears[index], dtype=self.dtype, device=self.device)

    def example(self, device: torch.device) -> Tensor:
        """A tensor of this type; a dynamic dim gets a size from its range that is not special."""
        sizes = [_example_size(low, high) for low, high in self.ranges]
        return torch.zeros(sizes, dtype=self.dtype, device=self.device or device)

    def __repr__(self) -> str:
        if self.gears:
            what = f"gears={list(self.gears)}"
        elif self.is_dynamic:
            low, high = zip(*self.ranges, strict=True)
            what = f"min_shape={low}, max_shape={high}"
        else:
            what = f"{tuple(low for low, _ in self.ranges)}"
        extra = f", device={str(self.device)!r}" if self.device else ""
        return f"Input({what}, dtype={self.dtype}{extra})"


def _sizes(field: str, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, (tuple, list)) or not all(
        isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in shape
    ):
        raise BadValue(field, shape, "a shape: non-negative ints")
    return tuple(shape)


def _ranges(low: Any, high: Any) -> tuple[tuple[int, int | None], ...]:
    lows = _sizes("Input.min_shape", low)
    bounded = high if isinstance(high, (tuple, list)) else None
    if bounded is None or len(bounded) != len(lows):
        raise BadValue("Input.max_shape", high, f"{len(lows)} sizes, as min_shape has")
    _sizes("Input.max_shape", [s for s in bounded if s is not None])
    for small, large in zip(lows, bounded, strict=True):
        if large is not None and large < small:
            raise BadValue("Input.max_shape", tuple(bounded), f"no less than min_shape {lows}")
    return tuple(zip(lows, bounded, strict=True))


def _example_size(low: int, high: int | None) -> int:
    if low == high:
        return low
    return min(max(low, _UNBOUNDED_EXAMPLE), _UNBOUNDED_EXAMPLE if high is None else high)


# --- What the user declared ---


@dataclasses.dataclass(frozen=True)
class Declared:
    """One shape of call that a program is compiled for."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic: Any  # torch.export's dynamic_shapes, or None
    names: tuple[str, ...]
    ranges: tuple[tuple[tuple[int, int | None], ...] | None, ...]


def declare(
    model: Any, inputs: Any, kwargs: Mapping[str, Any] | None, device: torch.device
) -> list[Declared]:
    """The declared calls: one, or one per gear."""
    if isinstance(inputs, (Tensor, Input)):
        inputs = (inputs,)
    if not isinstance(inputs, (tuple, list)):
        raise BadValue("inputs", inputs, "a tuple of tensors, graft.Input or nested containers")
    args, named = tuple(inputs), dict(kwargs or {})
    leaves, spec = _torch.flatten((args, named))
    gears = {len(leaf.gears) for leaf in leaves if isinstance(leaf, Input) and leaf.gears}
    if len(gears) > 1:
        raise BadValue("gears", sorted(gears), "the same number of gears for every input")
    names = leaf_names(model, args, named)
    result = []
    for gear in range(max(gears, default=1)):
        typed = [leaf.at_gear(gear) if isinstance(leaf, Input) else leaf for leaf in leaves]
        examples = [leaf.example(device) if isinstance(leaf, Input) else leaf for leaf in typed]
        dims = [_dims(leaf) for leaf in typed]
        one, many = _torch.unflatten(examples, spec)
        shapes = _dynamic_shapes(model, *_torch.unflatten(dims, spec)) if any(dims) else None
        ranges = tuple(leaf.ranges if isinstance(leaf, Input) else None for leaf in typed)
        result.append(Declared(one, many, shapes, names, ranges))
    return result


def _dims(leaf: Any) -> dict[int, Any] | None:
    if not isinstance(leaf, Input) or not leaf.is_dynamic:
        return None
    return {
        i: Dim.AUTO(min=low, max=high) for i, (low, high) in enumerate(leaf.ranges) if low != high
    }


def _dynamic_shapes(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """torch.export wants the dims by parameter name, `*args` as one tuple."""
    bound = _signature(model).bind(*args, **kwargs)
    shapes: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            shapes.update(value)
        else:
            shapes[name] = value
    return shapes


def leaf_names(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """A name for each leaf, as an error message should say it: `x`, `batch['mask']`."""
    try:
        arguments = _signature(model).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise BadValue("inputs", tuple(map(type, args)), f"what forward takes ({error})") from None
    order = list(arguments)
    named = []
    for path, _ in _torch.flatten_with_paths(args):
        head, _, rest = path[1:].partition("]")
        index = int(head)
        name = order[index] if index < len(order) else f"args[{index}]"
        named.append(name + rest)
    for path, _ in _torch.flatten_with_paths(kwargs):
        head, _, rest = path[2:].partition("']")
        named.append(head + rest)
    return tuple(named)


def _signature(model: Any) -> inspect.Signature:
    return inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)


# --- The check at each call ---


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor input: sizes are ints, or sympy expressions of the program's symbols."""

    name: str
    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...] | None  # None: contiguous
    mutated: bool = False

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
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
            if (error := _misfit(spec, leaf, symbols, self.ranges)) is not None:
                return error
        for condition, line in self.guards:
            if not _torch.evaluate(condition, tuple(symbols.items())):
                sizes = ", ".join(f"{k}={v}" for k, v in symbols.items())
                return InputMismatch(
                    "sizes",
                    f"sizes with {condition} (assumed at {line})",
                    sizes,
                    "Compile with an example of such a size, or declare it as a gear.",
                )
        return None


def _misfit(
    spec: Spec,
    leaf: Any,
    symbols: dict[str, int],
    ranges: Mapping[str, tuple[int, int | None]],
) -> InputMismatch | None:
    if isinstance(spec, TypeSpec):
        if type(leaf) is spec.type:
            return None
        return InputMismatch(spec.name, f"a {spec}", repr(leaf), f"Pass a {spec}.")
    if isinstance(spec, ConstSpec):
        if type(leaf) is type(spec.value) and leaf == spec.value:
            return None
        return InputMismatch(
            spec.name,
            f"the constant {spec.value!r}",
            repr(leaf),
            "The program was compiled for that value; compile again for another one.",
        )
    if not isinstance(leaf, Tensor):
        return InputMismatch(
            spec.name, str(spec), f"{type(leaf).__name__} {leaf!r}", "Pass a tensor."
        )
    if leaf.dtype != spec.dtype:
        fix = f"Convert it with .to({spec.dtype}), or compile for {leaf.dtype}."
        return InputMismatch(spec.name, f"dtype {spec.dtype}", f"{leaf.dtype}", fix)
    if leaf.device != spec.device:
        fix = f"Move it with .to({str(spec.device)!r}), or compile for {leaf.device}."
        return InputMismatch(spec.name, f"device {spec.device}", f"{leaf.device}", fix)
    if leaf.ndim != len(spec.shape):
        fix = "Reshape it, or compile for that rank."
        got = f"{leaf.ndim} dims {tuple(leaf.shape)}"
        return InputMismatch(spec.name, f"{len(spec.shape)} dims {_shown(spec.shape)}", got, fix)
    for dim, (want, size) in enumerate(zip(spec.shape, leaf.shape, strict=True)):
        if (problem := _size_misfit(want, int(size), symbols, ranges)) is not None:
            fix = (
                "Declare graft.Input(min_shape=..., max_shape=...) or gears=[...] for other sizes."
            )
            got = f"{size} (shape {tuple(leaf.shape)})"
            return InputMismatch(spec.name, f"{problem} in dim {dim}", got, fix)
    return None


def _size_misfit(
    want: Any, size: int, symbols: dict[str, int], ranges: Mapping[str, tuple[int, int | None]]
) -> str | None:
    name = str(want)
    if isinstance(want, int):
        return None if size == want else f"size {want}"
    if name in ranges and name not in symbols:
        low, high = ranges[name]
        if size < low or (high is not None and size > high):
            return f"a size from {low} to {'any' if high is None else high}"
        symbols[name] = size
        return None
    expected = symbols.get(name, _torch.evaluate(want, tuple(symbols.items())))
    return None if size == expected else f"size {expected} (the same as another input's {name})"


def _shown(shape: tuple[Any, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


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
        specs.append(TensorSpec(name, tuple(shape), leaf.dtype, leaf.device, None))
    return Signature(tuple(specs), tree, None, ranges)


def tensors(specs: Sequence[Spec]) -> Iterator[tuple[int, TensorSpec]]:
    """The tensor inputs with their positions among the leaves."""
    for i, spec in enumerate(specs):
        if isinstance(spec, TensorSpec):
            yield i, spec
