"""Whole matches: confirmed on the types they bound, and safe to replace."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from torchgraft.errors import first_line
from torchgraft.fx import dialect, meta
from torchgraft.passes.pattern import trace
from torchgraft.passes.pattern.search import Index, Miss, Search, readers, said
from torchgraft.passes.pattern.slots import Slot
from torchgraft.passes.pattern.trace import Part, Template
from torchgraft.plan import MAIN

_CAST = torch.ops.aten._to_copy.default


@dataclasses.dataclass(frozen=True)
class Found:
    """A match: the node of each part, and what each argument bound (nodes and numbers)."""

    template: Template
    parts: Mapping[Part, Node]
    slots: Mapping[str, Any]

    @property
    def nodes(self) -> list[Node]:
        return list(dict.fromkeys(self.parts.values()))

    @property
    def last(self) -> Node:
        """The node that comes last in the graph."""
        return max(self.parts.values())

    @property
    def line(self) -> str:
        """Where the match is: a source line, or the last node's name."""
        return meta.source_line(self.last) or self.last.name

    @property
    def outputs(self) -> list[Any]:
        """The nodes whose values the pattern gives."""
        return [
            self.parts[o] if isinstance(o, Part) else self.slots[o.name]
            for o in self.template.outputs
        ]

    @property
    def place(self) -> Node:
        """Where a replacement goes: the first node whose value the pattern gives."""
        return min(node for node in self.outputs if isinstance(node, Node))


class Finder:
    """A pattern on a graph: `find` gives matches that are safe to replace."""

    def __init__(self, pattern: Any, index: Index) -> None:
        self.pattern, self.index, self.gm = pattern, index, index.gm
        self.searches = [Search(template, index.gm) for template in pattern.templates]
        self.miss: Miss | None = None
        self._exact: dict[str, Template | str] = {}

    def candidates(self) -> Iterator[tuple[Search, Part, list[Node]]]:
        for search in self.searches:
            anchor = search.anchor(self.index)
            if anchor is not None:
                yield search, anchor, self.index.of(anchor)

    def at(self, search: Search, part: Part, node: Node) -> Iterator[Found]:
        """Matches with `part` at `node`."""
        for state in search.at(part, node):
            slots = {**search.template.fixed, **_gathered(state.slots)}
            found = Found(search.template, state.parts, slots)
            refused = _outside(found) or self._confirm(found)
            if refused is None:
                yield found
            else:
                self.note(refused)

    def note(self, miss: Miss | None) -> None:
        """Keep the miss that got furthest."""
        if miss is not None and (self.miss is None or miss.matched > self.miss.matched):
            self.miss = miss

    def nearest(self) -> Miss | None:
        for search in sorted(self.searches, key=lambda s: len(s.template.parts)):
            self.note(search.best)
        return self.miss

    def forget(self) -> Miss | None:
        """The nearest miss, which is not kept."""
        nearest, self.miss = self.nearest(), None
        for search in self.searches:
            search.best = None
        return nearest

    def _confirm(self, found: Found) -> Miss | None:
        """Trace the pattern on what was bound: now sizes, numbers and types must agree, too."""
        total = len(found.template.parts)
        values = bound_values(self.pattern.slots, found.slots)
        exact = self._traced(values)
        root = found.outputs[0]
        if isinstance(exact, str):
            return Miss(total, total, f"the pattern does not run on these types: {exact}", root)
        last = exact.outputs[0]
        search = Search(exact, self.gm)
        wanted = set(found.parts.values())
        if isinstance(last, Part):
            for state in search.at(last, root, found.slots):
                if set(state.parts.values()) == wanted:
                    return None
        best = search.best
        reason = f"on these types, {best.reason}" if best else "on these types it is other calls"
        return Miss(total, total, reason, best.node if best else root)

    def _traced(self, values: Mapping[str, Any]) -> Template | str:
        key = repr({name: _key(value) for name, value in values.items()})
        if key not in self._exact:
            try:
                self._exact[key] = trace.exact(
                    self.pattern.fn, self.pattern.slots, values, self.gm.meta["fake_mode"]
                )
            except Exception as error:  # whatever the body raises on these types
                self._exact[key] = first_line(error)
        return self._exact[key]


def _gathered(slots: Mapping[Any, Any]) -> dict[str, Any]:
    """Lists that were bound item by item, as lists."""
    result: dict[str, Any] = {}
    for key in sorted(slots, key=lambda k: k[1] if isinstance(k, tuple) else -1):
        if isinstance(key, tuple):
            result.setdefault(key[0].name, []).append(slots[key])
        else:
            result[key] = slots[key]
    return result


def bound_values(slots: Sequence[Slot], bound: Mapping[str, Any]) -> dict[str, Any]:
    """What was bound, with each node as its fake value."""
    return {slot.name: meta.value(bound[slot.name]) for slot in slots}


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        kind = (value.dtype, value.device, tuple(value.shape), value.stride())
        return tuple(map(str, kind))
    return [_key(v) for v in value] if isinstance(value, (list, tuple)) else value


def _outside(found: Found) -> Miss | None:
    """Why a match may not be replaced: somebody else reads its values, or stands between."""
    inside = set(found.parts.values())
    total = len(found.template.parts)
    free = {node for node in found.outputs if isinstance(node, Node)}
    for node in sorted(inside - free):
        if _is_free(node, inside):
            continue
        for user in readers(node):
            if user not in inside:
                who = "the program returns it" if user.op == "output" else f"{said(user)} uses it"
                return Miss(total, total, f"{said(node)} has another user: {who}", node)
    streams = {node.meta.get("stream") or MAIN for node in inside}
    if len(streams) > 1:
        names = ", ".join(sorted(map(repr, streams)))
        return Miss(total, total, f"its nodes are on different streams: {names}", min(inside))
    first = min(inside)
    for node in nodes_in(list(found.slots.values())):
        if _depends(node, inside, first):
            return Miss(total, total, f"its input {said(node)} needs its own result", node)
    return None


def _is_free(node: Node, inside: set[Node]) -> bool:
    """Whether a node costs nothing to keep for others: a view or a cast of the match's inputs."""
    cheap = dialect.is_view(node) or node.target is _CAST
    return cheap and all(_is_free(n, inside) for n in node.all_input_nodes if n in inside)


def nodes_in(arg: Any) -> Iterator[Node]:
    if isinstance(arg, Node):
        yield arg
    elif isinstance(arg, (list, tuple)):
        for one in arg:
            yield from nodes_in(one)


def _depends(node: Node, on: set[Node], first: Node) -> bool:
    """Whether a node is computed from one of these, the first of which is `first`."""
    seen: set[Node] = set()
    stack = [node]
    while stack:
        one = stack.pop()
        if one in on:
            return True
        if one not in seen and first < one:
            seen.add(one)
            stack += one.all_input_nodes
    return False
