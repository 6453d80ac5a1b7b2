"""What a program is declared to be called with: `Input`, and the calls it stands for."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from torchgraft import _torch
from torchgraft.errors import BadValue

_UNBOUNDED_EXAMPLE = 16


class Input:
    """An input by its type alone: no tensor needed to compile.

    One of: a fixed `shape`; `min_shape` and `max_shape`, equal where a dim is fixed (None in
    `max_shape`: no upper bound); `gears`, a list of shapes of which each gets its own program.
    `example` is a shape in the range, to trace with: needed where the program ties the sizes of
    two inputs together and their ranges differ.

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
        example: Sequence[int] | None = None,
        gears: Sequence[Sequence[int]] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(dtype, torch.dtype):
            raise BadValue("Input.dtype", dtype, "a torch.dtype")
        self.dtype = dtype
        try:
            self.device = torch.device(device) if device is not None else None
        except (RuntimeError, TypeError):
            raise BadValue("Input.device", device, "a device such as 'cpu' or 'cuda:0'") from None
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
        self._example = None if example is None else _within(example, self.ranges)

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
        sizes = self._example or [_example_size(low, high) for low, high in self.ranges]
        return torch.zeros(sizes, dtype=self.dtype, device=self.device or device)

    def __repr__(self) -> str:
        if self.gears:
            what = f"gears={list(self.gears)}"
        elif self.is_dynamic:
            low, high = zip(*self.ranges, strict=True)
            what = f"min_shape={low}, max_shape={high}"
        else:
            what = f"{tuple(low for low, _ in self.ranges)}"
        extra = f", example={self._example}" if self._example else ""
        extra += f", device={str(self.device)!r}" if self.device else ""
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


def _within(example: Any, ranges: tuple[tuple[int, int | None], ...]) -> tuple[int, ...]:
    sizes = _sizes("Input.example", example)
    if len(sizes) != len(ranges) or any(
        size < low or (high is not None and size > high)
        for size, (low, high) in zip(sizes, ranges, strict=True)
    ):
        raise BadValue("Input.example", sizes, "a shape from min_shape to max_shape")
    return sizes


def _example_size(low: int, high: int | None) -> int:
    if low == high:
        return low
    return min(max(low, _UNBOUNDED_EXAMPLE), _UNBOUNDED_EXAMPLE if high is None else high)


@dataclasses.dataclass(frozen=True)
class Declared:
    """One shape of call that a program is compiled for."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic: Any  # torch.export's dynamic_shapes, or None
    names: tuple[str, ...]
    ranges: tuple[tuple[tuple[int, int | None], ...] | None, ...]

    def traced_sizes(self) -> str:
        """The inputs with dynamic dims, and the sizes they are traced with."""
        leaves = _torch.flatten((self.args, self.kwargs))[0]
        return ", ".join(
            f"{name} {tuple(leaf.shape)}"
            for name, leaf, ranges in zip(self.names, leaves, self.ranges, strict=True)
            if ranges and any(low != high for low, high in ranges)
        )


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
    names = leaf_names(model, args, named)
    counts = {
        name: len(leaf.gears)
        for name, leaf in zip(names, leaves, strict=True)
        if isinstance(leaf, Input) and leaf.gears
    }
    if len(set(counts.values())) > 1:
        raise BadValue("gears", counts, "as many gears for each input: gear i of all go together")
    result = []
    for gear in range(max(counts.values(), default=1)):
        typed = [leaf.at_gear(gear) if isinstance(leaf, Input) else leaf for leaf in leaves]
        examples = [leaf.example(device) if isinstance(leaf, Input) else leaf for leaf in typed]
        examples = [_spread(leaf) if isinstance(leaf, Tensor) else leaf for leaf in examples]
        dims = [_dims(leaf) for leaf in typed]
        one, many = _torch.unflatten(examples, spec)
        shapes = _dynamic_shapes(model, *_torch.unflatten(dims, spec)) if any(dims) else None
        ranges = tuple(leaf.ranges if isinstance(leaf, Input) else None for leaf in typed)
        result.append(Declared(one, many, shapes, names, ranges))
    return result


def _spread(example: Tensor) -> Tensor:
    """An example whose elements have memory of their own, as those of a later call may have: an
    expanded one, or one of overlapping windows, would be compiled as if they were always equal."""
    if example.layout != torch.strided or example.is_nested:
        return example
    reach = 0
    for stride, size in sorted(zip(example.stride(), example.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return example.contiguous()
            reach += stride * (size - 1)
    return example


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
    try:
        return inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
    except ValueError:  # a builtin such as torch.sin
        return inspect.signature(lambda *args, **kwargs: None)
