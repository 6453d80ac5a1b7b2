"""Putting a replacement in the place of a match."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchgraft import _torch
from torchgraft.config import Config
from torchgraft.convert.net import Net, Value
from torchgraft.errors import BadReplacement, NoMatch, UnknownName
from torchgraft.fx import dialect, meta
from torchgraft.fx.edit import Graph
from torchgraft.passes.pattern import match as matching
from torchgraft.passes.pattern.match import Finder, Found
from torchgraft.passes.pattern.search import Index, Miss, said
from torchgraft.passes.pattern.trace import label
from torchgraft.passes.precision import uncast


class Match:
    """What a replacement holds: the pattern's arguments by name, and the nodes that matched.

    `m.x` is a tensor to compute with, a number, a list of them or None; `m["0"]` is the same for
    names that are not Python's. Shapes, dtypes and devices are those of the graph. Inside
    `.replace(nodes=True)` tensors are the graph's nodes; `m.graph` and `m.net`, a `graft.Net`, make
    new ones.
    """

    def __init__(self, found: Found, values: Mapping[str, Any], graph: Graph) -> None:
        self._found, self._values, self.graph = found, values, graph
        self.net = Net(graph.gm, found.place)

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise UnknownName("argument", name, self._values, where="Match")
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    @property
    def nodes(self) -> list[Node]:
        """The nodes that matched, in the pattern's order."""
        return self._found.nodes

    @property
    def outputs(self) -> list[Any]:
        """What the pattern returns, as nodes of the graph."""
        return self._found.outputs

    def node(self, name: str, number: int = 0) -> Node:
        """The node of an argument (`m.node("x")`) or of an operator: `m.node("mul", 1)` is the
        second `mul` of the pattern."""
        bound = self._found.slots.get(name)
        if isinstance(bound, Node):
            return bound
        named = [
            node
            for part, node in sorted(self._found.parts.items(), key=lambda pair: pair[0].index)
            if str(part) == name.lstrip("_")
        ]
        if number >= len(named):
            known = {str(part) for part in self._found.parts}
            known |= {k for k, v in self._found.slots.items() if isinstance(v, Node)}
            raise UnknownName("node", name, known, where="Match.node")
        return named[number]

    def is_constant(self, name: str) -> bool:
        """Whether an argument is known at compile time: a number, a frozen weight, or computed
        from such alone."""
        return all(map(_constant, matching.nodes_in(self._found.slots[name])))


def _constant(node: Node) -> bool:
    if node.op == "get_attr":
        return True
    return dialect.is_pure(node) and all(map(_constant, node.all_input_nodes))


