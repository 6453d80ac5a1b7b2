"""Element types of prototypes: the DT_* names, their numbers, torch's dtypes, the named sets."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchgraft.errors import BadValue, UnknownName, WrongDtype

if TYPE_CHECKING:
    from torchgraft.op.prototype import Port, Prototype


class Dtype(NamedTuple):
    """An element type of a prototype: its number, and the torch dtype that is the same (if any)."""

    code: int
    torch: torch.dtype | None = None


DTYPES = {
    "DT_FLOAT": Dtype(0, torch.float32),
    "DT_FLOAT16": Dtype(1, torch.float16),
    "DT_INT8": Dtype(2, torch.int8),
    "DT_INT32": Dtype(3, torch.int32),
    "DT_UINT8": Dtype(4, torch.uint8),
    "DT_INT16": Dtype(6, torch.int16),
    "DT_UINT16": Dtype(7, torch.uint16),
    "DT_UINT32": Dtype(8, torch.uint32),
    "DT_INT64": Dtype(9, torch.int64),
    "DT_UINT64": Dtype(10, torch.uint64),
    "DT_DOUBLE": Dtype(11, torch.float64),
    "DT_BOOL": Dtype(12, torch.bool),
    "DT_STRING": Dtype(13),
    "DT_DUAL_SUB_INT8": Dtype(14),
    "DT_DUAL_SUB_UINT8": Dtype(15),
    "DT_COMPLEX64": Dtype(16, torch.complex64),
    "DT_COMPLEX128": Dtype(17, torch.complex128),
    "DT_QINT8": Dtype(18, torch.qint8),
    "DT_QINT16": Dtype(19),
    "DT_QINT32": Dtype(20, torch.qint32),
    "DT_QUINT8": Dtype(21, torch.quint8),
    "DT_QUINT16": Dtype(22),
    "DT_RESOURCE": Dtype(23),
    "DT_STRING_REF": Dtype(24),
    "DT_DUAL": Dtype(25),
    "DT_VARIANT": Dtype(26),
    "DT_BF16": Dtype(27, torch.bfloat16),
    "DT_UNDEFINED": Dtype(28),
    "DT_INT4": Dtype(29, torch.int4),  # type: ignore[attr-defined]
    "DT_UINT1": Dtype(30, torch.uint1),  # type: ignore[attr-defined]
    "DT_INT2": Dtype(31, torch.int2),  # type: ignore[attr-defined]
    "DT_UINT2": Dtype(32, torch.uint2),  # type: ignore[attr-defined]
    "DT_COMPLEX32": Dtype(33, torch.complex32),
    "DT_HIFLOAT8": Dtype(34),
    "DT_FLOAT8_E5M2": Dtype(35, torch.float8_e5m2),
    "DT_FLOAT8_E4M3FN": Dtype(36, torch.float8_e4m3fn),
    "DT_FLOAT8_E8M0": Dtype(37, torch.float8_e8m0fnu),
    "DT_FLOAT6_E3M2": Dtype(38),
    "DT_FLOAT6_E2M3": Dtype(39),
    "DT_FLOAT4_E2M1": Dtype(40, torch.float4_e2m1fn_x2),
    "DT_FLOAT4_E1M2": Dtype(41),
}
"""Every dtype name that a prototype may hold. The one place where DT_* and torch.dtype meet."""

_FLOATS = frozenset({"DT_DOUBLE", "DT_FLOAT", "DT_FLOAT16"})
_SIGNED = frozenset({"DT_INT8", "DT_INT16", "DT_INT32", "DT_INT64"})
_UNSIGNED = frozenset({"DT_UINT8", "DT_UINT16", "DT_UINT32", "DT_UINT64"})
_COMPLEX = frozenset({"DT_COMPLEX32", "DT_COMPLEX64", "DT_COMPLEX128"})
_QUANTISED = frozenset({"DT_QINT8", "DT_QINT16", "DT_QINT32", "DT_QUINT8", "DT_QUINT16"})
_BF16 = frozenset({"DT_BF16"})
_REAL = _FLOATS | _SIGNED | _UNSIGNED | _BF16

GROUPS: dict[str, frozenset[str] | None] = {
    # The listing behind ALL lacks the newer dtypes, and differs by version; its name says any.
    "ALL": None,
    "QuantifiedType": _QUANTISED,
    "OrdinaryType": _REAL | _COMPLEX | {"DT_BOOL"},
    "BasicType": _REAL | _COMPLEX | _QUANTISED,
    "NumberType": _REAL | _COMPLEX | {"DT_QINT8", "DT_QINT32", "DT_QUINT8"},
    "RealNumberType": _REAL,
    "ComplexDataType": _COMPLEX,
    "IntegerDataType": _SIGNED | _UNSIGNED,
    "SignedDataType": _SIGNED,
    "UnsignedDataType": _UNSIGNED,
    "FloatingDataType": _FLOATS,  # without bfloat16, as declared
    "IndexNumberType": frozenset({"DT_INT32", "DT_INT64"}),
    "UnaryDataType": _FLOATS | _COMPLEX | _BF16,
    "FLOAT": frozenset({"DT_FLOAT", "DT_FLOAT16", "DT_BF16"}),
}
"""The named sets of `TensorType::Name()`."""

_CODES = {dtype.code: name for name, dtype in DTYPES.items()}
_NAMES = {dtype.torch: name for name, dtype in DTYPES.items() if dtype.torch is not None}
_SHORT = {
    "FLOAT32": "FLOAT",
    "FP32": "FLOAT",
    "FP16": "FLOAT16",
    "HALF": "FLOAT16",
    "BFLOAT16": "BF16",
    "FLOAT64": "DOUBLE",
    "FP64": "DOUBLE",
    "FLOAT8_E8M0FNU": "FLOAT8_E8M0",
    "FLOAT4_E2M1FN_X2": "FLOAT4_E2M1",
}


def dtype_name(value: str | int | torch.dtype) -> str:
    """The DT_* name of a dtype given by any of its names, its number, or as a torch.dtype.

    >>> dtype_name("fp16"), dtype_name(torch.bfloat16), dtype_name(9)
    ('DT_FLOAT16', 'DT_BF16', 'DT_INT64')
    """
    if isinstance(value, torch.dtype):
        if value not in _NAMES:
            raise BadValue("dtype", value, "a dtype that a prototype can name")
        return _NAMES[value]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadValue("dtype", value, "a DT_* name, its number or a torch.dtype")
    if isinstance(value, int):
        if value not in _CODES:
            raise BadValue("dtype", value, "the number of a DT_* name (0 to 41)")
        return _CODES[value]
    bare = value.strip().removeprefix("torch.").upper().removeprefix("DT_")
    name = f"DT_{_SHORT.get(bare, bare)}"
    if name not in DTYPES:
        raise UnknownName("dtype", value, DTYPES)
    return name


def spell(dtype: torch.dtype) -> str:
    """The name of a torch dtype in messages: DT_* where there is one."""
    return _NAMES.get(dtype, str(dtype))


def order_dtypes(names: Collection[str]) -> list[str]:
    """Names in the order of their numbers, names that nobody knows last."""
    last = len(DTYPES) + 1
    return sorted(names, key=lambda name: (DTYPES.get(name, Dtype(last)).code, name))


@functools.cache
def torch_dtypes(names: frozenset[str]) -> frozenset[torch.dtype]:
    """The torch dtypes among these names. Cached: it is asked at every call of an op."""
    found = (DTYPES[name].torch for name in names if name in DTYPES)
    return frozenset(dtype for dtype in found if dtype is not None)


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    if value is None:
        return ()
    return (value,) if isinstance(value, torch.Tensor) else value


def check_dtypes(
    prototype: Prototype, tensors: Mapping[str, Any] | Sequence[Any]
) -> WrongDtype | None:
    """The error of the first input whose dtype the prototype does not allow; None when all fit.

    `tensors` holds a tensor, a list of them, or None per input, by name or in order. Inputs that
    share a symbol must also share their dtype. It is returned, not raised: the caller knows the
    line to blame.
    """
    values = tensors
    if not isinstance(values, Mapping):
        values = dict(zip((port.name for port in prototype.inputs), values, strict=False))
    bound: dict[str, tuple[Port, torch.dtype]] = {}
    for port in prototype.inputs:
        allowed = None if port.dtypes is None else torch_dtypes(port.dtypes)
        for tensor in _tensors(values.get(port.name)):
            dtype = tensor.dtype
            if allowed is not None and dtype not in allowed:
                names = order_dtypes(port.dtypes or ())
                return WrongDtype(prototype.name, port.name, spell(dtype), names)
            if port.symbol is None:
                continue
            first, agreed = bound.setdefault(port.symbol, (port, dtype))
            if dtype != agreed:
                why = f"{port.symbol!r} was bound by input {first.name!r}"
                return WrongDtype(prototype.name, port.name, spell(dtype), [spell(agreed)], why)
    return None
