"""Finding a template in a graph, by structure alone. A miss is a value: how far it got, and why."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft import _torch
from torchgraft.fx import meta
from torchgraft.passes.pattern import trace
from torchgraft.passes.pattern.slots import Slot
from torchgraft.passes.pattern.trace import COPY, DERIVED, Held, Part, Template, label


@dataclasses.dataclass(frozen=True)
class Miss:
    """Where a pattern got to: `matched` of `total` calls, the reason, the node to blame."""

    matched: int
    total: int
    reason: str
    node: Node | None = None

    @property
    def line(self) -> str | None:
        """`file:line` of the node to blame."""
        return meta.source_line(self.node) if self.node is not None else None

    def __str__(self) -> str:
        return f"{self.matched} of {self.total} ops; {self.reason}"


class Index:
    """The calls of a graph by operator. Made once for all patterns, until one of them rewrites."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.by_target: dict[Any, list[Node]] = collections.defaultdict(list)
        for node in gm.graph.nodes:
            if node.op == "call_function":
                self.by_target[trace.called(node.target)].append(node)

    def of(self, part: Part) -> list[Node]:
        return self.by_target.get(part.target, [])


@dataclasses.dataclass(frozen=True)
class _State:
    parts: dict[Part, Node]
    slots: dict[Any, Any]

    def with_part(self, part: Part, node: Node) -> _State:
        return _State({**self.parts, part: node}, self.slots)

    def with_slot(self, key: Any, value: Any) -> _State:
        return _State(self.parts, {**self.slots, key: value})


def said(node: Node) -> str:
    """A node as a reader knows it: its operator and its source line."""
    line = meta.source_line(node)
    name = label(node.target) if node.op == "call_function" else node.name
    other = "" if node.name == name else f" ({node.name})"
    return f"`{name}`" + (f" at {line}" if line else other)


class Search:
    """One template on one graph. `best` is the miss that got furthest."""

    def __init__(self, template: Template, gm: GraphModule) -> None:
        self.template, self.gm = template, gm
        self.best: Miss | None = None

    def anchor(self, index: Index) -> Part | None:
        """The part to start from: the rarest in the graph; None when one does not occur."""
        rarest = min(reversed(self.template.parts), key=lambda part: len(index.of(part)))
        if index.of(rarest):
            return rarest
        self._miss(0, None, lambda: f"the graph has no `{rarest}` ({rarest.target})")
        return None

    def at(
        self, part: Part, node: Node, slots: Mapping[str, Any] | None = None
    ) -> Iterator[_State]:
        """Every way to match with `part` at `node`, structure only."""
        for state in self._part(part, node, _State({}, dict(slots or {}))):
            yield from self._rest(state)

    def _miss(self, matched: int, node: Node | None, why: Callable[[], str]) -> None:
        if self.best is None or matched > self.best.matched:
            self.best = Miss(matched, len(self.template.parts), why(), node)

    def _rest(self, state: _State) -> Iterator[_State]:
        """Match the parts that the ones so far do not lead to: other outputs."""
        for part in self.template.parts:
            source = None if part in state.parts else self._operand(part, state)
            if source is None:
                continue
            taken = set(state.parts.values())
            candidates = [
                user
                for user in readers(source)
                if trace.called(user.target) is part.target and user not in taken
            ]
            if not candidates:
                self._miss(len(state.parts), source, partial(_unused, part, source))
            for candidate in candidates:
                for found in self._part(part, candidate, state):
                    yield from self._rest(found)
            return
        if len(state.parts) == len(self.template.parts):
            yield state

    def _operand(self, part: Part, state: _State) -> Node | None:
        bound = [state.parts.get(a) for a in part.args.values() if isinstance(a, Part)]
        bound += [state.slots.get(a.name) for a in part.args.values() if isinstance(a, Slot)]
        return next((n for n in bound if isinstance(n, Node)), None)

    def _part(self, part: Part, node: Any, state: _State) -> Iterator[_State]:
        while isinstance(node, Node) and node.target is COPY:
            node = node.args[0]
        if part in state.parts:
            if state.parts[part] is node:
                yield state
            else:
                self._not(part, node, state)
            return
        if (
            not isinstance(node, Node)
            or node.op != "call_function"
            or trace.called(node.target) is not part.target
        ):
            self._not(part, node, state)
            return
        if not self._typed(part, node):
            value = meta.describe(node.meta.get("val"))
            self._miss(
                len(state.parts),
                node,
                lambda: f"{said(node)} is {value}, here it would be {meta.describe(part.value)}",
            )
            return
        given = trace.arguments(node)
        begun = state.with_part(part, node)
        yield from self._pairs(part, node, list(part.args), given, begun)
        if part.commutes:
            one, two, *_ = given
            swapped = {**given, one: given[two], two: given[one]}
            yield from self._pairs(part, node, list(part.args), swapped, begun)

    def _typed(self, part: Part, node: Node) -> bool:
        one, two = part.value, node.meta.get("val")
        if not isinstance(one, Tensor) or not isinstance(two, Tensor):
            return True
        if self.template.exact:
            sizes = zip(one.shape, two.shape, strict=False)
            return (
                one.dtype == two.dtype
                and one.ndim == two.ndim
                and all(_same(a, b) for a, b in sizes)
            )
        return not part.sized or one.ndim == two.ndim

    def _not(self, part: Part, node: Any, state: _State) -> None:
        self._miss(
            len(state.parts),
            node if isinstance(node, Node) else None,
            lambda: f"{_show(node)} stands where the pattern has `{part}` ({part.target})",
        )

    def _pairs(
        self, part: Part, node: Node, names: list[str], given: dict[str, Any], state: _State
    ) -> Iterator[_State]:
        if not names:
            yield state
            return
        name, *rest = names
        for found in self._value(part, node, name, part.args[name], given.get(name), state):
            yield from self._pairs(part, node, rest, given, found)

    def _value(
        self, part: Part, node: Node, name: str, want: Any, got: Any, state: _State
    ) -> Iterator[_State]:
        if isinstance(want, Part):
            yield from self._part(want, got, state)
        elif isinstance(want, Slot):
            yield from self._bind(want, want.name, got, state, node)
        elif isinstance(want, tuple) and want and isinstance(want[0], Slot):
            yield from self._bind(want[0], want, got, state, node)
        elif isinstance(want, list) and isinstance(got, (list, tuple)) and len(want) == len(got):
            yield from self._items(part, node, name, list(zip(want, got, strict=True)), state)
        elif self._equal(want, got, name, part, node):
            yield state
        else:
            self._miss(
                len(state.parts),
                node,
                lambda: f"{said(node)} has {name}={_show(got)}, the pattern {_show(want)}",
            )

    def _items(
        self, part: Part, node: Node, name: str, pairs: list[tuple[Any, Any]], state: _State
    ) -> Iterator[_State]:
        if not pairs:
            yield state
            return
        (want, got), *rest = pairs
        for found in self._value(part, node, name, want, got, state):
            yield from self._items(part, node, name, rest, found)

    def _bind(self, slot: Slot, key: Any, got: Any, state: _State, node: Node) -> Iterator[_State]:
        got = _plain(got)
        if key in state.slots:
            if _same(state.slots[key], got):
                yield state
            else:
                self._miss(
                    len(state.parts),
                    node,
                    lambda: f"{said(node)}: {slot.name!r} is {_show(state.slots[key])} elsewhere",
                )
        elif _fits(slot, got, whole=key == slot.name):
            yield state.with_slot(key, got)
        else:
            kind = "tensor" if slot.kind is Tensor else slot.kind.__name__
            self._miss(
                len(state.parts),
                node,
                lambda: f"{said(node)}: {slot.name!r} is a {kind}, the graph has {_show(got)}",
            )

    def _equal(self, want: Any, got: Any, name: str, part: Part, node: Node) -> bool:
        if want is DERIVED:
            return not (isinstance(got, Node) and isinstance(got.meta.get("val"), Tensor))
        if isinstance(want, Held):
            return _holds(self.gm, got, want.value)
        if name.startswith("dim") and isinstance(want, int) and isinstance(got, int):
            ranks = part.rank, _rank(_first(node))
            return want == got or _back(want, ranks[0]) == _back(got, ranks[1])
        return _same(want, got)


