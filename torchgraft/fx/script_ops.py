"""How TorchScript's scalar, list, dict and string operators are spelt in Python.

One table of templates, and the few functions that the templates call. `{0}`, `{1}`… are the
node's inputs and `{*}` is all of them. Everything here also takes symbolic sizes and is
traceable by Dynamo.
"""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import torch
from torch import Tensor

_DTYPE_NAMES = (
    (0, "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128"),
    (11, "bool qint8 quint8 qint32 bfloat16 quint4x2 quint2x4"),
    (23, "float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz uint16 uint32 uint64"),
)
DTYPES: dict[int, torch.dtype] = {
    number: getattr(torch, name)
    for first, names in _DTYPE_NAMES
    for number, name in enumerate(names.split(), first)
}
"""The numbers that the IR stores for dtypes; they are part of the file format and never change."""
LAYOUTS: dict[int, torch.layout] = {
    0: torch.strided,
    1: torch.sparse_coo,
    2: torch.sparse_csr,
    4: torch.sparse_csc,
    5: torch.sparse_bsr,
    6: torch.sparse_bsc,
    7: torch.jagged,
}
FORMATS: dict[int, torch.memory_format] = {
    0: torch.contiguous_format,
    1: torch.preserve_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
}
ENUMS: dict[str, dict[int, Any]] = {
    "ScalarType": DTYPES,
    "Layout": LAYOUTS,
    "MemoryFormat": FORMATS,
}
_NUMBERS: dict[Any, int] = {v: k for table in (DTYPES, LAYOUTS) for k, v in table.items()}

EXCEPTIONS = {
    error.__name__: error
    for error in (
        *(ArithmeticError, AssertionError, AttributeError, Exception, IndexError, KeyError),
        *(NotImplementedError, RuntimeError, StopIteration, TypeError, ValueError),
        *(ZeroDivisionError, OverflowError, LookupError),
    )
}

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


def percent(text: str, *values: Any) -> str:
    """`text % values`, where the values may come as one tuple."""
    one = len(values) == 1 and isinstance(values[0], tuple)
    return text % (values[0] if one else values)


def pick(items: list[Any], other: Any, *, largest: bool) -> Any:
    """TorchScript's min and max of two lists (the smaller or larger list)."""
    return max(items, other) if largest else min(items, other)


