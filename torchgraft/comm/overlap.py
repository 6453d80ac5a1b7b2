"""The order in which units are launched where there are collectives: start early, wait late."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from torchgraft import _torch
from torchgraft.comm.ops import is_collective
from torchgraft.fx.label import come_after, stream_of

AHEAD = 64 << 20
"""Bytes of results that collectives may make before anybody reads them: beyond it, the next one
starts when an earlier result has been read."""


def overlapped(
    units: Sequence[Sequence[Node]], before: Sequence[set[int]], keys: Sequence[Any]
) -> list[int]:
    """An order of units that respects `before`; each unit comes with its nodes and its key.

    A collective is launched as soon as its inputs are. Of the rest, what waits for no collective
    under way goes first, and of that, what the next collective needs. A unit's key (barriers, then
    its place in the graph) goes before all that, as far as it speaks of barriers.
    """
    left = [set(firsts) for firsts in before]
    users: dict[int, list[int]] = {}
    for i, firsts in enumerate(before):
        for first in firsts:
            users.setdefault(first, []).append(i)
    comm = [is_collective(nodes[0]) for nodes in units]
    ready = [i for i, firsts in enumerate(left) if not firsts]
    flight: dict[int, int] = {}  # collectives that nobody waited for yet, by their place in line
    unread: dict[int, int] = {}  # those of which nobody read the result yet: its bytes
    result: list[int] = []

    def rank(i: int) -> Any:
        needed = [flight[first] for first in before[i] if first in flight]
        urgency = min(node.meta.get("between", (0,))[0] for node in units[i])
        return (keys[i][:-1], bool(needed), max(needed, default=0), urgency, keys[i][-1])

    while ready:
        starts = [i for i in ready if comm[i]]
        others = [i for i in ready if not comm[i]]
        held = starts and others and sum(unread.values()) + _made(units[starts[0]]) > AHEAD
        now = min(starts, key=rank) if starts and not held else min(others, key=rank)
        ready.remove(now)
        if comm[now]:
            flight[now], unread[now] = len(result), _made(units[now])
            if result and sum(unread.values()) > AHEAD:
                last = next((i for i in reversed(result) if not comm[i]), None)
                if last is not None:
                    come_after(units[now][0], [units[last][0]])
        for first in before[now]:
            unread.pop(first, None)
            if first in flight and not comm[now]:
                _landed(flight, flight[first], stream_of(units[first][0]), units)
        result.append(now)
        for i in users.get(now, ()):
            left[i].discard(now)
            if not left[i]:
                ready.append(i)
    return result


def _landed(flight: dict[int, int], place: int, stream: str, units: Sequence[Any]) -> None:
    """Who waited for a collective has waited for those before it on its stream, too."""
    for i, at in list(flight.items()):
        if at <= place and stream_of(units[i][0]) == stream:
            del flight[i]


def _made(nodes: Sequence[Node]) -> int:
    """The bytes of what a collective gives, with the sizes that it was traced with."""
    value = nodes[0].meta.get("val")
    parts = value if isinstance(value, (list, tuple)) else [value]
    return sum(
        part.element_size() * math.prod(int(_torch.hint(size)) for size in part.shape)
        for part in parts
        if isinstance(part, Tensor)
    )