def _unused(part: Part, source: Node) -> str:
    return f"no other `{part}` uses {said(source)}"


def readers(node: Node) -> Iterator[Node]:
    """Who uses a value, through copies."""
    for user in node.users:
        if user.target is COPY:
            yield from readers(user)
        else:
            yield user


def _first(node: Node) -> Any:
    source = node.args[0] if node.args else None
    return source.meta.get("val") if isinstance(source, Node) else None


def _rank(value: Any) -> int:
    return value.ndim if isinstance(value, Tensor) else 0


def _back(dim: int, rank: int) -> int:
    """A dimension counted from the last one."""
    return dim - rank if dim >= 0 else dim


def _plain(arg: Any) -> Any:
    """An argument without the copies in front of it."""
    if isinstance(arg, (list, tuple)):
        return [_plain(a) for a in arg]
    while isinstance(arg, Node) and arg.target is COPY:
        arg = arg.args[0]
    return arg


def _fits(slot: Slot, got: Any, whole: bool) -> bool:
    if slot.many and whole:
        one = dataclasses.replace(slot, many=False, optional=False)
        return isinstance(got, list) and all(_fits(one, item, True) for item in got)
    value = got.meta.get("val") if isinstance(got, Node) else got
    if isinstance(value, Tensor):
        return slot.kind is Tensor
    return slot.takes(value)


def _same(one: Any, two: Any) -> bool:
    """Whether two arguments are the same: node, number (symbolic, too), dtype, list."""
    if one is two:
        return True
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(map(_same, one, two))
    one = one.meta.get("val") if isinstance(one, Node) else one
    two = two.meta.get("val") if isinstance(two, Node) else two
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        return False
    if isinstance(one, bool) or isinstance(two, bool):
        return type(one) is type(two) and one == two
    return bool(_torch.expression(one) == _torch.expression(two))


def _holds(gm: GraphModule, got: Any, want: Tensor) -> bool:
    if not isinstance(got, Node) or got.op != "get_attr" or "weight" in got.meta:
        return False
    held = meta.attribute(gm, str(got.target))
    return (
        isinstance(held, Tensor)
        and (held.dtype, held.shape) == (want.dtype, want.shape)
        and bool(torch.equal(held.cpu(), want.cpu()))
    )


def _show(value: Any) -> str:
    if isinstance(value, Node):
        return said(value)
    return "a value of its own" if isinstance(value, Held) else repr(value)
