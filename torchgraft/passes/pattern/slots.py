"""A pattern's arguments: what each may bind, and the values that it is traced with.

A pattern is traced twice with everything different (sizes, numbers). What differs between the two
traces hangs on an argument; what is equal was written as a literal.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgraft.errors import BadPattern

KINDS = (Tensor, float, int, bool)
SIDES = 2
"""How many traces are compared."""
_RANKS = (2, 3, 4, 1)

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}
FLOATS = (
    (torch.float32, torch.float64),
    (torch.bfloat16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
)
"""Pairs of dtypes for arguments whose type names none. Later ones matter where the first two
dtypes of a pair give different graphs."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """An argument of a pattern: its name and what it binds."""

    name: str
    kind: type  # Tensor, float, int or bool
    many: bool = False  # a list of them
    optional: bool = False
    number: bool = False  # a tensor that may be a number in the graph

    def takes(self, value: Any) -> bool:
        """Whether a number, or a list of numbers, that a graph holds fits."""
        if value is None:
            return self.optional
        if self.many:
            one = dataclasses.replace(self, many=False, optional=False)
            return isinstance(value, (list, tuple)) and all(map(one.takes, value))
        if isinstance(value, (bool, torch.SymBool)):
            return self.kind is bool
        if self.kind is Tensor:
            return self.number and isinstance(value, (int, float))
        if self.kind is int:
            return isinstance(value, (int, torch.SymInt))
        return self.kind is float and isinstance(value, (int, float, torch.SymInt, torch.SymFloat))


@dataclasses.dataclass(frozen=True)
class Type:
    """A tensor's type in a pattern: `f32[b, s, 64]`; without a dtype it is any float."""

    dims: tuple[str, ...]
    dtype: torch.dtype | None = None


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to trace a pattern: the types of its tensors and the values that are fixed."""

    tensors: Mapping[str, Type]
    fixed: Mapping[str, Any]
    floats: tuple[torch.dtype, torch.dtype] = FLOATS[0]
    dims: bool = False  # ints name dimensions

    def dtype(self, name: str, side: int) -> torch.dtype:
        return self.tensors[name].dtype or self.floats[side]


def read(name: str, fn: Callable[..., Any]) -> tuple[Slot, ...]:
    """The slots of a typed function."""
    try:
        hints = typing.get_type_hints(fn)
    except NameError as error:
        raise BadPattern(name, f"an annotation does not resolve: {error}", _ANNOTATE) from None
    slots = []
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise BadPattern(name, f"{parameter} is not a plain argument", _ANNOTATE)
        if parameter.name not in hints:
            raise BadPattern(name, f"argument {parameter.name!r} has no type", _ANNOTATE)
        slots.append(_slot(name, parameter.name, hints[parameter.name]))
    return tuple(slots)


_ANNOTATE = (
    "Annotate each argument as Tensor, float, int, bool, a list of one of them, or Optional; "
    "`Tensor | float` binds a tensor or a number."
)


def _slot(pattern: str, name: str, hint: Any) -> Slot:
    optional, many, number = False, False, False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [a for a in typing.get_args(hint) if a is not type(None)]
        optional = len(options) < len(typing.get_args(hint))
        if Tensor in options and set(options) <= {Tensor, float, int}:
            number, options = len(options) > 1, [Tensor]
        hint = options[0] if len(options) == 1 else hint
    if typing.get_origin(hint) in (list, Sequence) or str(hint).startswith("collections.abc.Seq"):
        many, hint = True, typing.get_args(hint)[0]
    if hint not in KINDS:
        shown = hint.__name__ if isinstance(hint, type) else str(hint)
        raise BadPattern(pattern, f"argument {name!r} is {shown}", _ANNOTATE)
    return Slot(name, hint, many, optional, number)


def parse_type(pattern: str, name: str, text: str) -> Type:
    """`f32[b, s, 64]` as a Type."""
    found = re.fullmatch(r"\s*(\w*)\[([\w\s,]*)\]\s*", text)
    if found is None or (found[1] and found[1] not in DTYPES):
        raise BadPattern(
            pattern,
            f"types: {text!r} for {name!r} is no type",
            f"Write '[b, s, 64]' or 'f32[n]'; dtypes are {', '.join(DTYPES)}.",
        )
    return Type(tuple(d.strip() for d in found[2].split(",") if d.strip()), DTYPES.get(found[1]))


def variants(
    pattern: str, slots: Sequence[Slot], types: Sequence[Mapping[str, str]], dims: bool
) -> Iterator[Variant]:
    """Every way to trace the pattern. With `dims`, ints are -1 to 3, and lists of them are orders
    of the first tensor's dimensions: they may name dimensions."""
    tensors = [slot for slot in slots if slot.kind is Tensor]
    names = [slot.name for slot in tensors]
    for name in (name for given in types for name in given if name not in names):
        fix = f"Known: {', '.join(names)}."
        raise BadPattern(pattern, f"types: no tensor is named {name!r}", fix)
    named = [{n: parse_type(pattern, n, t) for n, t in given.items()} for given in types or [{}]]
    choices = [_choices(slot, dims) for slot in slots]
    for known in named:
        for values in itertools.product(*choices):
            fixed = {s.name: v for s, v in zip(slots, values, strict=True) if v is not FREE}
            loose = [name for name in names if name not in known and name not in fixed]
            for ranks in _ranks(len(loose)):
                square = {n: Type(("n",) * r) for n, r in zip(loose, ranks, strict=True)}
                yield Variant({**known, **square}, fixed, dims=dims)


FREE: Any = object()


def _choices(slot: Slot, dims: bool) -> list[Any]:
    choices: list[Any] = [FREE]
    if slot.kind is bool and not slot.many:
        choices = [False, True]
    elif slot.kind is int and dims and not slot.many:
        choices = [-1, 0, 1, 2, 3]
    return [*choices, None] if slot.optional else choices


def _ranks(count: int) -> Iterator[tuple[int, ...]]:
    """Ranks to try for tensors of no stated type: equal ones; for two, every pair; for three, as
    of data, weight and bias, none greater than the one before."""
    same = [(rank,) * count for rank in _RANKS]
    yield from same if count else [()]
    more: Iterable[tuple[int, ...]] = ()
    if count == 2:
        more = itertools.product(_RANKS, repeat=2)
    elif count == 3:
        more = itertools.combinations_with_replacement(sorted(_RANKS, reverse=True), 3)
    yield from (ranks for ranks in more if ranks not in same)


def sizes(dims: Sequence[str], side: int, used: dict[str, int]) -> tuple[int, ...]:
    """A size for each named dimension, another one on the other side; all are even."""
    for dim in dims:
        if not dim.isdigit():
            used.setdefault(dim, (6, 26)[side] + 2 * len(used))
    return tuple(int(d) if d.isdigit() else used[d] for d in dims)


def sample(slot: Slot, index: int, side: int, variant: Variant) -> Any:
    """A number that stands for a slot in a trace and occurs nowhere else in it."""
    one: Any
    if slot.kind is int and slot.many and variant.dims:
        return order(variant, side)
    if slot.kind is float:
        one = ((0.4142 + 0.0371 * index) % 1, (0.2718 + 0.0593 * index) % 1)[side]
    else:
        one = (1009, 2017)[side] + 2 * index
    return [one, one + 0.125 if slot.kind is float else one + 1] if slot.many else one


def order(variant: Variant, side: int) -> list[int]:
    """All dimensions of the first tensor: from the last to the first, or the first one last."""
    first = next(iter(variant.tensors.values()), Type(()))
    dims = list(range(len(first.dims)))
    return dims[1:] + dims[:1] if side else dims[::-1]
