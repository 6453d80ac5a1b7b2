"""The IR's own nodes: structure, attributes and control flow, one function per kind."""

from __future__ import annotations

import builtins
import re
import sys
from collections import namedtuple
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torchgraft.fx.mark import fallback
from torchgraft.fx.script import operators, sizes
from torchgraft.fx.script.graph import Block, Node, Value, is_constant, refuse
from torchgraft.fx.script.runtime import KINDS
from torchgraft.fx.script.writer import Writer, is_name, pack

Write = Callable[[Writer, Node], None]

_FOREVER = 2**63 - 1  # the trip count of a while loop
_WRITERS: dict[str, Write] = {"prim::NumToTensor": sizes.wrap}


def write(w: Writer, block: Block) -> bool:
    """Emit a block's nodes; False when it ends in a raise."""
    depth = w.depth
    for node in block.nodes():
        writer = _WRITERS.get(node.kind())
        if writer is not None:
            writer(w, node)
        elif not sizes.write(w, node) and not operators.python(w, node):
            operators.call(w, node)
        if node.kind() == "prim::RaiseException":
            w.depth = depth  # out of any `with`
            return False
    return True


def _on(*kinds: str) -> Callable[[Write], Write]:
    def register(function: Write) -> Write:
        _WRITERS.update({f"prim::{kind}": function for kind in kinds})
        return function

    return register


# --- Values ---


@_on("Constant")
def _constant(w: Writer, node: Node) -> None:
    pass  # spelt where it is used


@_on("Uninitialized")
def _uninitialized(w: Writer, node: Node) -> None:
    w.alias(node, "None")


@_on("unchecked_cast", "unchecked_unwrap_optional")
def _cast(w: Writer, node: Node) -> None:
    w.alias(node, w.raw(node.input()))
    if node.input().unique() in w.numbers:
        w.numbers[node.output().unique()] = w.numbers[node.input().unique()]


@_on("TupleConstruct")
def _tuple(w: Writer, node: Node) -> None:
    items = [w.ref(value) for value in node.inputs()]
    made = _named(node.output().type())
    name = w.keep(made.__name__, made) if made is not None else ""
    w.assign(node, f"{name}({', '.join(items)})" if name else pack(items))


@_on("ListConstruct")
def _list(w: Writer, node: Node) -> None:
    w.assign(node, f"[{', '.join(w.ref(value) for value in node.inputs())}]")


@_on("DictConstruct")
def _dict(w: Writer, node: Node) -> None:
    flat = [w.ref(value) for value in node.inputs()]
    pairs = (f"{key}: {value}" for key, value in zip(flat[::2], flat[1::2], strict=True))
    w.assign(node, f"{{{', '.join(pairs)}}}")


@_on("TupleUnpack", "ListUnpack")
def _unpack(w: Writer, node: Node) -> None:
    if node.outputsSize():
        _take_apart(w, node, w.ref(node.input()))


@_on("ConstantChunk")
def _chunk(w: Writer, node: Node) -> None:
    _take_apart(w, node, f"{w.ref(node.input())}.chunk({node.i('chunks')}, {node.i('dim')})")


def _take_apart(w: Writer, node: Node, text: str) -> None:
    names = [w.define(out) for out in node.outputs()]
    w.emit(f"{', '.join(names) if len(names) > 1 else pack(names)} = {text}", node)


@_on("TupleSlice")
def _slice(w: Writer, node: Node) -> None:
    w.assign(node, f"{w.ref(node.input())}[{node.i('beg')}:{node.i('end')}]")


@_on("isinstance")
def _isinstance(w: Writer, node: Node) -> None:
    kinds = [kind.kind() for kind in node.tys("types")]
    if not all(kind in KINDS for kind in kinds):
        raise refuse(node, f"a check for {', '.join(kinds)}")
    w.assign(node, f"is_a({', '.join([w.ref(node.input()), *map(repr, kinds)])})")


def _named(kind: Any) -> Any:
    """The NamedTuple class of a tuple type: the user's own where it is loaded, else a twin."""
    text = kind.str()
    if not text.startswith("NamedTuple("):
        return None
    flat = text[len("NamedTuple(") : -1]
    while flat != (flat := re.sub(r"\([^()]*\)|\[[^\[\]]*\]", "", flat)):
        pass
    fields = [part.split(":")[0].strip() for part in flat.split(",")]
    if len(fields) != len(kind.elements()) or not all(
        is_name(field) and not field.startswith("_") for field in fields
    ):
        return None
    *scope, name = kind.annotation_str.split(".")
    scope = [s for s in scope if s != "__torch__" and not s.startswith("___torch_mangle")]
    found = getattr(sys.modules.get(".".join(scope) or "__main__"), name, None)
    known = isinstance(found, type) and issubclass(found, tuple)
    if known and getattr(found, "_fields", None) == tuple(fields):
        return found
    return namedtuple(name if is_name(name) else "Result", fields)


