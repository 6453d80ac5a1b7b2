"""What planning costs: random launches over several streams, up to 50,000 of them."""

from __future__ import annotations

import dataclasses
import random
import time

from torchgraft.plan import MAIN, Buffer, Launch, Wait
from torchgraft.stream.order import schedule
from torchgraft.stream.prove import hazards

SIZES = (1_000, 5_000, 10_000, 50_000)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds to schedule and to prove a plan, and how large it is."""

    launches: int
    streams: int
    steps: int
    waits: int
    schedule_s: float
    prove_s: float


def launches(count: int, streams: int, seed: int = 0) -> tuple[list[Launch], tuple[Buffer, ...]]:
    """Each launch reads up to three of the last hundred values; one in twenty writes one."""
    rng = random.Random(seed)
    names = [MAIN, *(f"s{i}" for i in range(1, streams))]
    made, steps = [Buffer(0)], []
    for i in range(count):
        reads = rng.sample(made[-100:], min(len(made), rng.randint(1, 3)))
        writes = (reads[0],) if rng.random() < 0.05 else ()
        out = Buffer(1 + i)
        steps.append(Launch("k", tuple(reads), (), (out,), stream=rng.choice(names), writes=writes))
        made.append(out)
    return steps, (made[-1],)


def measure(count: int, streams: int) -> Cost:
    steps, outputs = launches(count, streams)
    start = time.process_time()
    plan = schedule((Buffer(0),), (), steps, outputs)
    planned = time.process_time()
    found = hazards(plan)
    proved = time.process_time()
    assert not found
    waits = sum(isinstance(step, Wait) for step in plan.steps)
    return Cost(count, streams, len(plan.steps), waits, planned - start, proved - planned)
