"""List scheduling of tasks on streams: every task once, after what it reads, in safe pieces."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgraft.stream.place import Task, best, bound, pieces, place, serial


def random_tasks(seed: int, count: int) -> list[Task]:
    rng = random.Random(seed)
    tasks = []
    for i in range(count):
        before = rng.sample(range(i), min(i, rng.choice((0, 1, 1, 2))))
        seconds = rng.uniform(0, 10)
        tasks.append(Task(seconds, seconds * rng.random(), tuple(sorted(before))))
    return tasks


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.sampled_from((2, 4, 8)), st.floats(0, 3))
def test_a_placement_keeps_order_and_its_pieces_can_be_launched_one_by_one(
    seed: int, count: int, streams: int, wait: float
) -> None:
    tasks = random_tasks(seed, count)
    found = place(tasks, streams, wait)
    assert sorted(found.order) == list(range(count))
    assert set(found.streams) <= set(range(streams))
    at = {task: i for i, task in enumerate(found.order)}
    assert all(at[first] < at[i] for i, task in enumerate(tasks) for first in task.before)
    assert found.seconds >= bound(tasks) - 1e-9
    made = pieces(tasks, found)
    assert sorted(task for piece in made for task in piece) == list(range(count))
    assert all(len({found.streams[task] for task in piece}) == 1 for piece in made)
    # Launched in this order, a piece reads only what lies before it or in it, and nothing that
    # another stream waits for is held back by what follows it in its piece.
    of = {task: i for i, piece in enumerate(made) for task in piece}
    for i, task in enumerate(tasks):
        for first in task.before:
            assert of[first] <= of[i]
            if found.streams[first] != found.streams[i]:
                assert made[of[first]][-1] == first
    for piece in made:
        own = found.streams[piece[0]]
        waits = {f for task in piece[1:] for f in tasks[task].before if found.streams[f] != own}
        assert all(of[first] < of[piece[0]] for first in waits)


def test_two_equal_branches_go_to_two_streams() -> None:
    tasks = [Task(1, 0.1), Task(5, 0.1, (0,)), Task(5, 0.1, (0,)), Task(1, 0.1, (1, 2))]
    found = best(tasks, 8, 0.5, within=11)
    assert found is not None
    assert found.seconds == pytest.approx(8)  # two waits, where the branches part and meet
    assert found.streams[0] == 0
    assert found.streams[1] != found.streams[2]


@pytest.mark.parametrize(
    ("tasks", "why"),
    [
        ([Task(1, 0.1), Task(1, 0.1, (0,)), Task(1, 0.1, (1,))], "a chain"),
        ([Task(5, 5), Task(5, 5)], "each fills the device"),
        ([Task(1, 0.1), Task(1, 0.1)], "a wait takes longer than a branch"),
    ],
)
def test_one_stream_where_more_cannot_be_faster(tasks: list[Task], why: str) -> None:
    assert best(tasks, 8, 2.0, within=0.95 * serial(tasks)) is None, why