# --- Attributes and objects ---


@_on("GetAttr")
def _get(w: Writer, node: Node) -> None:
    owner, name = w.tree.path_of(node.input()), node.s("name")
    if owner is None:
        w.assign(node, f"{w.ref(node.input())}.{_checked(node)}")
    elif w.tree.path_of(node.output()) is None:
        value, text = w.tree.hold(owner, name), w.path((*owner, name))
        if w.tree.is_written(node):
            w.assign(node, text)
        elif _lists_tensors(value) and not w.tree.is_state(node):
            w.alias(node, w.literal(value))  # so that a tracer sees parameters, not constants
        else:
            w.alias(node, text)


@_on("SetAttr")
def _set(w: Writer, node: Node) -> None:
    target, value = node.inputs()
    name, owner = _checked(node), w.tree.path_of(target)
    if owner is not None:
        w.tree.hold(owner, name)
    left = w.ref(target) if owner is None else w.path(owner)
    w.emit(f"{left}.{name} = {w.ref(value)}", node)


@_on("CreateObject")
def _object(w: Writer, node: Node) -> None:
    w.assign(node, "Record()")


def _checked(node: Node) -> str:
    """The attribute's name, as source."""
    name: str = node.s("name")
    if not is_name(name):
        raise refuse(node, f"{name!r} is not a name")
    return name


def _lists_tensors(value: Any) -> bool:
    """Whether it is a container with a tensor in it, at any depth."""
    items = value.values() if isinstance(value, dict) else value
    return isinstance(value, (list, tuple, dict)) and any(
        isinstance(item, Tensor) or _lists_tensors(item) for item in items
    )


# --- Control flow ---


@_on("If")
def _if(w: Writer, node: Node) -> None:
    yes, no = node.blocks()
    names = [w.define(out) for out in node.outputs()]
    w.emit(f"if {w.ref(node.input())}:", node)
    _body(w, yes, zip(names, yes.outputs(), strict=True))
    w.emit("else:")
    _body(w, no, zip(names, no.outputs(), strict=True))


@_on("Loop")
def _loop(w: Writer, node: Node) -> None:
    trips, first, *initial = node.inputs()
    (block,) = node.blocks()
    index, *carried = block.inputs()
    again, *results = block.outputs()
    names = [w.define(out) for out in node.outputs()]
    for name, value, inner in zip(names, initial, carried, strict=True):
        w.emit(f"{name} = {w.ref(value)}")
        w.names[inner.unique()] = name
    ends = list(zip(names, results, strict=True))
    count = w.define(index)
    if all(is_constant(value) and value.toIValue() for value in (first, again)):
        w.emit(f"for {count} in range({w.ref(trips)}):", node)
    else:
        going = w.name("going")
        w.emit(f"{going} = {w.ref(first)}")
        ends.append((going, again))
        if is_constant(trips) and trips.toIValue() == _FOREVER:
            w.emit(f"{count} = -1")
            w.emit(f"while {going}:", node)
            w.emit(f"{count} += 1", deeper=1)
        else:
            w.emit(f"for {count} in range({w.ref(trips)}):", node)
            w.emit(f"if not {going}:", deeper=1)
            w.emit("break", deeper=2)
    _body(w, block, ends)


def _body(w: Writer, block: Block, results: Iterable[tuple[str, Value]]) -> None:
    """Emit an indented block that ends by assigning its results."""
    w.depth += 1
    start = len(w.lines)
    if write(w, block):
        pairs = [(name, w.ref(value)) for name, value in results]
        pairs = [(name, text) for name, text in pairs if name != text]
        if pairs:
            names, texts = zip(*pairs, strict=True)
            w.emit(f"{', '.join(names)} = {', '.join(texts)}")
    if len(w.lines) == start:
        w.emit("pass")
    w.depth -= 1


_BLOCKS = {"no_grad": torch.no_grad, "ScriptedFallback": fallback}


@_on("Enter")
def _enter(w: Writer, node: Node) -> None:
    name = node.input().type().annotation_str.rsplit(".", 1)[-1]
    if name in _BLOCKS:
        w.emit(f"with {w.keep('block', _BLOCKS[name])}():", node)
        w.depth += 1
        w.emit("pass")
    elif name != "record_function":
        raise refuse(node, f"`with {name}` is not supported")


@_on("Exit")
def _exit(w: Writer, node: Node) -> None:
    if node.input().type().annotation_str.rsplit(".", 1)[-1] in _BLOCKS:
        w.depth -= 1


@_on("RaiseException")
def _raise(w: Writer, node: Node) -> None:
    message, *given = node.inputs()
    name = given[0].toIValue() if given and is_constant(given[0]) else None
    error = getattr(builtins, str(name).rsplit(".", 1)[-1], None)
    if not (isinstance(error, type) and issubclass(error, Exception)):
        error = RuntimeError
    w.emit(f"raise {error.__name__}({w.ref(message)})", node)
