"""How TorchScript's scalar, list, dict and string operators are spelt in Python.

A key is a node kind, with an overload where that matters. `{0}`, `{1}`… are the node's inputs,
`{*}` is all of them and `{*1}` all but the first.
"""

from __future__ import annotations

import re


def expand(template: str, texts: list[str]) -> str:
    """Fill a template with atoms; a negative number gets its parentheses."""

    def one(match: re.Match[str]) -> str:
        index = int(match[2] or 0)
        if match[1]:
            return ", ".join(texts[index:])
        alone = template[: match.start()].endswith(("(", "[", ", "))
        return f"({texts[index]})" if texts[index].startswith("-") and not alone else texts[index]

    return re.sub(r"\{(\*?)(\d*)\}", one, template)


def each(template: str, names: str, prefix: str = "aten::") -> dict[str, str]:
    """One template for several kinds; NAME in it is the kind's own name, without the overload."""
    return {prefix + name: template.replace("NAME", name.split(".")[0]) for name in names.split()}


METADATA: dict[str, str] = {
    **each(
        "{0}.NAME",
        "device is_cuda is_cpu is_quantized is_sparse is_sparse_csr is_meta is_mkldnn is_mps "
        "is_xpu is_xla is_vulkan is_ipu is_mtia is_nested is_maia requires_grad itemsize nbytes",
        "prim::",
    ),
    **each(
        "{0}.NAME()",
        "dim numel is_floating_point is_complex is_signed element_size storage_offset "
        "get_device is_neg is_conj is_inference",
    ),
    "prim::dtype": "number_of({0}.dtype)",
    "prim::layout": "number_of({0}.layout)",
    "aten::is_leaf": "{0}.is_leaf",
    "aten::is_contiguous": "{0}.is_contiguous()",
    "aten::is_contiguous.memory_format": "{0}.is_contiguous(memory_format=memoryformat_of[{1}])",
    "aten::size": "list({0}.size())",
    "aten::size.int": "{0}.size({1})",
    "aten::stride": "list({0}.stride())",
    "aten::stride.int": "{0}.stride({1})",
    "aten::len.Tensor": "{0}.size(0)",
}
"""Questions about a tensor that its data does not answer."""

ALWAYS: dict[str, str] = {
    **METADATA,
    # Without its switches for backends: torch 2.11 cannot trace it with symbolic sizes.
    "aten::_convolution": (
        "torch.ops.aten.convolution.default({0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8})"
    ),
    "aten::Int": "to_int({0})",
    "aten::Int.Tensor": "to_int({0}.item())",
    "aten::IntImplicit": "to_int({0}.item())",
    "aten::Float": "to_float({0})",
    "aten::Float.Tensor": "to_float({0}.item())",
    "aten::FloatImplicit": "to_float({0}.item())",
    "aten::Bool": "bool({0})",
    **each("{0}.item()", "ScalarImplicit item"),
    "aten::is_nonzero": "bool({0})",
    "aten::tensor": (
        "torch.tensor({0}, dtype=scalartype_of.get({1}), device={2}, requires_grad={3})"
    ),
    "aten::as_tensor": "torch.as_tensor({0}, dtype=scalartype_of.get({1}), device={2})",
    "aten::to.prim_Device": (
        "{0}.to(device={1}, dtype=scalartype_of.get({2}), non_blocking={3}, copy={4})"
    ),
    "aten::to.prim_dtype": "{0}.to(dtype=scalartype_of.get({1}), non_blocking={2}, copy={3})",
    "aten::to.prim_other": "{0}.to(dtype=None, non_blocking={1}, copy={2})",
    **each("{0}.NAME()", "cpu cuda"),
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
    **each(
        "{0}.NAME({*1})",
        "append extend insert pop clear reverse popitem remove get setdefault update",
    ),
    "aten::list": "list({0})",
    "aten::dict": "dict({*})",
    "aten::_set_item": "{0}[{1}] = {2}",
    "aten::Delete": "del {0}[{1}]",
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
"""Whatever the operands are."""

SCALAR: dict[str, str] = {
    **{
        f"aten::{name}": f"{{0}} {sign} {{1}}"
        for name, sign in (
            *(("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/"), ("floordiv", "//")),
            *(("remainder", "%"), ("mul_", "*="), ("eq", "=="), ("ne", "!="), ("lt", "<")),
            *(("le", "<="), ("gt", ">"), ("ge", ">="), ("__and__", "&"), ("__or__", "|")),
            *(("__xor__", "^"), ("__lshift__", "<<"), ("__rshift__", ">>")),
        )
    },
    "aten::add_": "{0}.extend({1})",  # += of lists: the list itself grows
    "aten::pow": "to_float({0}) ** {1}",  # int ** int is a float in TorchScript
    "aten::pow.int_to_int": "{0} ** {1}",
    "aten::pow.complex": "{0} ** {1}",
    "aten::neg": "-{0}",
    "aten::bitwise_not": "~{0}",
    **each("NAME({0})", "abs sum any all sorted str ord chr hex oct bin"),
    "prim::abs": "abs({0})",
    "aten::round": "to_float(round({0}))",
    **each(
        "math.NAME({*})",
        "sqrt exp expm1 log log1p log10 log2 sin cos tan asin acos atan atan2 sinh cosh tanh "
        "asinh acosh atanh erf erfc gamma lgamma degrees radians isnan isinf isfinite copysign "
        "floor ceil fmod gcd factorial ldexp frexp modf fabs hypot",
    ),
    "aten::mathremainder": "math.remainder({0}, {1})",
    "prim::min": "torch.sym_min({0}, {1})",
    "prim::max": "torch.sym_max({0}, {1})",
    **{
        f"prim::{name}.{overload}": f"{name}({{*}})"
        for name in ("min", "max")
        for kind in ("int", "float", "bool")
        for overload in (f"self_{kind}", f"{kind}_list")
    },
    **each("list({0}.NAME())", "keys values items"),
    "aten::copy": "{0}.copy()",
    "aten::sort": "{0}.sort(reverse={1})",
    "aten::index": "{0}.index({1})",
    "aten::count": "{0}.count({1})",
    **each(
        "{0}.NAME({1}, {2}, until({0}, {3}))",
        "find rfind rindex startswith endswith index.str count.default",
    ),
    "aten::slice": "{0}[{1}:{2}:{3}]",
    "aten::percentFormat": "{0} % ({*1})",
    **each(
        "{0}.NAME({*1})",
        "upper lower strip lstrip rstrip join replace split rsplit "
        "isdigit isalpha isalnum isspace isupper islower isidentifier isdecimal isnumeric "
        "isprintable istitle capitalize title swapcase center ljust rjust zfill expandtabs "
        "splitlines partition rpartition",
    ),
    "aten::Complex": "complex({*})",
}
"""Where no operand is a tensor; the same kinds on tensors are torch operators."""

STATEMENTS = {"aten::append", "aten::add_", "aten::mul_", "aten::_set_item", "aten::Delete"}
"""Templates that are statements; the result, if any, is the list that they changed."""
