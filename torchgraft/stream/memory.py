"""What a plan keeps alive, and what to wait for where several streams keep too much of it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping

from torchgraft.plan import MAIN, Buffer, Collective, Free, Launch, Plan, PlanStep
from torchgraft.stream.order import Lesson, schedule
from torchgraft.stream.prove import memories, pieces


class _Alive:
    """The bytes that launches have made and not freed yet, step by step."""

    def __init__(self, plan: Plan, sizes: Mapping[Buffer, int]) -> None:
        self.now, self.bytes = 0, dict[Buffer, int]()  # all of it, and by memory
        self._roots, self._sizes = memories(plan), sizes
        self._views = {view for view, _ in plan.shared}
        self._members: dict[Buffer, set[Buffer]] = {}

    def step(self, step: PlanStep) -> Buffer | None:
        """Take one step; the memory that it gives back."""
        if isinstance(step, Launch):
            for out in step.outputs:
                if out is not None:
                    root = self._roots.get(out, out)
                    self._members.setdefault(root, set()).add(out)
                    own = 0 if out in self._views else self._sizes.get(out, 0)
                    self.bytes[root] = self.bytes.get(root, 0) + own
                    self.now += own
        elif isinstance(step, Free):
            root = self._roots.get(step.buffer, step.buffer)
            held = self._members.get(root, set())
            held.discard(step.buffer)
            if not held:
                self.now -= self.bytes.pop(root, 0)
                return root
        return None


def peak(plan: Plan, sizes: Mapping[Buffer, int]) -> int:
    """The most bytes that launches have made and not freed yet.

    Steps in launch order, as a device's allocator sees them; inputs and constants are the caller's
    and are not counted.
    """
    alive, most = _Alive(plan, sizes), 0
    for step in plan.steps:
        alive.step(step)
        most = max(most, alive.now)
    return most


def alone(plan: Plan) -> Plan:
    """The same launches on one stream."""
    launches = [
        Launch(s.kernel, s.args, s.kwargs, s.outputs, s.unpack, MAIN, s.writes)
        for s in plan.launches
    ]
    return schedule(plan.inputs, plan.constants, launches, plan.outputs, shared=plan.shared)


def lean(
    plan: Plan, sizes: Mapping[Buffer, int], limit: float, after: Iterable[tuple[int, int]] = ()
) -> tuple[Plan, int]:
    """A plan of the same launches and orders that keeps at most `limit` bytes, and how often one
    stream waits for another for that.

    What one stream keeps can be reached, but for collectives: nobody waits for one to free what it
    reads, since work beside it is its point.
    """
    lessons: dict[Lesson, None] = {}
    launches = plan.launches
    while peak(plan, sizes) > limit:
        found = [
            o for o in relief(plan, sizes, limit) if not isinstance(launches[o[2]], Collective)
        ]
        if lessons.keys() >= set(found):
            break
        lessons.update(dict.fromkeys(found))
        parts = (plan.inputs, plan.constants, launches, plan.outputs)
        plan = schedule(*parts, shared=plan.shared, after=after, learn=lessons)
    return plan, len(lessons)


def relief(plan: Plan, sizes: Mapping[Buffer, int], limit: float) -> Iterator[Lesson]:
    """What streams must learn to let memory go before the plan has more than `limit` bytes: that
    which is alive though its last use has been launched, the largest first."""
    lives, alive = _Lives(plan), _Alive(plan, sizes)
    idle: list[tuple[int, int]] = []  # bytes (negative, for the heap) and memory, by its number
    soon: dict[Buffer, int] = {}  # what is to be freed earlier than it is
    number, excess = -1, -limit
    for step in plan.steps:
        was, freed = alive.now, alive.step(step)
        excess += alive.now - was + (0 if freed is None else soon.pop(freed, 0))
        if not isinstance(step, Launch):
            continue
        number += 1
        while excess > 0 and idle:
            memory = Buffer(heapq.heappop(idle)[1])
            if memory in alive.bytes:
                soon[memory] = alive.bytes[memory]
                excess -= soon[memory]
                yield from lives.lessons(memory)
        for memory in lives.over.get(number, ()):
            if alive.bytes.get(memory):
                heapq.heappush(idle, (-alive.bytes[memory], memory.index))


class _Lives:
    """Who made each piece of memory, and who uses it last, by the numbers of launches."""

    def __init__(self, plan: Plan) -> None:
        roots = memories(plan)
        self._last: dict[Buffer, dict[str, int]] = {}  # memory -> stream -> its last use there
        self._owner: dict[Buffer, str] = {}
        self._ends: dict[str, int] = {}  # stream -> its last launch
        for number, launch in enumerate(plan.launches):
            self._ends[launch.stream] = number
            for memory in pieces(launch, roots):
                self._last.setdefault(memory, {})[launch.stream] = number
                self._owner.setdefault(memory, launch.stream)
        self._ends[MAIN] = len(plan.launches)  # it waits for all
        freed = {roots.get(s.buffer, s.buffer) for s in plan.steps if isinstance(s, Free)}
        self.over: dict[int, list[Buffer]] = {}  # launch -> what can go when it is over
        for memory, uses in self._last.items():
            if memory in freed:  # not returned
                self.over.setdefault(max(uses.values()), []).append(memory)

    def lessons(self, memory: Buffer) -> Iterator[Lesson]:
        """What lets a piece of memory go right after its last use: the stream that made it knows of
        all uses then. Where that one is done, any other will do."""
        uses = self._last[memory]
        end = max(uses.values())
        last = next(stream for stream, use in uses.items() if use == end)
        could = (self._owner[memory], last, MAIN)
        stream = next(one for one in could if self._ends[one] > end)
        yield from ((end, stream, use) for on, use in uses.items() if on != stream)