class _Graph(Graph):
    """A graph that remembers the calls made in it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.made: list[Node] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        self.made.append(super().call(target, *args, **kwargs))
        return self.made[-1]


@dataclasses.dataclass
class Outcome:
    """What a pattern did to a graph."""

    hits: list[str]  # where: the source lines (or names) of the nodes replaced
    miss: Miss | None


def apply(
    pattern: Any, index: Index, config: Config, first: Callable[[], object] = lambda: None
) -> Outcome:
    """Replace every match of a pattern, in graph order; `first` is called before the first one.

    What a replacement made is not matched again by the same pattern.
    """
    finder = Finder(pattern, index)
    hits: list[str] = []
    gone: set[Node] = set()
    for search, part, nodes in finder.candidates():
        for node in nodes:
            if node in gone:
                continue
            for found in finder.at(search, part, node):
                try:
                    where = found.line
                    if not hits:
                        first()
                    if pattern.replacement is not None:
                        _replace(pattern, found, _Graph(index.gm, (), config))
                except NoMatch as refusal:
                    finder.note(_refused(refusal, found))
                    continue
                hits.append(where)
                gone.update(found.nodes)
                break
    return Outcome(hits, finder.nearest())


def _refused(refusal: NoMatch, found: Found) -> Miss:
    total = len(found.template.parts)
    node = refusal.node if isinstance(refusal.node, Node) else found.last
    return Miss(total, total, f"{refusal.reason} ({said(node)})", node)


def trial(pattern: Any, found: Found, graph: Graph) -> Miss | None:
    """Why the replacement refuses a match; None when it does not. The match stays."""
    try:
        if pattern.replacement is not None:
            _make(pattern, found, graph)
    except NoMatch as refusal:
        return _refused(refusal, found)
    return None


def _make(pattern: Any, found: Found, graph: Graph) -> tuple[GraphModule | None, list[Any]]:
    """What the replacement gives, checked: a graph and its outputs, or nodes that it built."""
    made: GraphModule | None = None
    if pattern.builds_nodes:
        match = Match(found, found.slots, graph)
        result = pattern.replacement(match)
        given = list(result) if isinstance(result, (tuple, list)) else [result]
        new = [one.node if isinstance(one, Value) else one for one in given]
        for node in (*match.net.made, *getattr(graph, "made", ())):
            node.meta |= {k: v for k, v in _marks(found.place).items() if k not in node.meta}
    else:
        made, new = _trace(pattern, found, graph)
    _check(pattern, found.outputs, new, found.line)
    return made, new


def _replace(pattern: Any, found: Found, graph: Graph) -> None:
    gm, old, place = graph.gm, found.outputs, found.place
    made, new = _make(pattern, found, graph)
    if made is not None:
        new = _inline(gm, made, new, place, [found.slots[slot.name] for slot in pattern.slots])
    for was, now in zip(old, new, strict=True):
        was.replace_all_uses_with(now, delete_user_cb=lambda user, now=now: user is not now)
    late = any(place < node for node in matching.nodes_in(list(found.slots.values())))
    for node in sorted(set(found.nodes), reverse=True):
        if not node.users:
            gm.graph.erase_node(node)
    if late:
        _in_order(gm)
    if pattern.changes_type:
        for node in matching.nodes_in(new):
            uncast(node)
        meta.refresh(gm, _stale(gm, new), pattern.name)


def _stale(gm: GraphModule, new: Sequence[Any]) -> meta.Snapshot:
    """A snapshot in which only the readers of new values look changed."""
    readers = {user for node in new if isinstance(node, Node) for user in node.users}
    return {n: v for n, v in meta.snapshot(gm.graph).items() if n not in readers}


def _trace(pattern: Any, found: Found, graph: Graph) -> tuple[GraphModule, list[Any]]:
    """The replacement as a graph of its own, and its outputs: nodes of it, or numbers."""
    gm = graph.gm
    values = matching.bound_values(pattern.slots, found.slots)
    inputs = list(_leaves(values))

    def call(*given: Any) -> Any:
        left = iter(given)
        filled = _torch.map_leaves(
            lambda v: next(left) if isinstance(v, (Tensor, *_torch.SYMBOLIC)) else v, values
        )
        result = pattern.replacement(Match(found, filled, graph))
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    mode = gm.meta["fake_mode"]
    made = _torch.trace(call, inputs, mode, dialect.decompositions())
    made.meta["fake_mode"] = mode
    for node in made.graph.find_nodes(op="get_attr"):
        node.meta["val"] = meta.compute(made, node)
    dialect.canonicalise(made)
    return made, meta.outputs_of(made)


def _leaves(values: Mapping[str, Any]) -> Iterator[Any]:
    for leaf in _torch.flatten(dict(values))[0]:
        if isinstance(leaf, (Tensor, *_torch.SYMBOLIC)):
            yield leaf


def _check(pattern: Any, old: Sequence[Any], new: Sequence[Any], where: str) -> None:
    if len(old) != len(new):
        raise BadReplacement(
            pattern.name,
            "the replacement",
            f"{len(old)} value{'s' * (len(old) != 1)}",
            str(len(new)),
            where,
            "It must return what the pattern returns, in the same order.",
        )
    for i, (was, now) in enumerate(zip(old, new, strict=True)):
        which = "the result" if len(old) == 1 else f"result {i}"
        got = now.meta.get("val") if isinstance(now, Node) else now
        want = was.meta.get("val") if isinstance(was, Node) else was
        if not isinstance(got, Tensor):
            raise BadReplacement(
                pattern.name, which, "a tensor", repr(got), where, "Return tensors."
            )
        if not pattern.changes_type and not _alike(want, got):
            raise BadReplacement(
                pattern.name,
                which,
                _typed(want),
                _typed(got),
                where,
                "Convert it, or state @pattern.replace(changes_type=True) if that is on purpose.",
            )


def _typed(value: Any) -> str:
    at = f" on {value.device}" if isinstance(value, Tensor) and value.device.type != "cpu" else ""
    return meta.describe(value) + at


def _alike(one: Any, two: Tensor) -> bool:
    return (
        isinstance(one, Tensor)
        and (one.dtype, one.device, one.ndim) == (two.dtype, two.device, two.ndim)
        and [_torch.expression(s) for s in one.shape] == [_torch.expression(s) for s in two.shape]
    )


def _inline(
    gm: GraphModule, made: GraphModule, new: Sequence[Any], place: Node, bound: Sequence[Any]
) -> list[Any]:
    """Copy the replacement's nodes into the graph, before `place`."""
    env: dict[Node, Any] = {}
    sources = matching.nodes_in(bound)
    marks = _marks(place)
    with gm.graph.inserting_before(place):
        for node in made.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(sources)
            elif node.op == "get_attr":
                name = _free(gm, f"_{label(node.target).replace('.', '_')}")
                gm.register_buffer(name, meta.attribute(made, str(node.target)), persistent=False)
                env[node] = gm.graph.create_node("get_attr", name)
                env[node].meta = {"val": node.meta["val"]}
            elif node.op == "call_function":
                env[node] = gm.graph.node_copy(node, env.__getitem__)
                env[node].meta = {"val": node.meta["val"], **marks}
    return [map_arg(value, env.__getitem__) for value in new]


def _marks(place: Node) -> dict[str, Any]:
    """What a replacement takes over from a match: its line, modules, block and stream."""
    keys = ("stack_trace", "nn_module_stack", "custom", "stream", "after", "scope")
    return {key: place.meta[key] for key in keys if key in place.meta}


def _free(gm: GraphModule, stem: str) -> str:
    name, number = stem, 0
    while hasattr(gm, name):
        number += 1
        name = f"{stem}_{number}"
    return name


def _in_order(gm: GraphModule) -> None:
    """Move nodes behind what they read, where a replacement came late."""
    seen: set[Node] = set()
    waiting: list[Node] = []
    for node in list(gm.graph.nodes):
        if all(used in seen for used in node.all_input_nodes):
            seen.add(node)
            cursor = node
            for late in list(waiting):
                if all(used in seen for used in late.all_input_nodes):
                    cursor.append(late)
                    cursor = late
                    seen.add(late)
                    waiting.remove(late)
        else:
            waiting.append(node)
