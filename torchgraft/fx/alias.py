"""Whose memory a call touches: what it writes, and what its result may be a view of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from torch.fx import Node
from torch.fx.node import map_arg

from torchgraft.fx.dialect import is_view


def written(nodes: Iterable[Node]) -> list[Node]:
    """The values that calls write in place, each once."""
    found: dict[Node, None] = {}
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        for number, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = node.kwargs.get(argument.name)
                given = node.args[number] if number < len(node.args) else given
                map_arg(given, lambda n: found.setdefault(n))
    return list(found)


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
