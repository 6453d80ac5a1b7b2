"""Reading TorchScript's IR."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from torchgraft import _torch
from torchgraft.errors import UnsupportedScript
from torchgraft.fx import meta

Value = Any  # torch.Value, Node and Block: pybind classes without stubs worth the name
Node = Any
Block = Any


def walk(block: Block) -> Iterator[Node]:
    """Every node, outer ones first."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from walk(inner)


def line_of(node: Node) -> str:
    """`file:line` of the user's source, or nothing; safe to put in a comment."""
    for text in node.sourceRange().split("Serialized "):  # of a loaded one, the original is first
        for pattern in (r'File "([^"\n]+)", line (\d+)', r"(?m)^(\S[^\n]*)\((\d+)\): "):
            every = list(re.finditer(pattern, text))
            if every:  # the innermost that is not ours
                found = next((f for f in every if not f[1].startswith(meta.PACKAGE)), every[0])
                return re.sub(r"[^\w./<> -]", "?", found[1], flags=re.ASCII) + ":" + found[2]
    return ""


def frames_of(node: Node) -> list[tuple[str, int]]:
    """Every line of the user's source on the way to a traced node, innermost first."""
    found = re.findall(r"(?m)^(\S[^\n]*)\((\d+)\): ", node.sourceRange())
    return [(file, int(line)) for file, line in found]


def refuse(node: Node, why: str) -> UnsupportedScript:
    """The error to raise."""
    return UnsupportedScript(node.kind(), line_of(node), why)


def is_tensor(value: Value) -> bool:
    """A tensor, or an optional one."""
    kind = value.type()
    kind = kind.getElementType() if kind.kind() == "OptionalType" else kind
    return bool(kind.kind() == "TensorType")


def is_constant(value: Value) -> bool:
    """Whether the graph itself holds the value."""
    return bool(value.node().kind() == "prim::Constant")


def number_in(value: Value) -> Any:
    """The number that a constant 0-dim tensor holds, or None."""
    if not is_constant(value) or not is_tensor(value):
        return None
    held = value.toIValue()
    if isinstance(held, Tensor):
        return held.item() if held.dim() == 0 else None
    return held


def schema_of(node: Node) -> Any:
    """The schema of the exact overload, or None for nodes that have none."""
    text = node.schema()
    return None if text == "(no schema)" else _parse(text)


_parse = functools.cache(_torch.parse_schema)


def writes(node: Node, index: int) -> bool:
    """Whether a node changes that input in place."""
    if node.kind() == "prim::SetAttr":
        return index == 0
    schema = schema_of(node)
    if schema is None or index >= len(schema.arguments):
        return False
    alias = schema.arguments[index].alias_info
    return alias is not None and bool(alias.is_write)


def is_changed(value: Value) -> bool:
    """Whether some node changes the tensor, list, dict or object in place."""
    return any(writes(use.user, use.offset) for use in value.uses())
