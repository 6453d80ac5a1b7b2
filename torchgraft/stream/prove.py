"""The proof: a plan is replayed with one vector clock per stream, and nothing may race.

A clock says, for each stream, how many of its launches are known to be over. A launch may touch a
buffer only when its stream's clock covers everything that touched the buffer's memory before and
conflicts with it. Linear in steps times streams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from torchgraft.plan import MAIN, Buffer, Free, Launch, Plan, Record, buffers

Clock = dict[str, int]


@dataclasses.dataclass(frozen=True)
class Hazard:
    """Two steps touch one memory and nothing orders them. `first` is -1 for the caller."""

    buffer: Buffer
    first: int
    second: int
    kind: str  # "read after write", "write after read", "write after write", "free", "return"

    def __str__(self) -> str:
        return f"{self.kind} of {self.buffer}: step {self.second} is not ordered after {self.first}"


def memories(plan: Plan) -> dict[Buffer, Buffer]:
    """For each buffer that may share memory with an earlier one: the first of those."""
    parents: dict[Buffer, Buffer] = {}

    def root(buffer: Buffer) -> Buffer:
        while buffer in parents:
            parents[buffer] = parents.get(parents[buffer], parents[buffer])
            buffer = parents[buffer]
        return buffer

    for view, base in plan.shared:  # a view of two buffers makes their memory one
        one, two = root(view), root(base)
        if one != two:
            parents[one] = two
    return {buffer: root(buffer) for buffer in parents}


def join(clock: Clock, other: Clock) -> None:
    """Let a clock know what another one knows."""
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


class Memory:
    """The last write and the last read of each stream, for one piece of memory."""

    def __init__(self) -> None:
        self.write: tuple[str, int, int] | None = None  # stream, tick, step
        self.reads: dict[str, tuple[int, int]] = {}  # stream -> tick, step

    def before_read(self) -> Iterator[tuple[str, int, int, str]]:
        if self.write is not None:
            yield (*self.write, "read after write")

    def before_write(self) -> Iterator[tuple[str, int, int, str]]:
        if self.write is not None:
            yield (*self.write, "write after write")
        for stream, (tick, step) in self.reads.items():
            yield stream, tick, step, "write after read"

    def touched(self, stream: str, tick: int, step: int, writes: bool) -> None:
        if writes:
            self.write, self.reads = (stream, tick, step), {}
        else:
            self.reads[stream] = (tick, step)


def accesses(launch: Launch, roots: dict[Buffer, Buffer]) -> dict[Buffer, bool]:
    """What a launch touches, and whether it writes it: buffers, and the memory that they share
    with others, by its root. A view is made by its launch, though its memory is not written; one
    that turns out to be a copy is written there."""
    touched: dict[Buffer, bool] = {}
    for buffer in launch.reads:
        touched[buffer] = touched[roots.get(buffer, buffer)] = False
    for out in launch.outputs:
        if out is not None:
            touched[out] = True
            touched.setdefault(roots.get(out, out), False)
    for buffer in launch.writes:
        touched[buffer] = touched[roots.get(buffer, buffer)] = True
    return touched


def pieces(launch: Launch, roots: dict[Buffer, Buffer]) -> set[Buffer]:
    """The memory that a launch touches, each piece by its root."""
    return {roots.get(buffer, buffer) for buffer in accesses(launch, roots)}


def hazards(plan: Plan) -> list[Hazard]:
    """Every pair of steps that may race; empty for a plan that is safe to run."""
    roots = memories(plan)
    clocks: dict[str, Clock] = {MAIN: {MAIN: 1}}
    events: dict[str, Clock] = {}
    memory: dict[Buffer, Memory] = {}
    owner = dict.fromkeys((roots.get(b, b) for b in plan.inputs), MAIN)
    ends = {step.stream: at for at, step in enumerate(plan.steps) if isinstance(step, Launch)}
    for buffer in plan.inputs:  # the caller made them, on its stream, before the first step
        memory.setdefault(roots.get(buffer, buffer), Memory()).touched(MAIN, 1, -1, True)
    found: list[Hazard] = []

    def check(
        buffer: Buffer,
        needed: Iterable[tuple[str, int, int, str]],
        clock: Clock,
        at: int,
        kind: str,
    ) -> None:
        for stream, tick, step, why in needed:
            if clock.get(stream, 0) < tick:
                found.append(Hazard(buffer, step, at, kind or why))

    for at, step in enumerate(plan.steps):
        clock = clocks.setdefault(step.stream, {})
        if isinstance(step, Launch):
            tick = clock.get(step.stream, 0) + 1
            for buffer, writes in accesses(step, roots).items():
                held = memory.setdefault(buffer, Memory())
                owner.setdefault(buffer, step.stream)
                check(buffer, held.before_write() if writes else held.before_read(), clock, at, "")
                held.touched(step.stream, tick, at, writes)
            clock[step.stream] = tick
        elif isinstance(step, Record):
            events[step.event] = dict(clock)
        elif isinstance(step, Free):
            root = roots.get(step.buffer, step.buffer)
            if root in memory:
                # Who made it may take it again at once, if it has anything left to do.
                made = owner[root]
                taker = clocks[made] if ends.get(made, -1) > at else clock
                check(step.buffer, memory[root].before_write(), taker, at, "free")
        else:
            join(clock, events[step.event])
    for out in set(buffers(plan.outputs)) | set(plan.inputs):
        root = roots.get(out, out)
        if root in memory:
            check(out, memory[root].before_write(), clocks[MAIN], len(plan.steps), "return")
    return found
