"""Names, expressions and lines of the generated source."""

from __future__ import annotations

import builtins
import itertools
import keyword
import math
import re
from typing import Any

import torch
from torch import Tensor

from torchgraft.fx.script.graph import Node, Value, is_constant, is_tensor, line_of
from torchgraft.fx.script.runtime import NAMESPACE
from torchgraft.fx.script.tree import Path, Tree

_RESERVED = {*NAMESPACE, *keyword.kwlist, *dir(builtins), "self"} - {"input"}
"""What a variable must not hide. `input` is never called, and is many an argument's name."""

_HINTS = {"listconstruct": "items", "tupleconstruct": "pack", "dictconstruct": "table"}


class Writer:
    """The source so far, and the expression of each value of the graph."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.names: dict[int, str] = {}  # the expression (always an atom) of each value
        self.numbers: dict[int, torch.dtype] = {}  # 0-dim tensors that are Python numbers here
        self.namespace: dict[str, Any] = dict(NAMESPACE)
        self.lines: list[str] = []
        self.depth = 1
        self._taken = set(_RESERVED)

    # Names

    def name(self, hint: str) -> str:
        """A fresh variable name close to the hint."""
        stem = re.sub(r"\W", "_", hint, flags=re.ASCII).strip("_") or "v"
        stem = f"v{stem}" if stem[0].isdigit() else stem
        names = itertools.chain([stem], map(f"{stem}_{{}}".format, itertools.count(1)))
        name = next(name for name in names if name not in self._taken)
        self._taken.add(name)
        return name

    def define(self, value: Value) -> str:
        """Name a value after its name in the IR, or after the operator that makes it."""
        hint = value.debugName()
        if re.fullmatch(r"[\d.]*", hint):
            kind = value.node().kind().split("::")[-1].lower()
            hint = _HINTS.get(kind, kind)
        self.names[value.unique()] = self.name(hint)
        return self.names[value.unique()]

    def keep(self, hint: str, value: Any) -> str:
        """The name of an object that generated code may use."""
        name = self.name(hint)
        self.namespace[name] = value
        return name

    # Expressions

    def ref(self, value: Value) -> str:
        """The expression of a value, which is a tensor if its type says so."""
        if not is_tensor(value):
            return self.raw(value)
        if value.unique() in self.numbers:
            return f"torch.scalar_tensor({self.raw(value)}, dtype={self.numbers[value.unique()]})"
        number = value.toIValue() if is_constant(value) else None
        if isinstance(number, (bool, int, float, complex)):  # as the constant came from one
            return f"torch.tensor({self.literal(number)}, dtype={value.node().t('value').dtype})"
        return self.raw(value)

    def raw(self, value: Value) -> str:
        """The expression of a value; a number where a trace wraps one in a tensor."""
        if value.unique() not in self.names:
            assert is_constant(value), value
            self.names[value.unique()] = self.literal(value.toIValue())
        return self.names[value.unique()]

    def literal(self, value: Any) -> str:
        """The value as source: only numbers, strings and torch's own enums are ever spelt out."""
        if isinstance(value, float) and not math.isfinite(value):
            return "math.nan" if math.isnan(value) else "-math.inf" if value < 0 else "math.inf"
        if value is None or type(value) in (bool, int, float, str):
            return repr(value)
        if isinstance(value, torch.dtype):
            return str(value)
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if type(value) is list:
            return f"[{', '.join(map(self.literal, value))}]"
        if type(value) is tuple:
            return pack([self.literal(v) for v in value])
        if type(value) is dict:
            pairs = (f"{self.literal(k)}: {self.literal(v)}" for k, v in value.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, Tensor):
            return self.path(self.tree.find(value))
        return self.keep("object", value)

    def path(self, path: Path) -> str:
        """The expression of an attribute of the module."""
        text = "self"
        for name in path:
            text = f"{text}.{name}" if is_name(name) else f"getattr({text}, {name!r})"
        return text

    # Statements

    def emit(self, text: str, node: Node = None, *, deeper: int = 0) -> None:
        """Add a line, with the place that the node comes from."""
        line = line_of(node) if node is not None else ""
        scope = self.tree.scope_of(node) if node is not None else ""
        comment = f"  # {line.rsplit('/', 1)[-1]}" if line or scope else ""
        comment += f" in {scope}" if scope else ""
        self.lines.append("    " * (self.depth + deeper) + text + comment)

    def assign(self, node: Node, text: str) -> None:
        """Add a line that gives a node's outputs their names."""
        names = [self.define(out) for out in node.outputs()]
        self.emit(f"{', '.join(names)} = {text}" if names else text, node)

    def alias(self, node: Node, text: str) -> None:
        """Use an atom wherever the node's output is used."""
        self.names[node.output().unique()] = text


def is_name(text: str) -> bool:
    """Whether the IR's name can stand in Python source, and reaches nothing of Python's own."""
    dunder = text.startswith("__") and text.endswith("__")
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text) and not dunder


def pack(items: list[str]) -> str:
    """A tuple's source."""
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
