"""Random launches over random streams: the plan is proved, joined, and needs few waits."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from torchgraft.plan import MAIN, Buffer, Free, Launch, Plan, Record, Wait
from torchgraft.stream.order import schedule
from torchgraft.stream.prove import hazards


def random_launches(seed: int, count: int, streams: int) -> tuple[list[Launch], tuple[object, ...]]:
    """Launches in program order: each reads up to three earlier values, some write one."""
    rng = random.Random(seed)
    names = [MAIN, *(f"s{i}" for i in range(1, streams))]
    made = [Buffer(0), Buffer(1)]
    launches = []
    for i in range(count):
        reads = rng.sample(made, min(len(made), rng.randint(1, 3)))
        writes = (reads[0],) if rng.random() < 0.2 else ()
        out = Buffer(2 + i)
        launches.append(
            Launch(f"k{i}", tuple(reads), (), (out,), stream=rng.choice(names), writes=writes)
        )
        made.append(out)
    return launches, tuple(rng.sample(made[2:], min(3, count)))


CASES = st.tuples(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 5))


@settings(max_examples=300, deadline=None)
@given(CASES)
def test_a_scheduled_plan_has_no_hazard_and_reads_back(case: tuple[int, int, int]) -> None:
    launches, outputs = random_launches(*case)
    plan = schedule((Buffer(0), Buffer(1)), (), launches, outputs)
    assert hazards(plan) == []
    assert [step for step in plan.steps if isinstance(step, Launch)] == launches
    assert Plan.parse(str(plan)) == plan
    freed = [step.buffer for step in plan.steps if isinstance(step, Free)]
    assert len(freed) == len(set(freed))
    assert set(freed).isdisjoint(outputs)


@settings(max_examples=100, deadline=None)
@given(CASES)
def test_a_wait_left_out_is_a_hazard_or_was_asked_for(case: tuple[int, int, int]) -> None:
    """Every wait is needed: without it the proof fails."""
    launches, outputs = random_launches(*case)
    plan = schedule((Buffer(0), Buffer(1)), (), launches, outputs)
    for at, step in enumerate(plan.steps):
        if isinstance(step, Wait) and step.event != "entry":
            less = (*plan.steps[:at], *plan.steps[at + 1 :])
            broken = Plan(plan.inputs, plan.constants, less, plan.outputs)
            last_join = not any(isinstance(later, Launch) for later in plan.steps[at:])
            assert hazards(broken) or last_join


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_there_are_at_most_half_as_many_waits_as_pairs_that_need_order(seed: int) -> None:
    """A wait covers all that came before it on the other stream, and what that stream knows."""
    waits = pairs = 0
    for more in range(10):
        launches, outputs = random_launches(seed + more, 60, 4)
        plan = schedule((Buffer(0), Buffer(1)), (), launches, outputs)
        waits += sum(isinstance(step, Wait) for step in plan.steps)
        for at, later in enumerate(launches):
            pairs += sum(
                earlier.stream != later.stream and conflict(earlier, later)
                for earlier in launches[:at]
            )
    assert waits <= pairs / 2


def conflict(one: Launch, two: Launch) -> bool:
    """Whether two launches touch one value and either makes or writes it."""
    made, written = {*one.outputs, *one.writes}, set(two.writes)
    return bool(made & (two.reads | written) or one.reads & written)


def test_a_view_made_on_one_stream_is_waited_for_on_another() -> None:
    x, y, view, z = map(Buffer, range(4))
    launches = [
        Launch("k", (x,), (), (y,)),
        Launch("view", (y,), (), (view,)),
        Launch("k", (view,), (), (z,), stream="side"),
    ]
    plan = schedule((x,), (), launches, (z,), shared=[(view, y)])
    assert next(str(s) for s in plan.steps if isinstance(s, Wait)) == "wait('side', 'after1')"
    assert hazards(plan) == []


def test_one_stream_needs_no_waits_at_all() -> None:
    launches, outputs = random_launches(1, 30, 1)
    plan = schedule((Buffer(0), Buffer(1)), (), launches, outputs)
    assert not [step for step in plan.steps if isinstance(step, (Wait, Record))]


def test_data_order_is_kept_although_nobody_asked() -> None:
    """mm and abs on a side stream, add and sub on the caller's: add reads abs, so it waits."""
    x, mm, absolute, add, sub = map(Buffer, range(5))
    launches = [
        Launch("mm", (x, x), (), (mm,), stream="side"),
        Launch("abs", (mm,), (), (absolute,), stream="side"),
        Launch("add", (absolute, 1), (), (add,)),
        Launch("sub", (x, mm), (), (sub,)),
    ]
    plan = schedule((x,), (), launches, (add, sub), after=[(1, 3)])
    assert str(plan) == (
        "def plan(b0):\n"
        "    record('main', 'entry')\n"
        "    wait('side', 'entry')\n"
        "    b1 = launch('side', 'mm', b0, b0)\n"
        "    b2 = launch('side', 'abs', b1)\n"
        "    record('side', 'after1')\n"
        "    wait('main', 'after1')\n"
        "    b3 = launch('main', 'add', b2, 1)\n"
        "    free('main', b2)\n"
        "    b4 = launch('main', 'sub', b0, b1)\n"
        "    free('main', b0)\n"
        "    free('main', b1)\n"
        "    return (b3, b4)"
    )
    naive = Plan.parse(
        "def plan(b0):\n"
        "    record('main', 'entry')\n"
        "    wait('side', 'entry')\n"
        "    b1 = launch('side', 'mm', b0, b0)\n"
        "    b2 = launch('side', 'abs', b1)\n"
        "    record('side', 'r')\n"
        "    b3 = launch('main', 'add', b2, 1)\n"
        "    wait('main', 'r')\n"
        "    b4 = launch('main', 'sub', b0, b1)\n"
        "    return (b3, b4)"
    )
    assert [str(h) for h in hazards(naive)] == [
        "read after write of b2: step 5 is not ordered after 3"
    ]


def test_a_view_counts_as_its_memory() -> None:
    x, view, out = map(Buffer, range(3))
    launches = [
        Launch("view", (x,), (), (view,)),
        Launch("add_", (x, 1), (), (), stream="side", writes=(x,)),
        Launch("mul", (view, 2), (), (out,)),
    ]
    plan = schedule((x,), (), launches, (out,), shared=[(view, x)])
    assert hazards(plan) == []
    assert sum(isinstance(step, Wait) for step in plan.steps) == 2
    assert "shares(b1, b0)" in str(plan)
    assert "write(b0)" in str(plan)
