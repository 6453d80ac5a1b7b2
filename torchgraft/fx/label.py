"""Streams as data on nodes: `meta["stream"]` names a node's stream, `meta["after"]` holds the nodes
that it must come after. Whatever a user may write ends here, and the markers are gone:
`with graft.stream(...)`, `graph.place` and `graph.order`, `torch.ops.air.*`, and the streams and
events that torch.compile saw in model code.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torchgraft import _torch
from torchgraft.errors import BadMarker, OrderCycle
from torchgraft.fx import mark, meta
from torchgraft.plan import MAIN
from torchgraft.stream.markers import LABEL


def stream_of(node: Node) -> str:
    """The stream that a node runs on; a part of a result is where the result is."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    return str(node.meta.get("stream", MAIN))


def come_after(node: Node, firsts: Iterable[Node]) -> None:
    """Let a node wait for others, besides what it waits for already."""
    node.meta["after"] = tuple(dict.fromkeys((*node.meta.get("after", ()), *firsts)))


@dataclasses.dataclass
class Labels:
    """What reading the markers found: lines for the report, and who wrote explicit order."""

    notes: list[str] = dataclasses.field(default_factory=list)
    explicit: str = ""  # "markers" (torch.ops.air), "events" (torch's own), or neither


def label(gm: GraphModule, labels: Labels) -> None:
    """Turn every marker in the graph into data on nodes, and remove it."""
    _unwrap(gm)
    reader = _Reader(gm, labels)
    for node in list(gm.graph.nodes):
        if node.op == "call_function":
            reader.read(node)
    reader.finish()


def foretell(gm: GraphModule) -> bool:
    """Mark the nodes of Dynamo's graph with the stream of the scope that they stand in, as
    `graft.stream` does: AOTAutograd hands that on to their gradients, which no scope is around.
    Whether there are any markers of `torch.ops.air`."""
    scopes: list[str | None] = []
    found = False
    for node in gm.graph.nodes:
        name = str(node.target).removesuffix(".default")
        found = found or name.startswith("air.")
        if name == "air.scope_enter" and len(given := _given(node, "keys", "values")) == 2:
            labels = dict(zip(*given, strict=False))
            scopes.append(labels.get(LABEL, scopes[-1] if scopes else None))
        elif name == "air.scope_exit" and scopes:
            scopes.pop()
        elif scopes and scopes[-1] is not None:
            mark.mark_stream(node, MAIN if scopes[-1] == "default" else scopes[-1])
    return found


Ends = tuple[Node, ...]
"""A point that a stream has reached: the nodes on it that no later one on it has read."""


