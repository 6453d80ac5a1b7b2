"""What generated source may name besides its own variables.

Everything here also takes symbolic sizes and is traceable by Dynamo.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor


def _numbered(*runs: tuple[int, str]) -> dict[int, Any]:
    return {
        number: getattr(torch, name)
        for first, names in runs
        for number, name in enumerate(names.split(), first)
    }


ENUMS: dict[str, dict[int, Any]] = {
    "ScalarType": _numbered(
        (0, "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128"),
        (11, "bool qint8 quint8 qint32 bfloat16 quint4x2 quint2x4"),
        (23, "float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz uint16 uint32 uint64"),
    ),
    "Layout": _numbered(
        (0, "strided sparse_coo sparse_csr"), (4, "sparse_csc sparse_bsr sparse_bsc jagged")
    ),
    "MemoryFormat": _numbered(
        (0, "contiguous_format preserve_format channels_last channels_last_3d")
    ),
}
"""The IR's numbers of torch's enums; they are part of the file format and never change."""
_NUMBERS = {v: k for table in ENUMS.values() for k, v in table.items()}

KINDS: dict[str, tuple[type, ...]] = {
    "IntType": (int, torch.SymInt),
    "FloatType": (float, torch.SymFloat),
    "BoolType": (bool, torch.SymBool),
    "ComplexType": (complex,),
    "StringType": (str,),
    "TensorType": (Tensor,),
    "ListType": (list,),
    "TupleType": (tuple,),
    "DictType": (dict,),
    "NoneType": (type(None),),
    "DeviceObjType": (torch.device,),
}


class Record:
    """An object of a TorchScript class, whose methods were inlined."""


def number_of(value: Any) -> int:
    """The IR's number of a dtype or a layout."""
    return _NUMBERS[value]


def is_a(value: Any, *kinds: str) -> bool:
    """TorchScript's isinstance: a bool is no int; what a container holds is not looked at."""
    if isinstance(value, (bool, torch.SymBool)):
        return "BoolType" in kinds
    return any(isinstance(value, KINDS[kind]) for kind in kinds)


_sym_int: Any = torch.sym_int
_sym_float: Any = torch.sym_float
_sym_max: Any = torch.sym_max


def to_float(value: Any) -> Any:
    """A float, symbolic where the value is."""
    return float(value) if isinstance(value, str) else _sym_float(value)


def to_int(value: Any) -> Any:
    """An int, truncated, symbolic where the value is."""
    if isinstance(value, str):
        return int(value)
    return int(value) if isinstance(value, (bool, torch.SymBool)) else _sym_int(value)


def single(value: Any) -> Any:
    """The value rounded to float32 by arithmetic alone, so that it also works on symbols."""
    scaled = value * 536870913.0  # 2**29 + 1: Veltkamp's split at 24 bits
    return scaled - (scaled - value)


def unwrap(value: Any) -> Any:
    """An Optional that must hold something."""
    if value is None:
        raise RuntimeError("Unwrapping null optional")
    return value


def fill(text: str, *values: Any) -> str:
    """`str.format` as TorchScript has it: only `{}` is special."""
    parts = text.split("{}")
    filled = [str(v) + part for v, part in zip(values, parts[1:], strict=False)]
    return parts[0] + "".join(filled) + "{}".join(["", *parts[1 + len(values) :]])


def until(text: str, end: int) -> int:
    """Where TorchScript's search in a string ends: -1 is the end of it, not one before."""
    return len(text) + end + 1 if end < 0 else end


def range_length(start: Any, stop: Any, step: Any) -> Any:
    """How many steps a range takes."""
    if step == 0:
        raise ValueError("range() arg 3 must not be zero")
    span = stop - start + (step - 1 if step > 0 else step + 1)
    return _sym_max(0, span // step)


_CALLED = (Record, number_of, is_a, to_float, to_int, single, unwrap, fill, until, range_length)
NAMESPACE: dict[str, Any] = {
    "torch": torch,
    "math": math,
    "warnings": warnings,
    **{called.__name__: called for called in _CALLED},
    **{f"{name.lower()}_of": table for name, table in ENUMS.items()},
}
