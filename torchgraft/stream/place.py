"""Which task goes to which stream: list scheduling along the longest paths, and what it predicts.

A task is what one stream runs without being interrupted. Its `seconds` are those it takes alone;
`busy` are those in which it would fill the whole device, so however many streams there are, the
device needs the sum of them.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Task:
    """What it takes, and which tasks (by number, all smaller) come before it."""

    seconds: float
    busy: float
    before: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Placement:
    """A stream for each task (0 is the caller's), the order of launches, the time it all takes."""

    streams: tuple[int, ...]
    order: tuple[int, ...]
    seconds: float


def serial(tasks: Sequence[Task]) -> float:
    """The time on one stream."""
    return sum(task.seconds for task in tasks)


def bound(tasks: Sequence[Task]) -> float:
    """No number of streams is faster than this: the longest path, and the device's own limit."""
    ends: list[float] = []
    for task in tasks:
        ends.append(task.seconds + max((ends[i] for i in task.before), default=0.0))
    return max(max(ends, default=0.0), sum(task.busy for task in tasks))


def place(tasks: Sequence[Task], streams: int, wait: float) -> Placement:
    """Each task, the one with the longest way to the end first, where it can start earliest.

    A task that follows one on another stream starts `wait` later, and so does the caller at the
    end. Ties go to the stream of a task right before it, then to the caller's.
    """
    after: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for first in task.before:
            after[first].append(number)
    rest = [0.0] * len(tasks)  # the longest way to the end
    for number in reversed(range(len(tasks))):
        rest[number] = tasks[number].seconds + max((rest[i] for i in after[number]), default=0.0)
    missing = [len(set(task.before)) for task in tasks]
    ready = [(-rest[i], i) for i, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    free, on, ends = [0.0] * streams, [0] * len(tasks), [0.0] * len(tasks)
    order: list[int] = []
    while ready:
        number = heapq.heappop(ready)[1]
        task = tasks[number]
        own = {on[i] for i in task.before}

        def start(stream: int, task: Task = task) -> float:
            told = (ends[i] + (wait if on[i] != stream else 0.0) for i in task.before)
            fork = wait if stream and not task.before else 0.0
            return max(free[stream], fork, *told)

        best = min(range(streams), key=lambda s: (start(s), s not in own, s))
        on[number], ends[number] = best, start(best) + task.seconds
        free[best] = ends[number]
        order.append(number)
        for user in set(after[number]):
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (-rest[user], user))
    joined = (end + (wait if stream else 0.0) for stream, end in enumerate(free) if end)
    total = max(max(joined, default=0.0), sum(task.busy for task in tasks))
    return Placement(tuple(on), tuple(order), total)


def best(tasks: Sequence[Task], most: int, wait: float, within: float) -> Placement | None:
    """The fastest placement on 2, 4, ... `most` streams; None where none is done `within` that."""
    if bound(tasks) > within:
        return None
    counts = itertools.takewhile(lambda count: count <= most, (2, 4, 8, 16))
    found = min((place(tasks, count, wait) for count in counts), key=lambda p: p.seconds)
    return found if found.seconds <= within else None


def pieces(tasks: Sequence[Task], placement: Placement) -> list[list[int]]:
    """Tasks that one launch may hold, in launch order: neighbours on a stream, as long as no other
    stream waits for an earlier one of them or has to be waited for in between."""
    on = placement.streams
    waited = {i for n, task in enumerate(tasks) for i in task.before if on[i] != on[n]}
    open_: dict[int, list[int]] = {}
    known: dict[int, set[int]] = {}  # by stream: the tasks of others that it has waited for
    result: list[list[int]] = []
    for number in placement.order:
        stream = on[number]
        others = {i for i in tasks[number].before if on[i] != stream}
        piece = open_.get(stream)
        if piece is None or piece[-1] in waited or others - known[stream]:
            piece = open_[stream] = []
            result.append(piece)
        known.setdefault(stream, set()).update(others)
        piece.append(number)
    return result