class _Reader:
    """Walks a graph once, with a stack of scopes and, for each stream, where it has got to."""

    def __init__(self, gm: GraphModule, labels: Labels) -> None:
        self.gm, self.labels = gm, labels
        self.scopes: list[tuple[Node, Mapping[str, str]]] = []
        self.ends: dict[str, dict[Node, None]] = {}
        self.gates: dict[str, Ends] = {}  # what the next nodes of a stream wait for
        self.records: dict[Node, Ends] = {}
        self.used: set[Node] = set()  # records that were waited for
        self.unmet: dict[str, str] = {}  # a wait that nothing has followed yet
        self.events: dict[Any, Ends] = {}

    def read(self, node: Node) -> None:
        reader = _READERS.get(str(node.target)) if _torch.is_op(node.target) else None
        if reader is not None:
            reader(self, node)
            return
        node.meta["stream"] = stream = self._stream(node)
        attributes = {key: value for _, scope in self.scopes for key, value in scope.items()}
        if attributes:
            node.meta["scope"] = attributes
        if stream in self.gates:
            old = node.meta.get("after")
            node.meta["after"] = self.gates[stream]
            if old:
                come_after(node, old)
            self.unmet.pop(stream, None)
        ends = self.ends.setdefault(stream, {})
        for used in node.all_input_nodes:
            ends.pop(used, None)
        ends[node] = None

    def _stream(self, node: Node) -> str:
        if (inner := self._scope()) is not None:
            return inner
        return stream_of(node) if "stream" in node.meta else mark.stream_of(node) or MAIN

    def _scope(self) -> str | None:
        for _, scope in reversed(self.scopes):
            if LABEL in scope:
                return MAIN if scope[LABEL] == "default" else scope[LABEL]
        return None

    def _reached(self, stream: str) -> Ends:
        return tuple(self.ends.get(stream, ()))

    def _hold(self, stream: str, firsts: Iterable[Node], marker: Node) -> None:
        """Let the next nodes of a stream wait."""
        if held := tuple(firsts):
            self.gates[stream] = tuple(dict.fromkeys((*self.gates.get(stream, ()), *held)))
            self.unmet[stream] = said(marker)
        else:
            self._idle(marker)

    def _idle(self, marker: Node) -> None:
        """Say that what a marker waits for has nothing to do in this graph."""
        self.labels.notes.append(
            f"{said(marker)} has nothing to wait for: inputs are there, and nothing was launched "
            f"before what was recorded"
        )

    def _drop(self, node: Node) -> None:
        self.gm.graph.erase_node(node)

    # --- torch.ops.air ---

    def scope_enter(self, node: Node) -> None:
        keys, values = _given(node, "keys", "values")
        if not isinstance(keys, (list, tuple)) or not isinstance(values, (list, tuple)):
            raise BadMarker(said(node), "its keys and values are not lists of strings")
        if len(keys) != len(values):
            raise BadMarker(
                said(node), f"{len(keys)} keys for {len(values)} values; give one value a key"
            )
        self.labels.explicit = "markers"
        if len(set(keys)) < len(keys):
            raise BadMarker(said(node), f"a key stands twice among {list(keys)}; give it one value")
        scope = {str(key): str(value) for key, value in zip(keys, values, strict=True)}
        if scope.get(LABEL) == "":
            raise BadMarker(said(node), f"{LABEL} is empty; give the stream a name")
        self.scopes.append((node, scope))

    def scope_exit(self, node: Node) -> None:
        if not self.scopes:
            raise BadMarker(
                said(node), "there is no open scope; call torch.ops.air.scope_enter before it"
            )
        enter, _ = self.scopes.pop()
        self._drop(node)
        self._drop(enter)

    def record(self, node: Node) -> None:
        self.labels.explicit = "markers"
        self.records[node] = self._reached(self._scope() or MAIN)

    def wait(self, node: Node) -> None:
        self.labels.explicit = "markers"
        [given] = _given(node, "x")
        if not isinstance(given, (list, tuple)) or not given:
            raise BadMarker(said(node), "it waits for nothing; give it records or tensors")
        firsts = [first for one in given for first in self._awaited(one)]
        self._hold(self._scope() or MAIN, firsts, node)
        self._drop(node)

    def _awaited(self, value: Any) -> Ends:
        if value in self.records:
            self.used.add(value)
            return self.records[value]
        return (value,) if isinstance(value, Node) and value.op == "call_function" else ()

    def wait_tensor(self, node: Node) -> None:
        """Whoever reads the result comes after the dependency."""
        self.labels.explicit = "markers"
        value, dependency = _given(node, "self", "dependency")
        assert isinstance(value, Node)
        readers = [user for user in node.users if user.op == "call_function"]
        firsts = self._awaited(dependency)
        if not firsts:
            self._idle(node)
        elif not readers:
            self.labels.notes.append(
                f"nobody reads what {said(node)} gives but the caller, who gets it when all is done"
            )
        node.replace_all_uses_with(value)
        self._drop(node)
        for reader in readers:
            come_after(reader, firsts)

    # --- torch.cuda.Stream and Event, as torch.compile writes them ---

    def event_record(self, node: Node) -> None:
        event, stream = node.args[:2]
        self._events()
        self.events[event] = self._reached(mark.torch_stream(stream))
        self._drop(node)

    def event_wait(self, node: Node) -> None:
        event, stream = node.args[:2]
        self._events()
        self._hold(mark.torch_stream(stream), self._event(node, event), node)
        self._drop(node)

    def stream_wait(self, node: Node) -> None:
        waiting, waited = map(mark.torch_stream, node.args[:2])
        self._events()
        self._hold(waiting, self._reached(waited), node)
        self._drop(node)

    def _events(self) -> None:
        self.labels.explicit = self.labels.explicit or "events"

    def synchronise(self, node: Node) -> None:
        """The caller's thread waits: nothing that comes later, on any stream, may start before."""
        name = str(node.target)
        if name == "streams.synchronize_event.default":
            firsts = list(self._event(node, node.args[0]))
        elif name == "streams.synchronize_stream.default":
            firsts = list(self._reached(mark.torch_stream(node.args[0])))
        else:
            firsts = [end for ends in self.ends.values() for end in ends]
        streams = {self._stream(n) for n in self.gm.graph.nodes if n > node}
        for stream in streams:
            self._hold(stream, firsts, node)
        self._drop(node)

    def lifetime(self, node: Node) -> None:
        """`Tensor.record_stream`: when memory is free again is the plan's own business."""
        value = node.args[0]
        if isinstance(value, Node):
            node.replace_all_uses_with(value)
        self._drop(node)

    def _event(self, node: Node, event: Any) -> Ends:
        if event not in self.events:
            raise BadMarker(
                said(node),
                "it waits for an event that this graph does not record; record it in the same "
                "graph, or wait for it outside of the compiled program",
            )
        return self.events[event]

    def finish(self) -> None:
        if self.scopes:
            raise BadMarker(
                said(self.scopes[-1][0]),
                "the scope is never closed; call torch.ops.air.scope_exit (a graph break inside a "
                "scope splits the pair, too)",
            )
        for record in self.records:
            if record not in self.used:
                self.labels.notes.append(f"{said(record)} is never waited for")
            if not record.users:  # one that the program gives back is an empty tensor
                self._drop(record)
        self.labels.notes += [
            f"nothing follows {marker} on stream {stream!r}; the end of the program waits for "
            f"every stream anyway"
            for stream, marker in self.unmet.items()
        ]


