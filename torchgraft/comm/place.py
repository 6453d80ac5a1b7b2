"""Where collectives of a graph run: a stream for each group, started early, waited for late."""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

from torchgraft.comm.bucket import bucket
from torchgraft.comm.group import name_of
from torchgraft.comm.ops import collectives, is_collective, is_wait
from torchgraft.fx import label
from torchgraft.plan import MAIN

NEVER = 1 << 30
"""No collective needs a value."""


def place(gm: GraphModule, small: int) -> list[str]:
    """Name the groups, merge what is small, put each group's collectives on a stream of its own, in
    their order, and note on every node which collectives it lies between; lines for the report.
    A no-op without collectives."""
    if not any(collectives(gm.graph.nodes)):
        return []
    _drop_waits(gm)
    for node in collectives(gm.graph.nodes):
        node.args = (*node.args[:-1], name_of(node.args[-1]))
    notes = bucket(gm, small)
    last: dict[str, Node] = {}
    for node in collectives(gm.graph.nodes):
        group = str(node.args[-1])
        if label.stream_of(node) == MAIN:
            node.meta["stream"] = f"comm:{group}"
        if group in last:
            label.come_after(node, [last[group]])
        last[group] = node
    _between(gm)
    return notes


def _drop_waits(gm: GraphModule) -> None:
    """A collective's launch waits itself, on its own stream; readers wait for that stream."""
    for node in list(gm.graph.nodes):
        if not is_wait(node):
            continue
        source = node.args[0]
        assert isinstance(source, Node)
        made = source.args[0] if source.target is operator.getitem else source
        if isinstance(made, Node) and is_collective(made):
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)


def _between(gm: GraphModule) -> None:
    """Note on each node the first collective that needs it and the last one that it needs, by
    number: nodes that differ are not compiled together, so that none waits for the other's."""
    number = {node: i for i, node in enumerate(collectives(gm.graph.nodes))}
    needs: dict[Node, int] = {}
    for node in gm.graph.nodes:
        before = [needs[used] for used in node.all_input_nodes]
        needs[node] = number.get(node, max(before, default=-1))
    for node in reversed(gm.graph.nodes):
        wanted = [number.get(user, user.meta.get("between", (NEVER,))[0]) for user in node.users]
        node.meta["between"] = (min(wanted, default=NEVER), needs[node])
