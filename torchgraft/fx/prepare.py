"""How each constant of a program comes about from its weights, as a graph that can run again.

Folding and packing compute tensors at compile time. A `Prepare` in `gm.meta["prepare"]` is told of
each, and knows a tensor by its identity; what nobody told it of may have been made of weights.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from torchgraft import _torch

aten = torch.ops.aten


class Prepare:
    """A graph from weights (its placeholders) to values (its outputs)."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.weights: dict[str, Tensor] = {}  # by placeholder's target, in order
        self.unknown: set[str] = set()  # those of them that nobody declared
        self._constants = 0
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

    def constant(self, tensor: Tensor) -> None:
        """Declare a tensor that is the same for all weights, such as one made of their sizes."""
        self._constants += 1
        self.weight(f"constant.made.{self._constants}", tensor)

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
        target, args, kwargs = _shorter(target, tuple(args), kwargs)
        if isinstance(target, Node):
            return target
        key = (target, repr(args), repr(kwargs))  # nodes are unique by name, floats by repr
        if key not in self._calls:
            self._calls[key] = self.graph.call_function(target, args, dict(kwargs))
        return self._calls[key]


def _shorter(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """A call as it need be; in place of its target a node that has the value already.

    Inductor packs a weight for oneDNN, and unpacks it again where it generates the product itself;
    what it then pads to a whole number of blocks often needs no padding. Each is a copy of all the
    weights whenever a package is loaded.
    """
    source = args[0] if args and isinstance(args[0], Node) else None
    if source is None or kwargs:
        return target, args, kwargs
    if target is aten._to_dense.default and len(args) == 1 and _is_packing(source):
        return aten.contiguous.default, (source.args[0],), {}
    if target is aten.constant_pad_nd.default and not any(args[1]) and _is_dense(source):
        return source, (), {}
    return target, args, kwargs


def _is_packing(node: Node) -> bool:
    return str(node.target) == "mkldnn._reorder_linear_weight.default"


def _is_dense(node: Node) -> bool:
    """Whether a value has no gaps, so that a copy has its strides."""
    while node.target in (aten.transpose.int, aten.permute.default):
        [node, *_] = node.all_input_nodes
    return node.target is aten.contiguous.default