def range_length(start: Any, stop: Any, step: Any) -> Any:
    """How many steps a range takes."""
    if step == 0:
        raise ValueError("range() arg 3 must not be zero")
    span = stop - start + (step - 1 if step > 0 else step + 1)
    return _sym_max(0, span // step)


def convert(x: Tensor, *options: Any) -> Tensor:
    """`Tensor.to` with TorchScript's own overloads: a device, a dtype number, two flags."""
    device = next((o for o in options if isinstance(o, (torch.device, str))), None)
    number = next((o for o in options if type(o) is int), None)
    flags = [o for o in options if isinstance(o, bool)]
    dtype = None if number is None else DTYPES[number]
    return x.to(device=device, dtype=dtype, non_blocking=flags[0], copy=flags[1])


def build(value: Any, dtype: int | None, device: Any, requires_grad: bool = False) -> Tensor:
    """`torch.tensor` with a dtype number."""
    kind = None if dtype is None else DTYPES[dtype]
    return torch.tensor(value, dtype=kind, device=device, requires_grad=requires_grad)


def take(items: dict[Any, Any], key: Any, default: Any = None) -> Any:
    """`dict.get`."""
    return items.get(key, default)


_HELPERS = (
    *(Record, number_of, is_a, to_float, to_int, single, unwrap, fill, percent, pick),
    *(range_length, convert, build, take),
)
NAMESPACE: dict[str, Any] = {
    "torch": torch,
    "math": math,
    "warnings": warnings,
    **{helper.__name__: helper for helper in _HELPERS},
    **{f"{name.lower()}_of": table for name, table in ENUMS.items()},
}
"""What generated source may name besides its own variables."""


def _each(template: str, names: str, prefix: str = "aten::") -> dict[str, str]:
    return {prefix + name: template.replace("NAME", name) for name in names.split()}


METADATA: dict[str, str] = {
    **_each(
        "{0}.NAME",
        "device is_cuda is_cpu is_quantized is_sparse is_sparse_csr is_meta is_mkldnn is_mps "
        "is_xpu is_xla is_ort is_vulkan is_ipu is_hpu is_mtia is_nested is_maia requires_grad "
        "itemsize nbytes ndim names",
        "prim::",
    ),
    **_each(
        "{0}.NAME()",
        "dim numel is_floating_point is_complex is_signed element_size storage_offset "
        "get_device is_leaf is_neg is_conj is_inference",
    ),
    "prim::dtype": "number_of({0}.dtype)",
    "prim::layout": "number_of({0}.layout)",
    "prim::shape": "list({0}.shape)",
    "aten::is_leaf": "{0}.is_leaf",
    "aten::is_contiguous": "{0}.is_contiguous()",
    "aten::is_contiguous.memory_format": ("{0}.is_contiguous(memory_format=memoryformat_of[{1}])"),
    "aten::size": "list({0}.size())",
    "aten::size.int": "{0}.size({1})",
    "aten::stride": "list({0}.stride())",
    "aten::stride.int": "{0}.stride({1})",
    "aten::len.Tensor": "{0}.size(0)",
}
"""Questions about a tensor that its data does not answer."""

ALWAYS: dict[str, str] = {
    **METADATA,
    "aten::Int": "to_int({0})",
    "aten::Int.Tensor": "to_int({0}.item())",
    "aten::IntImplicit": "to_int({0}.item())",
    "aten::Float": "to_float({0})",
    "aten::Float.Tensor": "to_float({0}.item())",
    "aten::FloatImplicit": "to_float({0}.item())",
    "aten::Bool": "bool({0})",
    "aten::ScalarImplicit": "{0}.item()",
    "aten::Scalar": "{0}.item()",
    "aten::item": "{0}.item()",
    "aten::is_nonzero": "bool({0})",
    "aten::tensor": "build({*})",
    "aten::as_tensor": "torch.as_tensor({0}, dtype=scalartype_of.get({1}), device={2})",
    "aten::as_tensor.list": "torch.as_tensor({0}, dtype=scalartype_of.get({1}), device={2})",
    "aten::to.prim_Device": "convert({*})",
    "aten::to.prim_dtype": "convert({*})",
    "aten::to.prim_other": "convert({*})",
    **_each("{0}.NAME()", "cpu cuda"),
    "prim::data": "{0}.detach()",
    "prim::grad": "{0}.grad",
    "prim::tolist": "{0}.tolist()",
    "prim::type": "{0}.type",
    "prim::index": "{0}.index",
    "aten::device": "torch.device({*})",
    "aten::__is__": "{0} is {1}",
    "aten::__isnot__": "{0} is not {1}",
    "aten::__not__": "not {0}",
    "aten::__contains__": "{1} in {0}",
    "aten::_unwrap_optional": "unwrap({0})",
    "prim::TupleIndex": "{0}[{1}]",
    "aten::__getitem__": "{0}[{1}]",
    "aten::len": "len({0})",
    "aten::append": "{0}.append({1})",
    "aten::extend": "{0}.extend({1})",
    "aten::insert": "{0}.insert({1}, {2})",
    "aten::pop": "{0}.pop({1})",
    "aten::pop.Dict_default_str": "{0}.pop({1}, {2})",
    "aten::pop.Dict_default_int": "{0}.pop({1}, {2})",
    **_each("{0}.NAME()", "clear reverse popitem"),
    "aten::remove": "{0}.remove({1})",
    "aten::list": "list({0})",
    "aten::dict": "dict({*})",
    "aten::_set_item": "{0}[{1}] = {2}",
    "aten::Delete": "del {0}[{1}]",
    "aten::get": "take({*})",
    "aten::setdefault": "{0}.setdefault({1}, {2})",
    "aten::update": "{0}.update({1})",
    "aten::format": "fill({*})",
    "aten::warn": "warnings.warn({0}, stacklevel=2)",
    "prim::Print": "print({*})",
    "aten::__range_length": "range_length({*})",
    "aten::__derive_index": "{1} + {0} * {2}",
    "prim::rangelist": "list(range({0}))",
    "aten::is_grad_enabled": "torch.is_grad_enabled()",
    "aten::set_grad_enabled": "torch.set_grad_enabled({0})",
    "aten::is_scripting": "True",
    "aten::is_autocast_enabled": "torch.is_autocast_enabled()",
}
"""Whatever the operands are. A key is a node kind, with an overload where that matters."""

SCALAR: dict[str, str] = {
    "aten::add": "{0} + {1}",
    "aten::add_": "{0}.extend({1})",  # += of lists: the list itself grows
    "aten::sub": "{0} - {1}",
    "aten::mul": "{0} * {1}",
    "aten::mul_": "{0} *= {1}",
    "aten::div": "{0} / {1}",
    "aten::floordiv": "{0} // {1}",
    "aten::remainder": "{0} % {1}",
    "aten::fmod": "math.fmod({0}, {1})",
    "aten::pow": "to_float({0}) ** {1}",  # int ** int is a float in TorchScript
    "aten::pow.int_to_int": "{0} ** {1}",
    "aten::pow.complex": "{0} ** {1}",
    "aten::neg": "-{0}",
    "aten::eq": "{0} == {1}",
    "aten::ne": "{0} != {1}",
    "aten::lt": "{0} < {1}",
    "aten::le": "{0} <= {1}",
    "aten::gt": "{0} > {1}",
    "aten::ge": "{0} >= {1}",
    "aten::__and__": "{0} & {1}",
    "aten::__or__": "{0} | {1}",
    "aten::__xor__": "{0} ^ {1}",
    "aten::__lshift__": "{0} << {1}",
    "aten::__rshift__": "{0} >> {1}",
    "aten::bitwise_not": "~{0}",
    "aten::abs": "abs({0})",
    "prim::abs": "abs({0})",
    "aten::round": "to_float(round({0}))",
    "aten::floor": "math.floor({0})",
    "aten::ceil": "math.ceil({0})",
    **_each(
        "math.NAME({*})",
        "sqrt exp expm1 log log1p log10 log2 sin cos tan asin acos atan atan2 sinh cosh tanh "
        "asinh acosh atanh erf erfc gamma lgamma degrees radians isnan isinf isfinite copysign "
        "gcd factorial ldexp frexp modf fabs hypot",
    ),
    "aten::factorial": "math.factorial({0})",
    "aten::mathremainder": "math.remainder({0}, {1})",
    "prim::min": "torch.sym_min({0}, {1})",
    "prim::max": "torch.sym_max({0}, {1})",
    "prim::min.self_int": "min({0})",
    "prim::max.self_int": "max({0})",
    "prim::min.self_float": "min({0})",
    "prim::max.self_float": "max({0})",
    "prim::min.self_bool": "min({0})",
    "prim::max.self_bool": "max({0})",
    "prim::min.int_list": "pick({0}, {1}, largest=False)",
    "prim::max.int_list": "pick({0}, {1}, largest=True)",
    "prim::min.float_list": "pick({0}, {1}, largest=False)",
    "prim::max.float_list": "pick({0}, {1}, largest=True)",
    **_each("list({0}.NAME())", "keys values items"),
    "aten::sum": "sum({0})",
    "aten::any": "any({0})",
    "aten::all": "all({0})",
    "aten::copy": "{0}.copy()",
    "aten::sort": "{0}.sort(reverse={1})",
    "aten::sorted": "sorted({0})",
    "aten::index": "{0}.index({1})",
    "aten::count": "{0}.count({*1})",
    "aten::slice": "{0}[{1}:{2}:{3}]",
    "aten::str": "str({0})",
    "aten::ord": "ord({0})",
    "aten::chr": "chr({0})",
    "aten::hex": "hex({0})",
    "aten::oct": "oct({0})",
    "aten::bin": "bin({0})",
    "aten::percentFormat": "percent({*})",
    **_each(
        "{0}.NAME({*1})",
        "upper lower strip lstrip rstrip join startswith endswith replace find rfind rindex "
        "isdigit isalpha isalnum isspace isupper islower isidentifier isdecimal isnumeric "
        "isprintable istitle capitalize title swapcase center ljust rjust zfill expandtabs "
        "splitlines partition rpartition",
    ),
    "aten::split.str": "{0}.split({*1})",
    "aten::rsplit": "{0}.rsplit({*1})",
    "aten::Complex": "complex({*})",
}
"""Where no operand is a tensor; the same kinds on tensors are torch operators."""

STATEMENTS = {"aten::append", "aten::add_", "aten::mul_", "aten::_set_item", "aten::Delete"}
"""Templates that are statements; the result, if any, is the list that they changed."""

NUMBERS: dict[str, str] = {
    "aten::add": "{0} + {1}",
    "aten::sub": "{0} - {1}",
    "aten::rsub": "{1} - {0}",
    "aten::mul": "{0} * {1}",
    "aten::div": "{0} / {1}",
    "aten::true_divide": "{0} / {1}",
    "aten::floor_divide": "{0} // {1}",
    "aten::div.floor": "{0} // {1}",
    "aten::div.trunc": "to_int({0} / {1})",
    "aten::remainder": "{0} % {1}",
    "aten::pow": "{0} ** {1}",
    "aten::neg": "-{0}",
    "aten::abs": "abs({0})",
    "aten::floor": "math.floor({0})",
    "aten::ceil": "math.ceil({0})",
    **_each("{0}", "to detach clone alias contiguous lift_fresh"),
}
"""Arithmetic on the 0-dim tensors in which a trace wraps sizes, done without the tensors."""

READS: dict[str, str] = {
    **dict.fromkeys(("Int", "IntImplicit"), "to_int({0})"),
    **dict.fromkeys(("Float", "FloatImplicit"), "to_float({0})"),
    **dict.fromkeys(("ScalarImplicit", "Scalar", "item"), "{0}"),
    "Bool": "bool({0})",
}
"""Where such a tensor becomes a number again."""

TAKES_NUMBERS = {
    prefix + suffix
    for prefix in ("add", "sub", "mul", "div", "floor_divide", "true_divide")
    for suffix in ("", "_")
}
"""Operators whose tensor operand may be a Python number (promoted as a number)."""

BUILTINS = {
    *(name for name in re.findall(r"[a-z_]+", " ".join([*ALWAYS.values(), *SCALAR.values()]))),
    *EXCEPTIONS,
    *("getattr", "range", "self"),
}
"""Names that a variable of generated source must not hide (and some more)."""