_READERS: dict[str, Callable[[_Reader, Node], None]] = {
    "air.scope_enter.default": _Reader.scope_enter,
    "air.scope_exit.default": _Reader.scope_exit,
    "air.record.default": _Reader.record,
    "air.wait.default": _Reader.wait,
    "air.wait_tensor.default": _Reader.wait_tensor,
    "streams.record_event.default": _Reader.event_record,
    "streams.wait_event.default": _Reader.event_wait,
    "streams.wait_stream.default": _Reader.stream_wait,
    "streams.fork.default": lambda reader, node: reader._drop(node),
    "streams.join.default": lambda reader, node: reader._drop(node),
    "streams.synchronize_event.default": _Reader.synchronise,
    "streams.synchronize_stream.default": _Reader.synchronise,
    "streams.synchronize_device.default": _Reader.synchronise,
    "streams.record_stream.default": _Reader.lifetime,
    "streams.sync_dealloc.default": _Reader.lifetime,
}


def has_markers(graph: Graph) -> bool:
    """Whether there is anything for `label` to read in a graph that was labelled before."""
    return any(
        (_torch.is_op(node.target) and str(node.target) in _READERS)
        or _torch.is_control_deps(node.target)
        for node in graph.nodes
    )


def _given(node: Node, *names: str) -> tuple[Any, ...]:
    """What a marker was given for its first parameters, by position or by name."""
    if missing := [n for i, n in enumerate(names) if i >= len(node.args) and n not in node.kwargs]:
        raise BadMarker(said(node), f"it is given no {missing[0]!r}")
    return tuple(
        node.args[i] if i < len(node.args) else node.kwargs[name] for i, name in enumerate(names)
    )


