"""Several small collectives of a group become one, where nobody then waits longer.

A collective costs a round trip before it moves a byte: four all_reduces of up to 256 KiB took two
to three times as long as one of the four together (gloo, two ranks on one machine).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from torchgraft import _torch
from torchgraft.comm.ops import collectives, kind_of
from torchgraft.fx import meta
from torchgraft.passes.builtin import reaches_output

aten = torch.ops.aten
_KINDS = ("all_reduce", "all_gather_into_tensor")
_MOST = 16
"""How many times the bytes of a small one a bucket may hold."""


def bucket(gm: GraphModule, small: int) -> list[str]:
    """Merge collectives of up to `small` bytes each, in place; what was done, for the report.

    Only neighbours in the order of their group are merged, so that order stays. One waits for the
    other only where its result is not needed before: everything that uses it is the program's
    output, cheap, or needs the other one, too.
    """
    notes: list[str] = []
    groups: dict[Any, list[Node]] = {}
    for node in collectives(gm.graph.nodes):
        groups.setdefault(node.args[-1], []).append(node)
    for members in groups.values():
        for row in _rows(members, small):
            notes.append(_merge(gm, row))
    return notes


def _rows(members: Sequence[Node], small: int) -> Iterator[list[Node]]:
    """The collectives of a group that go together, two or more each."""
    row: dict[Node, set[Node]] = {}  # with everything that needs it
    for node in members:
        needing = _reach(node) if _size(node) <= small else set()
        if row and _joins(row, node, needing, small):
            row[node] = needing
            continue
        if len(row) > 1:
            yield list(row)
            needing = _reach(node) if _size(node) <= small else set()  # of the graph as it is now
        row = {node: needing} if _size(node) <= small else {}
    if len(row) > 1:
        yield list(row)


def _size(node: Node) -> float:
    """The bytes that a collective is given; infinite for one that stays alone."""
    if kind_of(node) not in _KINDS or len(node.all_input_nodes) != 1:
        return math.inf
    value = node.all_input_nodes[0].meta.get("val")
    if value is None or _torch.symbols_of(value):
        return math.inf
    if kind_of(node) == "all_gather_into_tensor" and not value.ndim:
        return math.inf
    return float(value.numel() * value.element_size())


def _joins(
    row: Mapping[Node, set[Node]], node: Node, needing: Collection[Node], small: int
) -> bool:
    """Whether a collective may be done together with those before it: same call, same type, and
    nobody is held up if they are done when this one can be."""
    first = next(iter(row))
    if node.target is not first.target or node.args[1:] != first.args[1:] or _size(node) > small:
        return False
    one, two = (n.all_input_nodes[0].meta["val"] for n in (first, node))
    if (one.dtype, one.device) != (two.dtype, two.device):
        return False
    if sum(map(_size, row)) + _size(node) > _MOST * small:
        return False
    users = {user for needed in row.values() for user in needed}
    return node not in users and all(user in needing or _is_cheap(user) for user in users)


def _reach(node: Node) -> set[Node]:
    """Everything that needs a node."""
    found: set[Node] = set()
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if user not in found:
                found.add(user)
                todo.append(user)
    return found


def _is_cheap(node: Node) -> bool:
    """Whether a call is no matrix product, convolution or operator that torch does not know."""
    if node.op == "output" or node.target is operator.getitem:
        return True
    known = getattr(node.target, "namespace", "") in ("aten", "prims")
    return known and getattr(node.target, "overloadpacket", None) not in flop_registry


def _merge(gm: GraphModule, row: Sequence[Node]) -> str:
    """One collective over all their elements, at the place of the last."""
    last, graph = row[-1], gm.graph
    kind, group = kind_of(last), last.args[-1]

    def call(target: Any, *args: Any) -> Node:
        made = graph.call_function(target, args)
        meta.inherit(made, last, place=False)
        made.meta["val"] = meta.compute(gm, made)
        return made

    sizes = [node.meta["val"].shape for node in row]
    counts = [node.all_input_nodes[0].meta["val"].numel() for node in row]
    after = last.next
    with graph.inserting_before(last):
        flat = call(
            aten.cat.default,
            [call(aten.reshape.default, node.all_input_nodes[0], [-1]) for node in row],
        )
        done = call(last.target, flat, *last.args[1:])
        if kind == "all_gather_into_tensor":
            done = call(aten.reshape.default, done, [-1, sum(counts)])
        start, parts = 0, []
        for node, shape, count in zip(row, sizes, counts, strict=True):
            part = call(aten.slice.Tensor, done, done.meta["val"].ndim - 1, start, start + count)
            part = call(aten.reshape.default, part, list(shape))
            if reaches_output(node):  # two results of a program share no memory
                part = call(aten.clone.default, part)
            parts.append(part)
            start += count
    for node, part in zip(row, parts, strict=True):
        _use_later(node, after)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
    return f"{len(row)} small {kind}s of group {group!r} are done as one, of {sum(counts)} elements"


def _use_later(node: Node, after: Node) -> None:
    """Move what uses a collective behind the place where it is done now."""
    late = _reach(node)
    place = after.prev
    for user in [n for n in node.graph.nodes if n in late and n < after and n.op != "output"]:
        place.append(user)
        place = user
