"""The order that a list of launches needs: waits where data or the user asks for one, frees.

Launches come in program order, each on its stream. A wait goes in only where the stream does not
know already that the other launch is over; one event a launch, shared by all who wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torchgraft.plan import MAIN, Buffer, Free, Launch, Plan, PlanStep, Record, Wait, buffers
from torchgraft.stream.prove import Clock, Memory, accesses, join, memories

ENTRY = -1
"""Stands for the caller, whose inputs are there before the first launch."""


def schedule(
    inputs: Sequence[Buffer],
    constants: Sequence[tuple[Buffer, str]],
    launches: Sequence[Launch],
    outputs: tuple[Any, ...],
    *,
    shared: Sequence[tuple[Buffer, Buffer]] = (),
    after: Iterable[tuple[int, int]] = (),
    data: bool = True,
) -> Plan:
    """A plan of the launches that keeps data order and the pairs of `after` (first, then).

    Without `data` only the pairs are kept: the plan that the author of the pairs wrote, which may
    have hazards and is not to be run.

    Every stream is forked from the caller's and joined into it again; each buffer is freed as soon
    as that is safe.
    """
    bare = Plan(tuple(inputs), tuple(constants), tuple(launches), outputs, tuple(shared))
    waits = _waits(bare, launches, after, data)
    steps = _steps(launches, waits)
    ordered = Plan(bare.inputs, bare.constants, tuple(steps), outputs, bare.shared)
    return _with_frees(ordered) if data else ordered


def _waits(
    plan: Plan, launches: Sequence[Launch], after: Iterable[tuple[int, int]], data: bool
) -> dict[int, list[int]]:
    """For each launch (and the end, at len(launches)): whom its stream must wait for."""
    roots = memories(plan)
    wanted: dict[int, list[int]] = {}
    for first, then in after:
        wanted.setdefault(then, []).append(first)
    clocks: dict[str, Clock] = {MAIN: {MAIN: 1}}
    known: dict[int, Clock] = {ENTRY: {MAIN: 1}}  # what is known once a launch is over
    ticks: dict[int, tuple[str, int]] = {ENTRY: (MAIN, 1)}
    memory: dict[Buffer, Memory] = {}
    for buffer in plan.inputs:
        memory.setdefault(roots.get(buffer, buffer), Memory()).touched(MAIN, 1, ENTRY, True)
    waits: dict[int, list[int]] = {}

    def need(at: int, stream: str, steps: Iterable[int]) -> None:
        clock = clocks.setdefault(stream, {})
        for step in sorted(set(steps), reverse=True):  # the latest one may cover the others
            on, tick = ticks[step]
            if clock.get(on, 0) < tick:
                waits.setdefault(at, []).append(step)
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
    last = {launch.stream: at for at, launch in enumerate(launches)}
    need(len(launches), MAIN, last.values())
    return waits


def _steps(launches: Sequence[Launch], waits: dict[int, list[int]]) -> list[PlanStep]:
    recorded = {step for steps in waits.values() for step in steps}
    steps: list[PlanStep] = [Record(_event(ENTRY))] if ENTRY in recorded else []
    for at, launch in enumerate(launches):
        steps += [Wait(_event(step), launch.stream) for step in waits.get(at, ())]
        steps.append(launch)
        if at in recorded:
            steps.append(Record(_event(at), launch.stream))
    steps += [Wait(_event(step)) for step in waits.get(len(launches), ())]
    return steps


def _event(step: int) -> str:
    return "entry" if step == ENTRY else f"after{step}"


def _with_frees(plan: Plan) -> Plan:
    """The plan with a free for every buffer that is not returned, at the first point of the stream
    that made it whose clock covers every use; at the end where there is none."""
    roots = memories(plan)
    keep = set(buffers(plan.outputs)) | {b for b, _ in plan.constants}
    uses: dict[Buffer, dict[str, int]] = {}  # memory -> stream -> tick of its last use
    last: dict[Buffer, int] = {}  # memory -> step of its last use
    owner = {roots.get(b, b): MAIN for b in plan.inputs}
    members: dict[Buffer, list[Buffer]] = {}
    ticks: Clock = {MAIN: 1}
    for at, step in enumerate(plan.steps):
        if isinstance(step, Launch):
            ticks[step.stream] = tick = ticks.get(step.stream, 0) + 1
            for memory in accesses(step, roots):
                uses.setdefault(memory, {})[step.stream] = tick
                last[memory] = at
                owner.setdefault(memory, step.stream)
            for buffer in (*step.reads, *(out for out in step.outputs if out is not None)):
                held = members.setdefault(roots.get(buffer, buffer), [])
                if buffer not in held:
                    held.append(buffer)
    dying = {m for m in last if not any(b in keep for b in members.get(m, ()))}
    return _place_frees(plan, dying, uses, last, owner, members)


def _place_frees(
    plan: Plan,
    dying: set[Buffer],
    uses: dict[Buffer, dict[str, int]],
    last: dict[Buffer, int],
    owner: dict[Buffer, str],
    members: dict[Buffer, list[Buffer]],
) -> Plan:
    by_step: dict[int, list[Buffer]] = {}
    for memory in dying:
        by_step.setdefault(last[memory], []).append(memory)
    waiting: dict[str, list[Buffer]] = {}  # by the stream that made them
    clocks: dict[str, Clock] = {MAIN: {MAIN: 1}}
    events: dict[str, Clock] = {}
    steps: list[PlanStep] = []
    for at, step in enumerate(plan.steps):
        steps.append(step)
        clock = clocks.setdefault(step.stream, {})
        if isinstance(step, Launch):
            clock[step.stream] = clock.get(step.stream, 0) + 1
        elif isinstance(step, Record):
            events[step.event] = dict(clock)
        elif isinstance(step, Wait):
            join(clock, events[step.event])
        for memory in sorted(by_step.get(at, ()), key=_number):
            waiting.setdefault(owner[memory], []).append(memory)
        held = waiting.get(step.stream, [])
        for memory in list(held):
            if all(clock.get(stream, 0) >= tick for stream, tick in uses[memory].items()):
                held.remove(memory)
                steps += [Free(b, step.stream) for b in sorted(members[memory], key=_number)]
    for memory in sorted((m for held in waiting.values() for m in held), key=_number):
        steps += [Free(b) for b in sorted(members[memory], key=_number)]  # all are joined by now
    return Plan(plan.inputs, plan.constants, tuple(steps), plan.outputs, plan.shared)


def _number(buffer: Buffer) -> int:
    return buffer.index
