"""`Input` of Torch-AIE: a shape, or a range of shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import torchgraft as graft
from torchgraft.compat.aie.enums import CompileMode, TensorFormat, torch_dtype

MAX_RANK = 8


class Input:
    """An input by its type: `Input((1, 3))`, or `min_shape=` and `max_shape=`.

    A size of -1 in both is any size. `dtype` is torch's or `mindietorch.dtype`; float32 by default.
    """

    def __init__(
        self,
        *args: Any,
        shape: Sequence[int] | None = None,
        min_shape: Sequence[int] | None = None,
        max_shape: Sequence[int] | None = None,
        name: str = "",
        dtype: Any = torch.float32,
        format: Any = TensorFormat.ND,
    ) -> None:
        if len(args) > 1:
            raise ValueError(f"Input: expected one shape by position, got {len(args)}")
        if args and shape is not None:
            raise ValueError("Input: the shape is given twice, by position and as shape=")
        shape = args[0] if args else shape
        if (shape is None) == (min_shape is None and max_shape is None):
            raise ValueError("Input: expected shape, or min_shape and max_shape")
        if shape is None and (min_shape is None or max_shape is None):
            raise ValueError("Input: min_shape and max_shape are needed both")
        self.dtype, self.name = torch_dtype(dtype), name
        if not isinstance(format, (TensorFormat, torch.memory_format)):
            raise ValueError(f"Input: expected a TensorFormat or a torch.memory_format: {format!r}")
        self.format = format
        self.shape_mode = CompileMode.STATIC if shape is not None else CompileMode.DYNAMIC
        self.shape = None if shape is None else _sizes("shape", shape, 0)
        self.min_shape = None if shape is not None else _sizes("min_shape", min_shape, -1)
        self.max_shape = None if shape is not None else _sizes("max_shape", max_shape, -1)
        if self.min_shape is not None and self.max_shape is not None:
            _check_range(self.min_shape, self.max_shape)

    @staticmethod
    def of(given: Any) -> Input:
        """An input from itself, or from a tensor that shows it."""
        if isinstance(given, Input):
            return given
        if isinstance(given, torch.Tensor):
            return Input(tuple(given.shape), dtype=given.dtype)
        raise TypeError(f"inputs: expected Input or tensors, got {given!r}")

    def native(self, device: torch.device | None = None) -> graft.Input:
        """The same as torchgraft's."""
        if self.shape is not None:
            return graft.Input(self.shape, dtype=self.dtype, device=device)
        assert self.min_shape is not None
        assert self.max_shape is not None
        low = [1 if size == -1 else size for size in self.min_shape]
        high = [None if size == -1 else size for size in self.max_shape]
        return graft.Input(dtype=self.dtype, min_shape=low, max_shape=high, device=device)

    def __repr__(self) -> str:
        if self.shape is not None:
            return f"Input({self.shape}, dtype={self.dtype})"
        return f"Input(min_shape={self.min_shape}, max_shape={self.max_shape}, dtype={self.dtype})"


def _sizes(field: str, given: Any, least: int) -> tuple[int, ...]:
    if not isinstance(given, (tuple, list)) or len(given) > MAX_RANK:
        raise ValueError(f"Input.{field}: expected at most {MAX_RANK} sizes, got {given!r}")
    for size in given:
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise ValueError(f"Input.{field}: expected sizes from {least} on, got {given!r}")
    return tuple(given)


def _check_range(low: tuple[int, ...], high: tuple[int, ...]) -> None:
    if len(low) != len(high):
        raise ValueError(f"Input: min_shape {low} and max_shape {high} have different ranks")
    for small, large in zip(low, high, strict=True):
        if (small == -1) != (large == -1):
            raise ValueError(f"Input: -1 must stand in both min_shape {low} and max_shape {high}")
        if small > large:
            raise ValueError(f"Input: min_shape {low} is more than max_shape {high}")


def native_inputs(
    given: Sequence[Any], device: torch.device | None = None, *, gears: bool = True
) -> tuple[graft.Input, ...]:
    """The inputs of a compile; a list of lists means gears, each a set of shapes of its own."""
    if not isinstance(given, (list, tuple)) or not given:
        raise ValueError(f"inputs: expected a list of Input or of tensors, got {given!r}")
    if not isinstance(given[0], (list, tuple)):
        return tuple(Input.of(one).native(device) for one in given)
    if not gears:
        raise ValueError("inputs: gears (a list of lists) are for TorchScript modules")
    rows = [[Input.of(one) for one in row] for row in given]
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"inputs: every gear needs as many inputs, got {[len(r) for r in rows]}")
    made = []
    for column in zip(*rows, strict=True):
        shapes = [one.shape for one in column]
        if None in shapes or len({one.dtype for one in column}) != 1:
            raise ValueError(f"inputs: a gear is a fixed shape, of one dtype: {list(column)}")
        made.append(graft.Input(gears=shapes, dtype=column[0].dtype, device=device))
    return tuple(made)
