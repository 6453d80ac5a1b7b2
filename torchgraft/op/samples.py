"""Arguments to check an operator with: the author's samples, and variants of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchgraft.op import schema as schemas

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int32, torch.int64, torch.bool, torch.complex64)
LARGE = 4099  # a prime: no block or vector size divides it


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to change every tensor of a sample."""

    name: str
    resize: Callable[[tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = lambda shape, _: shape
    strided: bool = False  # every other element of a longer tensor
    permuted: bool = False  # dense, its dimensions in memory the other way round
    special: bool = False


def _empty(shape: tuple[int, ...], first: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(0 if first and size == first[0] else size for size in shape)


def _large(shape: tuple[int, ...], first: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(LARGE if first and size == first[-1] else size for size in shape)


VARIANTS = (
    Variant("as given"),
    Variant("large, odd size", resize=_large),
    Variant("empty", resize=_empty),
    Variant("0-d", resize=lambda shape, _: ()),
    Variant("not contiguous", strided=True),
    Variant("transposed", permuted=True),
    Variant("NaN and inf", special=True),
)


class Make:
    """Makes the tensors of a sample: `make(4, 8)` has the dtype and device being checked.

    One that is of a certain type or range says so: `make(4, dtype=torch.int64, low=0, high=10)`.
    The checker also asks for empty, large, strided ones and so on; equal sizes stay equal then.

    >>> make = Make(torch.float32)
    >>> make(2, 3).shape, make(5, dtype=torch.int64, low=0, high=3).max().item() < 3
    (torch.Size([2, 3]), True)
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: str = "cpu",
        variant: Variant = VARIANTS[0],
        seed: int = 0,
    ) -> None:
        self.dtype, self.device, self.variant = dtype, device, variant
        self._random = torch.Generator().manual_seed(seed)
        self._first: tuple[int, ...] | None = None

    def __call__(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        low: float | None = None,
        high: float | None = None,
    ) -> Tensor:
        self._first = shape if self._first is None else self._first
        size = self.variant.resize(shape, self._first)
        kind = dtype or self.dtype
        inner = (*size[:-1], 2 * size[-1]) if self.variant.strided and size else size
        inner = inner[::-1] if self.variant.permuted else inner
        tensor = self._values(inner, kind, low, high)
        if self.variant.special and kind.is_floating_point and low is None and high is None:
            for i, value in enumerate((float("nan"), float("inf"), float("-inf"), -0.0)):
                tensor.view(-1)[i::7] = value
        tensor = tensor.to(self.device)
        if self.variant.permuted:
            return tensor.permute(*range(tensor.ndim)[::-1])
        return tensor[..., ::2] if self.variant.strided and size else tensor

    def _values(
        self, shape: tuple[int, ...], dtype: torch.dtype, low: float | None, high: float | None
    ) -> Tensor:
        uniform = torch.rand(shape, generator=self._random, dtype=torch.float64)
        if dtype == torch.bool:
            return uniform > 0.5
        whole = not (dtype.is_floating_point or dtype.is_complex)
        bottom = low if low is not None else (0 if whole else -2)
        top = high if high is not None else bottom + (10 if whole else 4)
        values = bottom + uniform * (top - bottom)
        return (values.floor() if whole else values).to(dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments for one call, and how they came about."""

    name: str
    dtype: torch.dtype
    values: list[Any]


def cases(
    op: Any, device: str, dtypes: tuple[torch.dtype, ...], refusals: list[Exception]
) -> Iterator[Case]:
    """Every case that the reference takes: all variants in the first dtype, then each dtype. What
    it raises for the others is added to `refusals`."""
    for number, dtype in enumerate(dtypes):
        for variant in VARIANTS if number == 0 else VARIANTS[:2]:
            make = Make(dtype, device, variant)
            for index, values in enumerate(_samples(op, make)):
                make._first = None
                try:
                    schemas.call(op.parsed, op.reference, clone(values))
                except Exception as error:  # what the reference refuses is no case of it
                    refusals.append(error)
                    continue
                short = str(dtype).removeprefix("torch.")
                yield Case(f"sample {index}, {variant.name}, {short}", dtype, values)


def _samples(op: Any, make: Make) -> Iterator[list[Any]]:
    if op.make_samples is None:
        yield [_guess(argument, make) for argument in op.parsed.arguments]
        return
    for sample in op.make_samples(make):
        args = sample if isinstance(sample, tuple) else (sample,)
        kwargs = args[-1] if args and isinstance(args[-1], dict) else {}
        yield schemas.bind(op.parsed, args[: len(args) - bool(kwargs)], kwargs)


def _guess(argument: Any, make: Make) -> Any:
    """A value for a parameter that no sample gives."""
    kind = str(argument.type)
    if kind == "Tensor" or kind == "Optional[Tensor]":
        return make(4, 8)
    if "Tensor" in kind:
        return [make(4, 8), make(4, 8)]
    if argument.has_default_value():
        return schemas.bind(_One(argument), (), {})[0]
    if "ScalarType" in str(argument.real_type):
        return make.dtype
    if kind == "Device":
        return torch.device(make.device)
    simple = {"float": 0.5, "int": 1, "bool": True, "str": "", "number": 0.5}
    if (item := kind.removeprefix("List[").removesuffix("]")) != kind:
        return [simple.get(item)]
    return simple.get(kind)


@dataclasses.dataclass(frozen=True)
class _One:
    """A schema of one parameter."""

    argument: Any

    @property
    def arguments(self) -> list[Any]:
        return [self.argument]


def clone(value: Any) -> Any:
    """The same with every tensor copied, strides kept."""
    if isinstance(value, Tensor):
        copy = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
        return copy.copy_(value)
    if isinstance(value, (list, tuple)):
        return [clone(item) for item in value]
    return value
