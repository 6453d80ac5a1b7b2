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

aten = torch.ops.aten
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
                    new = gm.graph.call_function(aten.clone.default, (node,))
            meta.inherit(new, node)
            new.meta["val"] = meta.compute(gm, new)
            new.meta["copy"] = "a constant is returned as a copy"
            made[node] = new
        return made[node]

    def own(node: Node) -> Node:
        is_tensor = isinstance(node.meta.get("val"), Tensor)
        return fresh(node) if node in constant and is_tensor else node

    output.args = (map_arg(output.args[0], own),)


def keep_strides(gm: GraphModule, before: Any) -> None:
    """Return what a rewrite laid out otherwise as it was `before`, in place. A caller can tell, and
    a backward graph was traced with what its forward graph gave. `before` is a value, or several,
    as the graph returns them."""
    output = gm.graph.output_node()
    made: dict[tuple[Node, Any], Node] = {}

    def kept(node: Any, old: Any) -> Any:
        new: Any = node.meta.get("val") if isinstance(node, Node) else None
        now, was = strides(new), strides(old)
        if now is None or was is None or now == was or new.dim() != old.dim():
            return node
        if (node, was) not in made:
            made[node, was] = _laid_out(gm, node, old)
        return made[node, was]

    [given] = output.args
    if isinstance(given, Node):
        output.args = (kept(given, before),)
    else:
        pairs = zip(given, before, strict=True)  # type: ignore[arg-type]
        output.args = (tuple(kept(node, old) for node, old in pairs),)


def strides(value: Any) -> tuple[Any, ...] | None:
    """The strides that anybody can tell: those of dims that are not 1."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    dims = zip(map(_torch.expression, value.shape), value.stride(), strict=True)
    return tuple(_torch.expression(step) for size, step in dims if size != 1)


def _laid_out(gm: GraphModule, node: Node, like: Tensor) -> Node:
    """A copy of a value whose dims follow each other in memory as in `like`."""
    order = sorted(range(like.dim()), key=lambda dim: -_torch.hint(like.stride(dim)))
    back = [order.index(dim) for dim in range(like.dim())]
    steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten.permute.default, (order,), {}),
        (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
        (aten.permute.default, (back,), {}),
    ]
    for target, args, kwargs in steps if order != sorted(order) else steps[1:2]:
        with gm.graph.inserting_before(gm.graph.output_node()):
            new = gm.graph.call_function(target, (node, *args), kwargs)
        meta.inherit(new, node)
        new.meta["val"] = meta.compute(gm, new)
        node = new
    return node


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
