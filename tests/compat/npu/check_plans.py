"""Plans over several streams on a device whose streams really are asynchronous.

The executor is the one that CUDA gets. Under the adversary what the plan leaves open occurs, and
freed memory is filled with NaN: a missing wait, or memory that is used again too early, shows.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
from test_host import INPUTS, inputs, kernels_for, sequential
from test_schedule import random_launches
from torch import Tensor

import torchgraft as graft
from torchgraft import program
from torchgraft.compat import simulated
from torchgraft.plan import MAIN, Buffer, Launch, Plan, Wait
from torchgraft.run import streams
from torchgraft.run.host import Kernel
from torchgraft.stream import memory
from torchgraft.stream.order import schedule
from torchgraft.stream.prove import hazards


def there(args: list[Tensor]) -> list[Tensor]:
    made = [arg.npu() for arg in args]
    torch.npu.synchronize()
    return made


@pytest.mark.parametrize("seed", range(25))
def test_every_interleaving_gives_the_sequential_result(seed: int) -> None:
    launches, outputs = random_launches(seed, 16, 2 + seed % 3)
    run = streams.link_device(
        schedule(INPUTS, (), launches, outputs), kernels_for(launches), {}, "npu"
    )
    theirs = inputs()
    want = sequential(launches, outputs, theirs)
    for adversary in range(4):
        with simulated.adversary(seed * 4 + adversary):
            ours = there(inputs())
            got = run(list(ours))
            torch.testing.assert_close([x.cpu() for x in got], want)
            torch.testing.assert_close([x.cpu() for x in ours], theirs)


def test_a_wait_left_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests of this file can fail."""
    monkeypatch.setattr(streams, "prove", lambda plan: None)
    x, y, z = map(Buffer, range(3))
    launches = [Launch("up", (x,), (), (y,), stream="side"), Launch("up", (y,), (), (z,))]
    whole = schedule((x,), (), launches, (z,))
    last = max(i for i, s in enumerate(whole.steps) if isinstance(s, Wait) and s.stream == MAIN)
    steps = (*whole.steps[:last], *whole.steps[last + 1 :])
    broken = Plan(whole.inputs, whole.constants, steps, whole.outputs)
    assert hazards(broken)
    run = streams.link_device(broken, {"up": Kernel(lambda v: v + 1)}, {}, "npu")
    found = []
    for seed in range(12):
        with simulated.adversary(seed):
            found.append(run(there([torch.ones(64)]))[0].cpu().tolist() == [3.0] * 64)
        torch.npu.synchronize()
    assert not all(found)


class Chains(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with graft.stream("side"):
            for _ in range(3):
                x = (x @ x).tanh()
        for _ in range(3):
            y = (y @ y).tanh()
        return x + y, x * 2


@pytest.mark.parametrize("mode", ["eager", "default"])
@pytest.mark.filterwarnings("ignore:torchgraft")
def test_a_program_runs_on_streams_of_the_device(mode: str) -> None:
    args = [torch.randn(8, 8) for _ in range(2)]
    compiled = graft.compile(Chains(), tuple(there(args)), mode=mode)
    assert compiled.plan.streams == [MAIN, "side"]
    for seed in range(8):
        with simulated.adversary(seed):
            fresh = [torch.randn(8, 8) for _ in range(2)]
            got = compiled(*there(fresh))
            torch.testing.assert_close([x.cpu() for x in got], list(Chains()(*fresh)))


@pytest.mark.filterwarnings("ignore:torchgraft")
def test_calls_on_different_streams_do_not_share_memory_too_early() -> None:
    args = [torch.randn(16, 16) for _ in range(2)]
    want = Chains()(*args)
    placed = there(args)
    compiled = graft.compile(Chains(), tuple(placed), mode="eager")
    callers = [torch.npu.Stream() for _ in range(3)]
    for seed in range(6):
        with simulated.adversary(seed):
            kept: list[Any] = []
            for number in range(9):
                with torch.npu.stream(callers[number % 3]):
                    kept.append(compiled(*placed))
                    kept.append(compiled(*placed)[0])  # its second output is freed at once
            torch.npu.synchronize()
            for got in kept:
                for one, other in zip(got if isinstance(got, tuple) else [got], want, strict=False):
                    torch.testing.assert_close(one.cpu(), other)


@pytest.mark.filterwarnings("ignore:torchgraft")
def test_many_threads_call_one_program() -> None:
    args = [torch.randn(8, 8) for _ in range(2)]
    want = Chains()(*args)
    placed = there(args)
    compiled = graft.compile(Chains(), tuple(placed), mode="eager")
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with torch.npu.stream(torch.npu.Stream()):
                for _ in range(10):
                    torch.testing.assert_close([x.cpu() for x in compiled(*placed)], list(want))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_an_exception_leaves_no_stream_hanging() -> None:
    x, y, z = map(Buffer, range(3))
    launches = [Launch("bad", (x,), (), (y,), stream="side"), Launch("good", (y,), (), (z,))]
    fail = [True]

    def bad(value: Tensor) -> Tensor:
        if fail[0]:
            raise ValueError("on the side")
        return value + 1

    kernels = {"bad": Kernel(bad), "good": Kernel(lambda v: v * 2)}
    run = streams.link_device(schedule((x,), (), launches, (z,)), kernels, {}, "npu")
    with pytest.raises(ValueError, match="on the side"):
        run(there([torch.ones(1)]))
    fail[0] = False
    assert run(there([torch.ones(1)]))[0].item() == 4.0


def test_a_program_of_the_second_device_uses_its_streams() -> None:
    x, y, z = map(Buffer, range(3))
    launches = [Launch("up", (x,), (), (y,), stream="side"), Launch("up", (y,), (), (z,))]
    seen = []

    def up(value: Tensor) -> Tensor:
        seen.append(torch.npu.current_stream().device.index)
        return value + 1

    plan = schedule((x,), (), launches, (z,))
    run = streams.link_device(plan, {"up": Kernel(up)}, {}, "npu")
    assert run([torch.ones(2, device="npu:1")])[0].tolist() == [3, 3]
    assert run([torch.ones(2, device="npu:0")])[0].tolist() == [3, 3]
    assert seen == [1, 1, 0, 0]


def test_what_a_plan_keeps_is_what_the_device_allocates() -> None:
    """The executor frees as the plan says, and a plan within a limit stays within it."""
    size, tight = 1 << 16, 0
    for seed in range(20):
        launches, outputs = random_launches(seed, 24, 4)
        launches = [dataclasses.replace(step, writes=()) for step in launches]
        loose = schedule(INPUTS, (), launches, outputs)
        sizes = {step.outputs[0]: size for step in launches}
        alone = memory.peak(memory.alone(loose), sizes)
        lean, _ = memory.lean(loose, sizes, alone)
        tight += lean != loose
        for plan in (loose, lean, memory.alone(loose)):
            kernels = {step.kernel: Kernel(lambda *args: args[0] + 1) for step in launches}
            run = program.execute(plan, kernels, {}, "npu")
            args = there([torch.zeros(size // 4) for _ in INPUTS])
            torch.npu.reset_peak_memory_stats()
            before = torch.npu.memory_allocated()
            run(list(args))
            torch.npu.synchronize()
            assert torch.npu.max_memory_allocated() - before == memory.peak(plan, sizes)
    assert tight
