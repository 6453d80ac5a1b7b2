"""How each constant of a program comes about from its weights, as a graph that can run again.

Folding and packing compute tensors at compile time. A `Prepare` in `gm.meta["prepare"]` is told of
each, and knows a tensor by its identity; what nobody told it of is a constant of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from torchgraft import _torch


class Prepare:
    """A graph from weights (its placeholders) to values (its outputs)."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.weights: dict[str, Tensor] = {}  # by placeholder's target, in order
        self.unknown: set[str] = set()  # those of them that no state dict names
        self.values: list[Node] = []
        self._nodes: dict[int, Node] = {}  # by identity of a tensor
        self._kept: list[Tensor] = []  # so that no identity is used twice
        self._calls: dict[Any, Node] = {}

    def weight(self, name: str, tensor: Tensor) -> None:
        """Declare a tensor that will be given. Of two names for one tensor, the first is used."""
        self.weights[name] = tensor
        node = self._placeholder()
        if id(tensor) not in self._nodes:
            self._remember(tensor, node)

    def folded(self, gm: GraphModule, node: Node, made: Tensor) -> None:
        """`made` is what a node of `gm`, which depends on its constants alone, gives."""
        if id(made) not in self._nodes:
            self._remember(made, self._copied(gm, node))

    def same(self, made: Any, source: Any) -> None:
        """`made` is a copy of `source`."""
        if made is not source and isinstance(made, Tensor):
            self._remember(made, self._of(source))

    def value(self, tensor: Tensor) -> int:
        """The place of a tensor among the values."""
        node = self._of(tensor)
        if node not in self.values:
            self.values.append(node)
        return self.values.index(node)

    def _placeholder(self) -> Node:
        first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        graph = self.graph
        with graph.inserting_after() if first is None else graph.inserting_before(first):
            return self.graph.placeholder(f"w{len(self.weights)}")

    def _remember(self, tensor: Tensor, node: Node) -> None:
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)

    def _of(self, tensor: Tensor) -> Node:
        if id(tensor) not in self._nodes:
            name = f"constant.{len(self.unknown)}"
            self.unknown.add(name)
            self.weight(name, tensor)
        return self._nodes[id(tensor)]

    def _copied(self, gm: GraphModule, node: Node) -> Node:
        if node.op == "get_attr":
            held = operator.attrgetter(str(node.target))(gm)
            return self._of(held)
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: self._copied(gm, n))
        return self._call(node.target, args, kwargs)

    def _call(self, target: Any, args: Any, kwargs: Mapping[str, Any]) -> Node:
        if _torch.is_packet(target):  # Inductor leaves the overload open where there is but one
            target = getattr(target, target.overloads()[0])
        key = (target, repr(args), repr(kwargs))  # nodes are unique by name, floats by repr
        if key not in self._calls:
            self._calls[key] = self.graph.call_function(target, tuple(args), dict(kwargs))
        return self._calls[key]
