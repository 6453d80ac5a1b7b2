"""What prototypes are made of (dtypes, C++ constants), their checks, and `build`, the call."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx.traceback import annotate

from torchgraft.errors import BadValue, MissingPackage, NotRegistered, UnknownName, WrongDtype

if TYPE_CHECKING:
    from tree_sitter import Node

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

SCALARS = ("Int", "Float", "Bool", "String", "Type", "Tensor", "NamedAttrs", "Bytes")
ATTR_TYPES = tuple(f"{'List' * depth}{scalar}" for scalar in SCALARS for depth in range(3))
"""Every type that an attribute may have: each scalar, a list of it, a list of lists of it."""

_FLT_MAX = (2 - 2**-23) * 2.0**127
CONSTANTS: dict[str, Any] = {
    **{f"INT{bits}_MAX": 2 ** (bits - 1) - 1 for bits in (8, 16, 32, 64)},
    **{f"INT{bits}_MIN": -(2 ** (bits - 1)) for bits in (8, 16, 32, 64)},
    "INT_MAX": 2**31 - 1,
    "INT_MIN": -(2**31),
    "UINT32_MAX": 2**32 - 1,
    "LLONG_MAX": 2**63 - 1,
    "FLT_MAX": _FLT_MAX,
    "FLT_MIN": 2.0**-126,
    "FLT_EPSILON": 2.0**-23,
    "INFINITY": math.inf,
    "NAN": math.nan,
    "numeric_limits<float>::max()": _FLT_MAX,
    "numeric_limits<float>::lowest()": -_FLT_MAX,
    "numeric_limits<float>::infinity()": math.inf,
    "numeric_limits<int32_t>::max()": 2**31 - 1,
    "numeric_limits<int64_t>::max()": 2**63 - 1,
    "UNKNOWN_SHAPE": [-1],
    "UNKNOWN_RANK": [-2],
    "Tensor()": None,
    "NamedAttrs()": {},
    "true": True,
    "false": False,
}
"""The C++ names that defaults are written with, without `std::` and `ge::`."""


_CASTS = {*ATTR_TYPES, "AscendString", "string", "vector", "float", "double", "int", "int64_t"}
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


def number(text: str) -> int | float:
    """A C++ number, exactly.

    >>> number("1e-12f"), number("0x1F"), number("1'000LL"), number("-010")
    (1e-12, 31, 1000, -8)
    """
    bare = text.replace("'", "").lower()
    sign, bare = (-1, bare[1:]) if bare.startswith("-") else (1, bare.removeprefix("+"))
    if bare.startswith("0x"):
        return sign * (
            float.fromhex(bare.rstrip("fl")) if "p" in bare else int(bare.rstrip("ul"), 16)
        )
    if any(mark in bare for mark in ".ef"):
        return sign * float(bare.rstrip("fl"))
    bare = bare.rstrip("ulz")
    octal = bare.startswith("0") and bare.isdigit()
    return sign * int(bare, 8 if octal else 0)


_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]+)|([0-7]{1,3})|u([0-9a-fA-F]{4})|\r?\n|(.))", re.DOTALL)
_QUOTED = re.compile(rb'(?:u8|[uUL])?(?:R"(\w*)\((.*?)\)\1"|"((?:[^"\\]|\\.)*)")', re.DOTALL)
_LETTERS = {
    b"n": b"\n",
    b"t": b"\t",
    b"r": b"\r",
    b"a": b"\a",
    b"b": b"\b",
    b"f": b"\f",
    b"v": b"\v",
}


def unquote(literal: bytes) -> str:
    """The text of a C++ string literal, or of several that stand side by side."""

    def plain(escape: re.Match[bytes]) -> bytes:
        digits, octal, point, letter = escape.groups()
        if point:
            return chr(int(point, 16)).encode(errors="replace")
        if digits or octal:
            return bytes([int(digits or octal, 16 if digits else 8) & 0xFF])
        return _LETTERS.get(letter, letter) if letter else b""

    parts = (
        _ESCAPE.sub(plain, m[3]) if m[3] is not None else m[2] for m in _QUOTED.finditer(literal)
    )
    return b"".join(parts).decode(errors="replace")


_FIRST = re.compile(rb"(\(\s*)[A-Za-z_](?=\w*\s*[,)])")


def parse(source: bytes) -> Node:
    """The tree of a C++ source. The first argument of a macro may be a keyword, which no
    expression may be, so the parser is shown `Xlass` for `class`: read names from the source."""
    try:
        from tree_sitter import Language, Parser
        from tree_sitter_cpp import language
    except ImportError as error:
        package = "tree-sitter and tree-sitter-cpp"
        raise MissingPackage("reading REG_OP headers", package, "prototypes") from error
    return Parser(Language(language())).parse(_FIRST.sub(rb"\1X", source)).root_node


def last_name(text: str) -> str:
    """The last part of a C++ name.

    >>> last_name("ge::TensorType::ALL"), last_name("std::vector<int>")
    ('ALL', 'vector')
    """
    return re.sub(r"\s|<.*", "", text).rpartition("::")[2]


def constant(node: Node, source: bytes, type: str) -> Any:
    """The value of a C++ constant expression, for an attribute of this type."""
    raw = source[node.start_byte : node.end_byte]
    text = raw.decode(errors="replace")
    inner = [child for child in node.named_children if child.type != "comment"]
    bare = re.sub(r"\s|\b(ge|std)::", "", text)
    if bare in CONSTANTS:
        return CONSTANTS[bare]
    if node.type == "number_literal":
        return number(text)
    if "string" in node.type:
        return unquote(raw)
    if node.type == "initializer_list":
        return [constant(item, source, type) for item in inner]
    if node.type == "parenthesized_expression" and len(inner) == 1:
        return constant(inner[0], source, type)
    if node.type == "unary_expression" and text[0] in "+-":
        value = constant(inner[0], source, type)
        return -value if text[0] == "-" else value
    call = node.type in ("call_expression", "compound_literal_expression") and len(inner) == 2
    if call and last_name(re.split(r"[({]", text)[0]) in _CASTS:
        items = [child for child in inner[1].named_children if child.type != "comment"]
        if inner[1].type == "initializer_list" and type.startswith("List"):
            return constant(inner[1], source, type)
        if len(items) == 1:
            return constant(items[0], source, type)
        return [] if type.startswith("List") else ""
    if type.endswith("Type") and "identifier" in node.type:
        return last_name(text)
    raise ValueError("not a constant that can be read without a compiler")


def convert(value: Any, type: str) -> Any:
    """`value` as an attribute of this type holds it, exactly; ValueError when it cannot.

    >>> convert(1, "Float"), convert([[1], []], "ListListInt"), convert("fp16", "Type")
    (1.0, [[1], []], 'DT_FLOAT16')
    """
    if type.startswith("List"):
        if not isinstance(value, list):
            raise ValueError("not a list")
        return [convert(item, type[4:]) for item in value]
    is_number = isinstance(value, int | float)
    if type == "String" and isinstance(value, str):
        return value
    if type == "Bool" and is_number and value in (0, 1):
        return bool(value)
    if type == "Int" and is_number and math.isfinite(value) and value == int(value):
        return int(value)
    if type == "Float" and is_number:
        return float(value)
    if type == "Type" and isinstance(value, str | int):
        try:
            return dtype_name(value)
        except (BadValue, UnknownName) as error:
            raise ValueError(str(error).partition(" Known:")[0]) from None
    if type == "Bytes" and isinstance(value, list) and all(isinstance(i, int) for i in value):
        return bytes(value)
    if (type == "Tensor" and value is None) or (type == "NamedAttrs" and value in ({}, [])):
        return None if type == "Tensor" else {}
    raise ValueError(f"not {'an' if type == 'Int' else 'a'} {type}")


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
                return WrongDtype(prototype.name, port.name, _spell(dtype), names)
            if port.symbol is None:
                continue
            first, agreed = bound.setdefault(port.symbol, (port, dtype))
            if dtype != agreed:
                why = f"{port.symbol!r} was bound by input {first.name!r}"
                return WrongDtype(prototype.name, port.name, _spell(dtype), [_spell(agreed)], why)
    return None


def _spell(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype, str(dtype))


def argument(name: str, taken: Collection[str]) -> str:
    """The name of an attribute among the arguments of its op, where an input may have it too."""
    return f"{name}_changed_as_duplicate_with_input" if name in taken else name


def build(
    name: str,
    *,
    inputs: Mapping[str, Any],
    outputs: Sequence[str | tuple[str, int]],
    attrs: Mapping[str, Any],
    dependencies: Sequence[Any] = (),
    node_name: str | None = None,
) -> Any:
    """What `torch.ops.ge.<name>` returns for these inputs and attributes.

    Inputs go by position, in the order of the prototype. Attributes go by name, since torch wants
    required arguments first and prototypes do not; None leaves one at its default. A dynamic
    output `("ys", 3)` goes as `size_of_ys=3`. A node traced from the call carries `node_name` in
    `meta["custom"]`. Calls run in program order, so `dependencies` are behind this one already.
    """
    op = getattr(torch.ops.ge, name, None)
    if not callable(op):
        raise NotRegistered(f"ge::{name}", dir(torch.ops.ge))
    named = {f"size_of_{out[0]}": out[1] for out in outputs if isinstance(out, tuple)}
    taken = {*inputs, *named}
    named |= {argument(key, taken): value for key, value in attrs.items() if value is not None}
    label = contextlib.nullcontext() if node_name is None else annotate({"node_name": node_name})
    with label:
        return op(*inputs.values(), **named)
