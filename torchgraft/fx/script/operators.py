"""Operators: Python where a template knows them, else a call of the exact torch overload."""

from __future__ import annotations

import keyword
import re
from typing import Any

import torch
from torch import Tensor

from torchgraft.fx.script import sizes, templates
from torchgraft.fx.script.graph import Node, Value, is_constant, is_tensor, refuse, schema_of
from torchgraft.fx.script.runtime import ENUMS
from torchgraft.fx.script.writer import Writer


def python(w: Writer, node: Node) -> bool:
    """Emit the node as Python, if a template knows it."""
    kind, schema, inputs = node.kind(), schema_of(node), list(node.inputs())
    overload = f"{kind}.{schema.overload_name or 'default'}" if schema is not None else kind
    tables = [templates.ALWAYS]
    if not any(is_tensor(value) for value in inputs):
        tables.append(templates.SCALAR)
    template = next((t[key] for t in tables for key in (overload, kind) if key in t), None)
    if template is None:
        return False
    text = templates.expand(template, [w.ref(value) for value in inputs])
    if kind == "prim::dtype":
        w.alias(node, text)
    elif kind in templates.STATEMENTS:
        w.emit(text, node)
        for out in node.outputs():
            w.names[out.unique()] = w.ref(inputs[0])
    elif any(out.uses() for out in node.outputs()):
        w.assign(node, text)
    else:
        w.emit(text, node)
    return True


def call(w: Writer, node: Node) -> None:
    """Emit a call of the exact overload, without the arguments that have their defaults."""
    schema, inputs = schema_of(node), list(node.inputs())
    if schema is None or len(inputs) != len(schema.arguments):
        raise refuse(node, "it is no operator, and there is no Python for it")
    parts = (*node.kind().split("::"), schema.overload_name or "default")
    function: Any = torch.ops
    try:
        for part in parts:
            function = getattr(function, part)
    except AttributeError:
        raise refuse(node, "no such operator is loaded") from None
    if not isinstance(function, type(torch.ops.aten.add.Tensor)):
        raise refuse(node, "that is no operator")
    pairs = [
        (argument, _argument(w, value, argument, node.kind(), index))
        for index, (value, argument) in enumerate(zip(inputs, schema.arguments, strict=True))
    ]
    while pairs and _is_default(w, *pairs[-1]):
        pairs.pop()
    texts = [
        f"{argument.name}={text}" if argument.kwarg_only else text
        for argument, text in pairs
        if not (argument.kwarg_only and _is_default(w, argument, text))
    ]
    spelt = all(part.isidentifier() and not keyword.iskeyword(part) for part in parts)
    name = f"torch.ops.{'.'.join(parts)}" if spelt else w.keep(parts[1], function)
    w.assign(node, f"{name}({', '.join(texts)})")


def _is_default(w: Writer, argument: Any, text: str) -> bool:
    if not argument.has_default_value() or isinstance(argument.default_value, Tensor):
        return False
    return w.literal(argument.default_value) == text


def _argument(w: Writer, value: Value, argument: Any, kind: str, index: int) -> str:
    """One argument; the IR has numbers where torch takes dtypes, layouts and memory formats."""
    enum = re.fullmatch(r"(?:Optional\[)?(\w+)\]?", str(argument.real_type))
    if enum is None or enum[1] not in ENUMS:
        return sizes.operand(w, value, kind, index)
    if is_constant(value):
        number = value.toIValue()
        if number is not None and number not in ENUMS[enum[1]]:
            raise refuse(value.node(), f"{number!r} is no {enum[1]}")
        return str(ENUMS[enum[1]].get(number))
    if value.node().kind() == "prim::dtype" and enum[1] == "ScalarType":
        return f"{w.ref(value.node().input())}.dtype"
    return f"{enum[1].lower()}_of.get({w.ref(value)})"
