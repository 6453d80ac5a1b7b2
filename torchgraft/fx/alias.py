"""Whose memory a call touches: what it writes, and what its result may be a view of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchgraft.errors import BrokenGraph
from torchgraft.fx.dialect import is_view
from torchgraft.fx.meta import Snapshot


def written(nodes: Iterable[Node]) -> list[Node]:
    """The values that calls write in place, each once."""
    calls = ((node.target, node.args, node.kwargs) for node in nodes)
    return list(dict.fromkeys(one for call in calls for one in writes(*call)))


def writes(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Node]:
    """The values that one call writes in place."""
    found: list[Node] = []
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return found
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name)
            map_arg(args[number] if number < len(args) else given, found.append)
    return found


def check_inputs(gm: GraphModule, name: str, before: Snapshot) -> None:
    """Raise `BrokenGraph` where a pass (its `name`) made the graph write an input that it only read
    `before`: the caller does not expect it."""
    known = {one for call in before.values() for one in writes(*call)}
    for node in gm.graph.nodes:
        for one in writes(node.target, node.args, node.kwargs):
            if one.op == "placeholder" and one not in known:
                raise BrokenGraph(
                    name,
                    node.name,
                    f"{node.target} writes input {one.name!r}, which the program only reads",
                )


def viewed(node: Node) -> Iterator[Node]:
    """The inputs whose memory a call's result may share."""
    if not is_view(node):
        return
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(a.alias_info for a in schema.arguments):
        yield from node.all_input_nodes[: None if schema is None else 1]
        return
    found: list[Node] = []
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None:
            given = node.kwargs.get(argument.name)
            map_arg(node.args[number] if number < len(node.args) else given, found.append)
    yield from found


def roots(node: Node, inside: Collection[Node]) -> set[Node]:
    """Where the memory of a value may come from: nodes in `inside` that made it, and the values
    outside that it may be a view of."""
    found: set[Node] = set()
    todo = [node]
    while todo:
        one = todo.pop()
        bases = list(viewed(one)) if one in inside else []
        todo += bases
        if not bases:
            found.add(one)
    return found
