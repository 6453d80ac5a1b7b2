"""`_enums` of Torch-AIE: precision, element types, formats."""

from __future__ import annotations

import enum
from typing import Any

import torch


class PrecisionPolicy(enum.Enum):
    """The type to compute in: forced, or preferred where it does little harm."""

    PREF_FP32 = 0
    FP16 = 1
    FP32 = 2
    PREF_FP16 = 3


PRECISION = {
    PrecisionPolicy.PREF_FP32: None,
    PrecisionPolicy.FP16: "float16",
    PrecisionPolicy.FP32: "float32",
    PrecisionPolicy.PREF_FP16: "mixed-float16",
}
"""The same as `Config.precision`."""


class dtype(enum.Enum):
    """Element types of inputs."""

    FLOAT = 0
    FLOAT16 = 1
    INT8 = 2
    INT32 = 3
    UINT8 = 4
    INT16 = 6
    UINT16 = 7
    UINT32 = 8
    INT64 = 9
    UINT64 = 10
    DOUBLE = 11
    BOOL = 12
    STRING = 13
    UNKNOWN = 28


_TORCH = {
    dtype.FLOAT: torch.float32,
    dtype.FLOAT16: torch.float16,
    dtype.INT8: torch.int8,
    dtype.INT32: torch.int32,
    dtype.UINT8: torch.uint8,
    dtype.INT16: torch.int16,
    dtype.UINT16: torch.uint16,
    dtype.UINT32: torch.uint32,
    dtype.INT64: torch.int64,
    dtype.UINT64: torch.uint64,
    dtype.DOUBLE: torch.float64,
    dtype.BOOL: torch.bool,
}


def torch_dtype(given: Any) -> torch.dtype:
    """A dtype of torch, from torch's own or from `dtype`."""
    if isinstance(given, torch.dtype):
        return given
    if isinstance(given, dtype) and given in _TORCH:
        return _TORCH[given]
    known = ", ".join(f"dtype.{one.name}" for one in _TORCH)
    raise ValueError(f"dtype: expected a torch.dtype or one of {known}, got {given!r}")


class TensorFormat(enum.Enum):
    """How an input lies in memory."""

    ND = 0
    NCHW = 1
    NHWC = 2
    UNKNOWN = 3


class CompileMode(enum.Enum):
    """Whether an input has one shape or a range of them."""

    STATIC = 0
    DYNAMIC = 1
