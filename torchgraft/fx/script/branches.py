"""Which control flow is left for run time, and what it hangs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torchgraft.fx.script import graph as ir
from torchgraft.fx.script.graph import Block, Node, Value
from torchgraft.fx.script.sizes import NUMBERS
from torchgraft.fx.script.templates import METADATA
from torchgraft.fx.script.tree import Tree

On = Literal["data", "argument", "shape"]


@dataclass(frozen=True)
class Branch:
    """Control flow that is left for run time, and what it hangs on."""

    kind: Literal["if", "loop"]
    line: str
    on: On


def find(graph: Any, tree: Tree) -> tuple[Branch, ...]:
    """Every branch and loop that constants do not decide, with the worst of what decides it."""
    depends, found = _Depends(graph, tree), []
    worst: tuple[On, ...] = ("data", "argument", "shape")
    for node in ir.walk(graph):
        on = depends(*_deciders(node))
        if on:
            kind: Literal["if", "loop"] = "if" if node.kind() == "prim::If" else "loop"
            found.append(Branch(kind, ir.line_of(node), next(o for o in worst if o in on)))
    return tuple(found)


def _deciders(node: Node) -> list[Value]:
    """The values that say which way control flow goes; none for any other node."""
    if node.kind() == "prim::If":
        return [node.input()]
    if node.kind() == "prim::Loop":
        trips, first, *_ = node.inputs()
        (body,) = node.blocks()
        return [trips, first, next(body.outputs())]
    return []


class _Depends:
    """What values hang on: tensor data, an argument, or shapes only."""

    def __init__(self, graph: Any, tree: Tree) -> None:
        self.of: dict[int, frozenset[On]] = {}
        self.tree = tree
        for value in graph.inputs():
            if tree.path_of(value) is None:
                plain = "Tensor" not in value.type().annotation_str
                self.of[value.unique()] = frozenset({"argument" if plain else "data"})
        self.settled = False
        while not self.settled:  # loops, and lists that grow, carry things backwards
            self.settled = True
            self.block(graph, frozenset())

    def __call__(self, *values: Value) -> frozenset[On]:
        return frozenset().union(*(self.of.get(v.unique(), frozenset()) for v in values))

    def add(self, value: Value, on: frozenset[On]) -> None:
        known = self(value)
        if not on <= known:
            self.of[value.unique()] = known | on
            self.settled = False

    def block(self, block: Block, around: frozenset[On]) -> None:
        """Visit a block that runs only where what `around` names says so."""
        for node in block.nodes():
            if node.kind() == "prim::If":
                self.branch(node, around)
            elif node.kind() == "prim::Loop":
                self.loop(node, around)
            else:
                self.plain(node, around)

    def branch(self, node: Node, around: frozenset[On]) -> None:
        on = self(*_deciders(node))
        for inner in node.blocks():
            self.block(inner, around | on)
            for out, value in zip(node.outputs(), inner.outputs(), strict=True):
                self.add(out, self(value) | on)

    def loop(self, node: Node, around: frozenset[On]) -> None:
        on = self(*_deciders(node))
        (body,) = node.blocks()
        _, _, *initial = node.inputs()
        index, *carried = body.inputs()
        _, *results = body.outputs()
        self.add(index, on)
        for into, first, last, out in zip(carried, initial, results, node.outputs(), strict=True):
            self.add(into, self(first, last) | on)
            self.add(out, self(first, last) | on)
        self.block(body, around | on)

    def plain(self, node: Node, around: frozenset[On]) -> None:
        inputs = list(node.inputs())
        on = self.result(node, inputs)
        for out in node.outputs():
            self.add(out, on)
        if inputs and ir.writes(node, 0):
            self.add(inputs[0], self(*inputs) | around)

    def result(self, node: Node, inputs: list[Value]) -> frozenset[On]:
        """What the outputs of a node without blocks hang on."""
        kind, on = node.kind(), self(*inputs)
        if kind in (*METADATA, "aten::len") and inputs and ir.is_tensor(inputs[0]):
            return self(*inputs[1:]) | {"shape"}
        if kind in ("aten::__is__", "aten::__isnot__", "aten::len"):
            return frozenset("argument" if o == "data" else o for o in on)
        if kind == "prim::NumToTensor" or kind in NUMBERS:
            return on
        if any(ir.is_tensor(out) for out in node.outputs()):
            return on | {"data"}
        if kind == "prim::GetAttr" and self.tree.is_state(node):
            return on | {"argument"}  # it is there before the call, as arguments are
        return on
