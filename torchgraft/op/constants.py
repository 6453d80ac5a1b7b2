"""C++ constants without a compiler: numbers, strings, names and lists as defaults hold them."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from torchgraft.errors import MissingPackage
from torchgraft.op.prototype import ATTR_TYPES

if TYPE_CHECKING:
    from tree_sitter import Node

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
    """The tree of a header. The first argument of a macro may be a keyword, which no expression
    may be, so the parser is shown `Xlass` for `class`: read names from the source."""
    return tree(_FIRST.sub(rb"\1X", source), "reading REG_OP headers")


def tree(source: bytes, purpose: str) -> Node:
    """The tree of a C++ source."""
    try:
        from tree_sitter import Language, Parser
        from tree_sitter_cpp import language
    except ImportError as error:
        package = "tree-sitter and tree-sitter-cpp"
        raise MissingPackage(purpose, package, "prototypes") from error
    return Parser(Language(language())).parse(source).root_node


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
