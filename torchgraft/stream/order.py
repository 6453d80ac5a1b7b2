"""The order that a list of launches needs: waits where data or the user asks for one, frees.

Launches come in program order, each on its stream. A wait goes in only where the stream does not
know already that the other launch is over; one event a launch, shared by all who wait for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from torchgraft.plan import MAIN, Buffer, Free, Launch, Plan, PlanStep, Record, Wait, buffers
from torchgraft.stream.prove import Clock, Memory, accesses, join, memories, pieces

ENTRY = -1
"""Stands for the caller, whose inputs are there before the first launch."""

Lesson = tuple[int, str, int]
"""A launch, the stream that waits right after it was launched, and the launch waited for."""


def schedule(
    inputs: Sequence[Buffer],
    constants: Sequence[tuple[Buffer, str]],
    launches: Sequence[Launch],
    outputs: tuple[Any, ...],
    *,
    shared: Sequence[tuple[Buffer, Buffer]] = (),
    after: Iterable[tuple[int, int]] = (),
    learn: Iterable[Lesson] = (),
    data: bool = True,
) -> Plan:
    """A plan of the launches that keeps data order and the pairs of `after` (first, then), and in
    which streams `learn` what they need for nothing but to free memory.

    Without `data` only the pairs are kept: the plan that the author of the pairs wrote, which may
    have hazards and is not to be run.

    Every stream is forked from the caller's and joined into it again; each buffer is freed as soon
    as that is safe.
    """
    bare = Plan(tuple(inputs), tuple(constants), tuple(launches), outputs, tuple(shared))
    waits = _waits(bare, launches, after, learn, data)
    steps = _steps(launches, waits)
    ordered = Plan(bare.inputs, bare.constants, tuple(steps), outputs, bare.shared)
    return _with_frees(ordered) if data else ordered


def _waits(
    plan: Plan,
    launches: Sequence[Launch],
    after: Iterable[tuple[int, int]],
    learn: Iterable[Lesson],
    data: bool,
) -> dict[int, list[tuple[str, int]]]:
    """For each launch (and the end, at len(launches)): who waits right before it, and for whom."""
    roots = memories(plan)
    wanted: dict[int, list[int]] = {}
    for first, then in after:
        wanted.setdefault(then, []).append(first)
    lessons: dict[int, list[tuple[str, int]]] = {}
    for at, stream, first in sorted(learn):
        lessons.setdefault(at, []).append((stream, first))
    clocks: dict[str, Clock] = {MAIN: {MAIN: 1}}
    known: dict[int, Clock] = {ENTRY: {MAIN: 1}}  # what is known once a launch is over
    ticks: dict[int, tuple[str, int]] = {ENTRY: (MAIN, 1)}
    memory: dict[Buffer, Memory] = {}
    for buffer in plan.inputs:
        memory.setdefault(roots.get(buffer, buffer), Memory()).touched(MAIN, 1, ENTRY, True)
    waits: dict[int, list[tuple[str, int]]] = {}

    def need(at: int, stream: str, steps: Iterable[int]) -> None:
        clock = clocks.setdefault(stream, {})
        for step in sorted(set(steps), reverse=True):  # the latest one may cover the others
            on, tick = ticks[step]
            if clock.get(on, 0) < tick:
                waits.setdefault(at, []).append((stream, step))
                join(clock, known[step])

    for at, launch in enumerate(launches):
        touched = accesses(launch, roots)
        steps = list(wanted.get(at, ()))
        if launch.stream not in clocks:
            steps.append(ENTRY)  # a stream starts where the caller's is, read or not
        for buffer, writes in touched.items() if data else ():
            held = memory.setdefault(buffer, Memory())
            before = held.before_write() if writes else held.before_read()
            steps += [step for _, _, step, _ in before]
        need(at, launch.stream, steps)
        clock = clocks[launch.stream]
        clock[launch.stream] = tick = clock.get(launch.stream, 0) + 1
        ticks[at], known[at] = (launch.stream, tick), dict(clock)
        for buffer, writes in touched.items():
            memory.setdefault(buffer, Memory()).touched(launch.stream, tick, at, writes)
        for stream, first in lessons.get(at, ()):
            need(at + 1, stream, [first])
    last = {launch.stream: at for at, launch in enumerate(launches)}
    need(len(launches), MAIN, last.values())
    return waits


def _steps(launches: Sequence[Launch], waits: dict[int, list[tuple[str, int]]]) -> list[PlanStep]:
    recorded = {step for some in waits.values() for _, step in some}
    steps: list[PlanStep] = [Record(_event(ENTRY))] if ENTRY in recorded else []
    for at, launch in enumerate(launches):
        steps += [Wait(_event(step), stream) for stream, step in waits.get(at, ())]
        steps.append(launch)
        if at in recorded:
            steps.append(Record(_event(at), launch.stream))
    steps += [Wait(_event(step), stream) for stream, step in waits.get(len(launches), ())]
    return steps


def _event(step: int) -> str:
    return "entry" if step == ENTRY else f"after{step}"


def _with_frees(plan: Plan) -> Plan:
    """The plan with a free for every buffer that is not returned: at the first point of the stream
    that made it whose clock covers every use. Where that stream has nothing more to do, any stream
    may free it that knows of every use; nobody can take the memory in between."""
    lives = _Lives(plan)
    by_step: dict[int, list[Buffer]] = {}
    for memory in lives.dying:
        by_step.setdefault(lives.last[memory], []).append(memory)
    waiting: dict[str, list[Buffer]] = {}  # by the stream that made them
    orphans: list[Buffer] = []
    clocks: dict[str, Clock] = {MAIN: {MAIN: 1}}
    events: dict[str, Clock] = {}
    steps: list[PlanStep] = []

    def free(candidates: list[Buffer], step: PlanStep) -> list[Buffer]:
        """Free what the step's stream knows to be over; what is left."""
        clock, left = clocks[step.stream], []
        for memory in candidates:
            if all(clock.get(stream, 0) >= tick for stream, tick in lives.uses[memory].items()):
                steps.extend(Free(b, step.stream) for b in lives.members[memory])
            else:
                left.append(memory)
        return left

    for at, step in enumerate(plan.steps):
        steps.append(step)
        clock = clocks.setdefault(step.stream, {})
        if isinstance(step, Launch):
            clock[step.stream] = clock.get(step.stream, 0) + 1
        elif isinstance(step, Record):
            events[step.event] = dict(clock)
        elif isinstance(step, Wait):
            join(clock, events[step.event])
            # Only here does a stream learn of others; a use of its own it knows at once, below.
            if step.stream in waiting:
                waiting[step.stream] = free(waiting[step.stream], step)
            orphans = free(orphans, step)
        if lives.ends.get(step.stream) == at:
            orphans += waiting.pop(step.stream, [])
        for memory in sorted(by_step.get(at, ()), key=_number):
            owner = lives.owner[memory]
            if owner == step.stream or lives.ends[owner] <= at:
                left = free([memory], step)
                (orphans if lives.ends[owner] <= at else waiting.setdefault(owner, [])).extend(left)
            else:
                waiting.setdefault(owner, []).append(memory)
    for memory in sorted((*orphans, *(m for held in waiting.values() for m in held)), key=_number):
        steps += [Free(b) for b in lives.members[memory]]  # all are joined by now
    return Plan(plan.inputs, plan.constants, tuple(steps), plan.outputs, plan.shared)