def _unwrap(gm: GraphModule) -> None:
    """Undo how AOTAutograd ties events to data: `control_deps(deps, graph of the call, *values)`,
    whose result is the call's and the values again."""
    for node in list(gm.graph.nodes):
        if not _torch.is_control_deps(node.target):
            continue
        held = meta.attribute(gm, str(node.args[1].target))
        [call] = [n for n in held.graph.nodes if n.op == "call_function"]
        if str(call.target) not in _READERS:
            continue
        given = held.graph.find_nodes(op="placeholder")
        values = dict(zip(given, node.args[2:], strict=True))
        with gm.graph.inserting_before(node):
            plain = gm.graph.call_function(
                call.target, torch.fx.node.map_arg(call.args, values.__getitem__)
            )
        plain.meta = dict(node.meta)
        for part in list(node.users):
            if part.target is operator.getitem and part.args[1]:
                part.replace_all_uses_with(node.args[1 + part.args[1]])
                gm.graph.erase_node(part)
        node.replace_all_uses_with(plain)
        gm.graph.erase_node(node)


def said(node: Node) -> str:
    """A node as a reader finds it: its call and its line."""
    line = meta.source_line(node)
    return f"{node.name} ({node.target})" + (f" at {line}" if line else "")


# --- Keeping it true while passes change the graph ---


def settle(gm: GraphModule, replaced: Mapping[Node, str], old: Collection[Node]) -> None:
    """After a pass: what it made (what is not in `old`) takes the place of what it replaced, and
    order names nodes that are there."""
    alive = {node.name: node for node in gm.graph.nodes}
    for was, name in replaced.items():
        now = alive.get(name)
        if now is not None and now not in old and now.op == "call_function":
            meta.inherit(now, was)
    for node in gm.graph.nodes:
        if "after" in node.meta:
            found = [_alive(n, alive, replaced) for n in node.meta["after"]]
            node.meta["after"] = tuple({n: None for n in found if n is not None and n is not node})


def rebind(graph: Graph) -> None:
    """Let order in a copied graph name the copies."""
    by_name = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        if "after" in node.meta:
            found = [by_name.get(n.name) for n in node.meta["after"]]
            node.meta["after"] = tuple(n for n in found if n is not None)


def _alive(node: Node, alive: Mapping[str, Node], replaced: Mapping[Node, str]) -> Node | None:
    while alive.get(node.name) is not node:
        after = alive.get(replaced.get(node, ""))
        if after is None or after is node:
            return None
        node = after
    return node if node.op == "call_function" else None


def sort(gm: GraphModule) -> None:
    """Put every node behind what it must come after; `OrderCycle` where that is impossible.

    Nodes keep their places as far as they can.
    """
    nodes = list(gm.graph.nodes)
    if _in_order(nodes):
        return
    before: dict[Node, set[Node]] = {}
    for node in nodes:
        before[node] = set(node.all_input_nodes)
        before[node].update(node.meta.get("after", ()))
    users: dict[Node, list[Node]] = {}
    for node, firsts in before.items():
        for first in firsts:
            users.setdefault(first, []).append(node)
    rank = {node: i for i, node in enumerate(nodes)}
    ready = [rank[node] for node in nodes if not before[node]]
    result: list[Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        result.append(node)
        for user in users.get(node, ()):
            before[user].discard(node)
            if not before[user]:
                heapq.heappush(ready, rank[user])
    if len(result) < len(nodes):
        raise OrderCycle([said(n) for n in _cycle({n: b for n, b in before.items() if b})])
    for one, two in itertools.pairwise(result):
        one.append(two)


def _in_order(nodes: list[Node]) -> bool:
    seen: set[Node] = set()
    for node in nodes:
        if not seen.issuperset((*node.all_input_nodes, *node.meta.get("after", ()))):
            return False
        seen.add(node)
    return True


def _cycle(before: Mapping[Node, set[Node]]) -> list[Node]:
    """One cycle among nodes that all wait for another of them."""
    node, path = next(iter(before)), list[Node]()
    while node not in path:
        path.append(node)
        node = next(n for n in before[node] if n in before)
    return path[path.index(node) :][::-1]
