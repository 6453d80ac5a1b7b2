"""Races in order that a user wrote: events and markers that leave two nodes unordered."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from torchgraft.fx import alias, label
from torchgraft.plan import Buffer, Launch
from torchgraft.stream.order import schedule
from torchgraft.stream.prove import hazards


def races(gm: GraphModule) -> Iterator[tuple[Node, str, Node, Node]]:
    """Each pair of calls that touch one value on different streams, with nothing but data between
    them: the value, the kind, and the two. The graph counts as it is, node by node."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    if len({label.stream_of(node) for node in calls}) < 2:
        return
    numbers = {node: Buffer(i) for i, node in enumerate(gm.graph.nodes)}
    at = {node: i for i, node in enumerate(calls)}
    launches = [
        Launch(
            node.name,
            tuple(numbers[used] for used in node.all_input_nodes),
            (),
            (numbers[node],),
            stream=label.stream_of(node),
            writes=tuple(numbers[written] for written in alias.written([node])),
        )
        for node in calls
    ]
    shared = [(numbers[node], numbers[base]) for node in calls for base in alias.viewed(node)]
    given = [n for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")]
    after = [(at[f], at[n]) for n in calls for f in n.meta.get("after", ()) if f in at]
    plan = schedule(
        [numbers[n] for n in given], (), launches, (), shared=shared, after=after, data=False
    )
    nodes = {step.kernel: node for step, node in zip(launches, calls, strict=True)}
    values = {buffer: node for node, buffer in numbers.items()}
    for found in hazards(plan):
        if found.first >= 0 and found.second < len(plan.steps):
            one, two = plan.steps[found.first], plan.steps[found.second]
            assert isinstance(one, Launch)
            assert isinstance(two, Launch)
            yield values[found.buffer], found.kind, nodes[one.kernel], nodes[two.kernel]


def said(node: Node) -> str:
    """A call with its line and its stream."""
    return f"{label.said(node)} on stream {label.stream_of(node)!r}"