class _Lives:
    """For each piece of memory: who made it, who uses it last, and which buffers it holds."""

    def __init__(self, plan: Plan) -> None:
        roots = memories(plan)
        keep = set(buffers(plan.outputs)) | {b for b, _ in plan.constants}
        self.uses: dict[Buffer, dict[str, int]] = {}  # memory -> stream -> tick of its last use
        self.last: dict[Buffer, int] = {}  # memory -> step of its last use
        self.owner = {roots.get(b, b): MAIN for b in plan.inputs}
        self.ends: dict[str, int] = {MAIN: len(plan.steps)}  # stream -> its last step
        held: dict[Buffer, dict[Buffer, None]] = {}
        ticks: Clock = {MAIN: 1}
        for at, step in enumerate(plan.steps):
            if step.stream != MAIN:
                self.ends[step.stream] = at
            if not isinstance(step, Launch):
                continue
            ticks[step.stream] = tick = ticks.get(step.stream, 0) + 1
            for memory in pieces(step, roots):
                self.uses.setdefault(memory, {})[step.stream] = tick
                self.last[memory] = at
                self.owner.setdefault(memory, step.stream)
            for buffer in (*step.reads, *(out for out in step.outputs if out is not None)):
                held.setdefault(roots.get(buffer, buffer), {})[buffer] = None
        self.members = {memory: sorted(some, key=_number) for memory, some in held.items()}
        self.dying = [m for m in self.last if keep.isdisjoint(self.members.get(m, ()))]


def _number(buffer: Buffer) -> int:
    return buffer.index


def in_turn(plan: Plan) -> Plan | None:
    """The plan on the caller's stream alone, where no two of its launches may run at once: each
    waits for the one before it, so that other streams would only cost their hand-over."""
    clocks: dict[str, Clock] = {MAIN: {}}
    events: dict[str, Clock] = {}
    last: tuple[str, int] | None = None
    for step in plan.steps:
        clock = clocks.setdefault(step.stream, {})
        if isinstance(step, Launch):
            if last is not None and clock.get(last[0], 0) < last[1]:
                return None
            clock[step.stream] = tick = clock.get(step.stream, 0) + 1
            last = (step.stream, tick)
        elif isinstance(step, Record):
            events[step.event] = dict(clock)
        elif isinstance(step, Wait):
            join(clock, events[step.event])
    kept = [s for s in plan.steps if isinstance(s, (Launch, Free))]
    return dataclasses.replace(plan, steps=tuple(dataclasses.replace(s, stream=MAIN) for s in kept))
