"""What the code generator would make one kernel of: the atoms that no placement may cut.

A call with a kernel of its own (a product, a convolution, a custom operator) is an atom. All else
is light: what the generator fuses. Light calls make one atom where they read each other, or one
value, and no call with its own kernel lies in between.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from graphlib import TopologicalSorter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft import _torch
from torchgraft.fx.cost import Cost, Machine, bytes_of, elements, flops_of, has_formula
from torchgraft.fx.dialect import is_view


@dataclasses.dataclass(frozen=True)
class Atom:
    """Calls that run as one kernel, and the atoms (by number) whose values they read."""

    nodes: list[Node]
    own_kernel: bool
    cost: Cost
    before: frozenset[int] = frozenset()

    def seconds(self, machine: Machine) -> float:
        """Alone on the device; what only looks at memory in another way takes none."""
        return machine.alone(self.cost) if self.cost.nodes else 0.0


def _atom(nodes: list[Node], own_kernel: bool) -> Atom:
    inside = set(nodes)
    real = [node for node in nodes if not _is_free(node)]
    read = {_base(n) for node in real for n in node.all_input_nodes} - inside
    given = [n for n in real if any(user not in inside for user in n.users)]
    moved = sum(bytes_of(n.meta.get("val")) for n in (*read, *given))
    made = max((elements(n.meta.get("val")) for n in real), default=1)
    names = tuple(node.name for node in real)
    return Atom(nodes, own_kernel, Cost(moved, sum(map(flops_of, real)), names, max(made, 1)))


def atoms(gm: GraphModule, is_generated: Callable[[Node], bool]) -> list[Atom]:
    """The calls of a graph as atoms, each after those that it reads; writes to inputs, which come
    after everything else, are none."""
    calls = [
        node
        for node in gm.graph.nodes
        if node.op == "call_function" and node.target is not torch.ops.aten.copy_.default
    ]
    heavy: dict[Node, bool] = {}
    for node in calls:  # a part of a result is what the result is
        source = node.args[0] if node.target is operator.getitem else None
        own = not is_generated(node) or _has_kernel(node)
        heavy[node] = heavy.get(source, own) if isinstance(source, Node) else own
    levels = _levels(calls, heavy)
    groups = _Groups()
    readers: dict[tuple[Node, int], Node] = {}
    for node in calls:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, Node) and heavy.get(source):
            groups.join(source, node)
        elif not heavy[node]:
            for used in node.all_input_nodes:
                if heavy.get(used) is False and levels[used] == levels[node]:
                    groups.join(used, node)
                elif not _is_free(node) and used.op != "get_attr":
                    groups.join(readers.setdefault((_base(used), levels[node]), node), node)
    return _sorted([_atom(nodes, heavy[nodes[0]]) for nodes in groups.of(calls)])


def split(whole: Sequence[Atom], number: int) -> list[Atom]:
    """The atoms with one of them cut in parts: what is needed for the same other atoms stays
    together. It costs a kernel and the values in between, and lets others start earlier."""
    atom = whole[number]
    inside, of = set(atom.nodes), {n: i for i, one in enumerate(whole) for n in one.nodes}
    needed: dict[Node, int] = {}
    for node in reversed(atom.nodes):
        needed[node] = 0
        for user in node.users:
            needed[node] |= needed[user] if user in inside else 1 << of.get(user, len(whole))
    parts: dict[int, list[Node]] = {}
    for node in atom.nodes:
        parts.setdefault(needed[node], []).append(node)
    cut = [_atom(nodes, own_kernel=False) for nodes in parts.values()]
    return _sorted([*whole[:number], *cut, *whole[number + 1 :]])


def _is_free(node: Node) -> bool:
    """Whether a call computes nothing: a view, a part of a result, a size."""
    return is_view(node) or not any(isinstance(v, Tensor) for v in _values(node))


def _values(node: Node) -> Iterable[Any]:
    value = node.meta.get("val")
    return value if isinstance(value, (list, tuple)) else (value,)


def _base(node: Node) -> Node:
    """The value that a row of views looks at."""
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _has_kernel(node: Node) -> bool:
    """Whether the generator calls a kernel for it instead of writing one."""
    if node.target is operator.getitem or is_view(node):
        return False
    return has_formula(node.target) or _torch.is_fallback(node.target)


def _levels(calls: Sequence[Node], heavy: dict[Node, bool]) -> dict[Node, int]:
    """How many kernels of calls lie before a node; light calls are counted as late as they can be,
    with their readers. Light calls of one level have no kernel of a call between them."""
    levels: dict[Node, int] = {}
    for node in calls:
        known = [n for n in node.all_input_nodes if n in levels]
        levels[node] = max((levels[n] + heavy[n] for n in known), default=0)
    for node in reversed(calls):
        users = [levels[user] for user in node.users if user in levels]
        if users and not heavy[node]:
            levels[node] = min(users)
    return levels


class _Groups:
    """Nodes joined into groups (union-find)."""

    def __init__(self) -> None:
        self.parents: dict[Node, Node] = {}

    def root(self, node: Node) -> Node:
        while (parent := self.parents.get(node, node)) is not node:
            self.parents[node] = self.parents.get(parent, parent)
            node = parent
        return node

    def join(self, one: Node, two: Node) -> None:
        first, second = self.root(one), self.root(two)
        if first is not second:
            self.parents[second] = first

    def of(self, nodes: Sequence[Node]) -> list[list[Node]]:
        found: dict[Node, list[Node]] = {}
        for node in nodes:
            found.setdefault(self.root(node), []).append(node)
        return list(found.values())


def _sorted(found: list[Atom]) -> list[Atom]:
    """In an order that respects every dependency, with `before` filled in."""
    of = {node: i for i, atom in enumerate(found) for node in atom.nodes}
    before = [
        {of[n] for node in atom.nodes for n in node.all_input_nodes if n in of} - {i}
        for i, atom in enumerate(found)
    ]
    order = list(TopologicalSorter(dict(enumerate(before))).static_order())
    place = {old: new for new, old in enumerate(order)}
    return [
        dataclasses.replace(found[old], before=frozenset(place[i] for i in before[old]))
        for old in order
    ]
