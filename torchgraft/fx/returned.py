"""Whose memory an output is: an input's, the program's own, or nobody's yet."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from torchgraft import _torch
from torchgraft.fx import meta
from torchgraft.fx.dialect import is_pure, is_view

View = Callable[..., Tensor]


def copy_constants(gm: GraphModule) -> None:
    """Return copies of weights and constants, in place: a caller who writes to an output must not
    write to the program. Outputs that share memory share it still.

    Copies are launched as themselves; a generator would fold them into constants again.
    """
    constant: set[Node] = set()
    for node in gm.graph.nodes:
        used = node.all_input_nodes
        if node.op == "get_attr" or (used and is_pure(node) and constant.issuperset(used)):
            constant.add(node)
    *_, output = gm.graph.nodes
    made: dict[Node, Node] = {}

    def fresh(node: Node) -> Node:
        if node not in made:
            source = _viewed(node)
            with gm.graph.inserting_before(output):
                if source is not None and source in constant:
                    base = fresh(source)
                    new = gm.graph.node_copy(node, lambda n: base if n is source else n)
                else:
                    new = gm.graph.call_function(torch.ops.aten.clone.default, (node,))
            meta.inherit(new, node)
            new.meta["val"] = meta.compute(gm, new)
            new.meta["copy"] = "a constant is returned as a copy"
            made[node] = new
        return made[node]

    def own(node: Node) -> Node:
        is_tensor = isinstance(node.meta.get("val"), Tensor)
        return fresh(node) if node in constant and is_tensor else node

    output.args = (map_arg(output.args[0], own),)


def views_of_inputs(gm: GraphModule, states: int) -> dict[int, tuple[int, View]]:
    """The outputs that are an input or a view of one: the input's number, and what makes the output
    from all inputs. The last placeholders are states, not inputs."""
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    inputs = placeholders[: len(placeholders) - states]
    views: dict[int, tuple[int, View]] = {}
    for i, node in enumerate(meta.outputs_of(gm)):
        root = node
        while isinstance(root, Node) and (source := _viewed(root)) is not None:
            root = source
        if root in inputs:
            views[i] = (inputs.index(root), functools.partial(replay, gm, node))
    return views


def _viewed(node: Node) -> Node | None:
    """What a view is a view of."""
    if node.op != "call_function" or node.target is operator.getitem or not is_view(node):
        return None
    source = node.args[0] if node.args else None
    return source if isinstance(source, Node) else None


def replay(gm: GraphModule, node: Node, *inputs: Any) -> Any:
    """The value of one node, computed on ATen from the inputs alone."""
    return torch.fx.Interpreter(_torch.graph_module(gm, alone(gm, node, len(inputs)))).run(*inputs)


def alone(gm: GraphModule, node: Node, count: int) -> Graph:
    """A graph of what one node needs, which takes the first `count` inputs and gives the node."""
    graph, env = Graph(), {}
    for placeholder in gm.graph.find_nodes(op="placeholder")[:count]:
        env[placeholder] = graph.placeholder(placeholder.name)

    def copied(used: Node) -> Node:
        if used not in env:
            env[used] = graph.node_copy(used, copied)
        return env[used]

    graph.output(copied(node))
    return graph
