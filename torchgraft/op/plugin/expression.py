"""C++ expressions of op-plugin files (sizes, dtypes, formulas of gradients), evaluated in Python.

What they may hold is small and known: arguments, numbers, lists, arithmetic, conditions, methods
of tensors, calls of operators. Anything else is an error when the file is read, not at a call.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgraft.op.constants import number, tree, unquote

if TYPE_CHECKING:
    from tree_sitter import Node

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "%": operator.mod,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_UNARY: dict[str, Callable[[Any], Any]] = {
    "-": operator.neg,
    "+": operator.pos,
    "!": operator.not_,
}
_KINDS = {
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Short": torch.int16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Half": torch.float16,
    "Float": torch.float32,
    "Double": torch.float64,
    "Bool": torch.bool,
    "BFloat16": torch.bfloat16,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
    "QInt8": torch.qint8,
    "QInt32": torch.qint32,
}
_WORDS = {"true": True, "false": False, "nullptr": None, "nullopt": None, "Tensor": Tensor}
_CASTS = {"static_cast", "int64_t", "double", "bool", "Scalar", "IntArrayRef", "vector"}
_CASTS |= {"SmallVector", "Tensor", "SymInt", "optional", "array_to_small_vector"}

_METHODS: dict[str, Callable[..., Any]] = {
    "sizes": lambda x: list(x.shape),
    "sym_sizes": lambda x: list(x.shape),
    "sym_size": lambda x, dim: x.shape[dim],
    "sym_numel": lambda x: x.numel(),
    "scalar_type": lambda x: x.dtype,
    "dtype": lambda x: x.dtype,
    "options": lambda x: x,
    "defined": lambda x: x is not None,
    "has_value": lambda x: x is not None,
    "value": lambda x: x,
    "value_or": lambda x, other: other if x is None else x,
    "size": lambda x, *dim: x.size(*dim) if isinstance(x, Tensor) else len(x),
    "empty": lambda x: len(x) == 0,
    "toDouble": float,
    "toFloat": float,
    "toInt": int,
    "toLong": int,
    "toBool": bool,
}
_LIKE_TORCH = re.compile(r"[a-z_]\w*")


def _broadcast(a: Any, b: Any) -> list[int]:
    shapes = (list(x.shape) if isinstance(x, Tensor) else x for x in (a, b))
    broadcast: Any = torch.broadcast_shapes  # untyped in torch
    return list(broadcast(*(tuple(shape) for shape in shapes)))


def _reduced(x: Tensor, dims: int | Sequence[int], keepdim: bool = False) -> list[int]:
    dims = [dims] if isinstance(dims, int) else list(dims) or list(range(x.dim()))
    gone = {dim % max(x.dim(), 1) for dim in dims}
    kept = [(i, size) for i, size in enumerate(x.shape) if keepdim or i not in gone]
    return [1 if i in gone else size for i, size in kept]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "broadcast_ops_npu_output_size": _broadcast,
    "reduce_ops_npu_output_size": _reduced,
    "input_same_output_size": lambda x: list(x.shape),
    "array_to_small_vector": list,
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "min": min,
    "max": max,
}
"""Functions that the files call and that are not operators."""


class Expression:
    """One expression. Raises ValueError for what it cannot be."""

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        self._source = f"auto _ = {self.text};".encode()
        root = tree(self._source, "reading op-plugin files")
        declared = root.children[0] if root.children else root
        found = declared.child_by_field_name("declarator")
        value = found.child_by_field_name("value") if found else None
        if value is None or root.has_error or root.child_count != 1:
            raise ValueError(f"{self.text!r}, which is no C++ expression")
        self._root = value
        self.names = tuple(dict.fromkeys(self._names(value)))
        """The arguments that it reads, in order."""

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """Its value, with these arguments."""
        return self._value(self._root, values)

    def _say(self, node: Node) -> str:
        return self._source[node.start_byte : node.end_byte].decode()

    def _word(self, node: Node) -> str:
        """The last part of a qualified name, without template arguments."""
        return re.sub(r"<.*", "", self._say(node), flags=re.DOTALL).rpartition("::")[2].strip()

    def _inner(self, node: Node | None) -> list[Node]:
        return [one for one in node.named_children if one.type != "comment"] if node else []

    def _parts(self, node: Node, *fields: str) -> list[Node]:
        parts = [node.child_by_field_name(field) for field in fields]
        if None in parts:
            raise ValueError(f"{self._say(node)!r}, which cannot be read")
        return [part for part in parts if part is not None]

    def _names(self, node: Node) -> Iterator[str]:
        """The names that it reads. Walks everything, so that odd things show when it is read."""
        if node.type == "identifier":
            if (word := self._say(node)) not in _WORDS and self._dtype(word) is None:
                yield word
        elif node.type == "call_expression":
            function, arguments = self._parts(node, "function", "arguments")
            if function.type == "field_expression":
                yield from self._names(self._parts(function, "argument")[0])
            else:
                self._function(function)
            for one in self._inner(arguments):
                yield from self._names(one)
        elif node.type == "compound_literal_expression":
            yield from self._names(self._parts(node, "value")[0])
        elif node.type in ("qualified_identifier", "number_literal", "string_literal"):
            self._value(node, {})
        elif node.type in ("true", "false", "null"):
            return
        elif node.type in (
            "binary_expression", "unary_expression", "conditional_expression",
            "parenthesized_expression", "initializer_list", "subscript_expression",
            "subscript_argument_list",
        ):  # fmt: skip
            for one in self._inner(node):
                yield from self._names(one)
        else:
            raise ValueError(f"{self._say(node)!r}, which cannot be evaluated without a compiler")

    def _value(self, node: Node, values: Mapping[str, Any]) -> Any:
        def of(child: Node) -> Any:
            return self._value(child, values)

        text = self._say(node)
        if node.type in ("identifier", "qualified_identifier", "true", "false"):
            return self._named(node, values)
        if node.type == "number_literal":
            return number(text)
        if node.type == "string_literal":
            return unquote(text.encode())
        if node.type in ("initializer_list", "subscript_argument_list"):
            return [of(one) for one in self._inner(node)]
        if node.type == "parenthesized_expression":
            return of(self._inner(node)[0])
        if node.type == "compound_literal_expression":
            return of(self._parts(node, "value")[0])
        if node.type == "conditional_expression":
            test, then, other = self._parts(node, "condition", "consequence", "alternative")
            return of(then) if of(test) else of(other)
        if node.type == "unary_expression":
            operand = self._parts(node, "argument")[0]
            return _UNARY[self._say(node.children[0])](of(operand))
        if node.type == "binary_expression":
            return self._binary(node, of)
        if node.type == "subscript_expression":
            base, index = self._parts(node, "argument", "indices")
            return of(base)[of(index)[0]]
        if node.type == "call_expression":
            return self._call(node, of)
        return None  # nullptr

    def _named(self, node: Node, values: Mapping[str, Any]) -> Any:
        word = self._word(node)
        if node.type == "identifier" and word in values:
            return values[word]
        if word in _WORDS:
            return _WORDS[word]
        dtype = self._dtype(word)
        if dtype is None and node.type == "qualified_identifier":
            dtype = _KINDS.get(word)
        if dtype is None:
            raise ValueError(f"{self._say(node)!r} is not known here")
        return dtype

    def _dtype(self, word: str) -> torch.dtype | None:
        return _KINDS.get(word[1:]) if word.startswith("k") else None

    def _binary(self, node: Node, of: Callable[[Node], Any]) -> Any:
        left, right = self._parts(node, "left", "right")
        sign = self._say(node.children[1])
        if sign in ("&&", "||"):
            return (of(left) and of(right)) if sign == "&&" else (of(left) or of(right))
        a, b = of(left), of(right)
        if sign == "/":  # of integers, C++ rounds towards zero
            whole = isinstance(a, int) and isinstance(b, int)
            return int(a / b) if whole else a / b
        return _BINARY[sign](a, b)

    def _call(self, node: Node, of: Callable[[Node], Any]) -> Any:
        function, arguments = self._parts(node, "function", "arguments")
        given = [of(one) for one in self._inner(arguments)]
        if function.type != "field_expression":
            return self._function(function)(*given)
        base, field = self._parts(function, "argument", "field")
        name, value = self._word(field), of(base)
        if name in _METHODS:
            return _METHODS[name](value, *given)
        return getattr(value, name)(*given)

    def _function(self, node: Node) -> Callable[..., Any]:
        """What a call of this name does; operators are looked up when it is called."""
        name, text = self._word(node), self._say(node)
        if found := re.fullmatch(r"(?:std::)?get<(\d+)>", text):
            return operator.itemgetter(int(found[1]))
        if name in FUNCTIONS:
            return FUNCTIONS[name]
        if name in _CASTS:
            return lambda *given: given[0] if given else None
        if not _LIKE_TORCH.fullmatch(name):
            raise ValueError(f"{text!r}, which is no function that torchgraft knows")

        def call(*given: Any) -> Any:
            for space in (torch.ops.npu, torch.ops.aten):
                if callable(op := getattr(space, name, None)):
                    return op(*given)
            raise ValueError(f"{text!r} in {self.text!r} is no operator of npu or aten")

        return call
