"""Plans on worker threads with an adversary: always the sequential result, never a hang."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule import random_launches

from torchgraft.errors import UnorderedUse
from torchgraft.plan import Buffer, Launch, Plan
from torchgraft.run.host import Kernel
from torchgraft.run.streams import link_host
from torchgraft.stream.order import schedule

INPUTS = (Buffer(0), Buffer(1))


def kernels_for(launches: list[Launch]) -> dict[str, Kernel]:
    """Each kernel mixes its arguments in its own way; one that writes does so in place."""

    def kernel(number: int, writes: bool) -> Any:
        def run(*args: torch.Tensor) -> torch.Tensor:
            total = sum(arg.double() for arg in args) * 0.5 + number
            if writes:
                args[0].add_(number + 1)
            return total

        return run

    return {
        launch.kernel: Kernel(kernel(i, bool(launch.writes))) for i, launch in enumerate(launches)
    }


def sequential(launches: list[Launch], outputs: Any, args: list[torch.Tensor]) -> list[Any]:
    kernels = kernels_for(launches)
    values = dict(zip(INPUTS, args, strict=True))
    for launch in launches:
        values[launch.outputs[0]] = kernels[launch.kernel].fn(*(values[b] for b in launch.args))
    return [values[b] for b in outputs]


def inputs() -> list[torch.Tensor]:
    return [torch.arange(3.0).double(), torch.ones(3).double()]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(2, 4), st.integers(0, 100))
def test_every_interleaving_gives_the_sequential_result(
    seed: int, count: int, streams: int, adversary: int
) -> None:
    launches, outputs = random_launches(seed, count, streams)
    plan = schedule(INPUTS, (), launches, outputs)
    run = link_host(plan, kernels_for(launches), {}, adversary=adversary)
    ours, theirs = inputs(), inputs()
    got = run(list(ours))
    torch.testing.assert_close(got, sequential(launches, outputs, theirs))
    torch.testing.assert_close(ours, theirs)


def test_many_callers_share_the_streams() -> None:
    launches, outputs = random_launches(7, 20, 4)
    # Written inputs belong to one caller; without writes all may share the plan at once.
    launches = [Launch(s.kernel, s.args, (), s.outputs, stream=s.stream) for s in launches]
    run = link_host(schedule(INPUTS, (), launches, outputs), kernels_for(launches), {})
    want = sequential(launches, outputs, inputs())
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                torch.testing.assert_close(run(inputs()), want)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)


def test_an_exception_on_a_side_stream_reaches_the_caller_and_leaves_nothing_hanging() -> None:
    def bad(*args: Any) -> Any:
        raise ValueError("on the side")

    x, y, z = map(Buffer, range(3))
    launches = [Launch("bad", (x,), (), (y,), stream="side"), Launch("good", (y,), (), (z,))]
    plan = schedule((x,), (), launches, (z,))
    fail = [True]
    kernels = {
        "bad": Kernel(lambda v: bad() if fail[0] else v + 1),
        "good": Kernel(lambda v: v * 2),
    }
    run = link_host(plan, kernels, {})
    with pytest.raises(ValueError, match="on the side"):
        run([torch.ones(1)])
    fail[0] = False
    assert run([torch.ones(1)])[0].item() == 4.0


def test_what_a_call_gave_goes_when_its_caller_lets_go() -> None:
    x, y, z = map(Buffer, range(3))
    launches = [Launch("k", (x,), (), (y,), stream="side"), Launch("k", (y,), (), (z,))]
    run = link_host(schedule((x,), (), launches, (y, z)), {"k": Kernel(torch.sin)}, {})
    made = [weakref.ref(one) for one in run([torch.ones(3)])]
    end = time.monotonic() + 60  # the stream's thread is about to let go, too
    while any(one() is not None for one in made) and time.monotonic() < end:
        time.sleep(0.01)
    assert [one() for one in made] == [None, None]


def test_a_plan_that_races_does_not_run() -> None:
    plan = Plan.parse(
        "def plan(b0):\n"
        "    record('main', 'entry')\n"
        "    wait('side', 'entry')\n"
        "    b1 = launch('side', 'k', b0)\n"
        "    b2 = launch('main', 'k', b1)\n"
        "    return (b2,)"
    )
    with pytest.raises(UnorderedUse) as caught:
        link_host(plan, {"k": Kernel(torch.sin)}, {})
    assert str(caught.value).startswith(
        "read after write of b1: nothing orders\n"
        "  b2 = launch('main', 'k', b1)\n"
        "after\n"
        "  b1 = launch('side', 'k', b0)\n"
    )
