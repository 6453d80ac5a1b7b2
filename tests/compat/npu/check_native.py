"""Plans over several streams of a device, walked in C++: what Python and C++ programs do on CUDA.

As in check_plans.py, an adversary delays what the plan leaves open, and freed memory is NaN.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from check_plans import Chains, there
from test_schedule import random_launches
from torch import Tensor

import torchgraft as graft
from torchgraft.compat import simulated
from torchgraft.native import executor
from torchgraft.package import codec
from torchgraft.plan import MAIN, Buffer, Launch, Plan, Wait
from torchgraft.stream.order import schedule

NOTE = "its plan is walked in C++"
OPS = {"sin": ("sin", ""), "sub": ("sub", "Tensor"), "up": ("add_", "Scalar")}


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHGRAFT_EXECUTOR", "native")


def linked(plan: Plan) -> Any:
    kernels = {
        name: {"kind": "op", "name": f"aten::{op}", "overload": overload}
        for name, (op, overload) in OPS.items()
    }
    text = json.dumps({"plan": codec.plan(plan), "kernels": kernels, "constants": {}})
    return executor.module().link(text, 0, [], [], {}, "npu:0")


def operators(launches: list[Launch]) -> tuple[list[Launch], list[tuple[Buffer, Buffer]]]:
    """The launches with operators of torch: one that writes gives what it has written to."""
    made, shared = [], []
    for launch in launches:
        [out] = launch.outputs
        assert out is not None
        first, *more = launch.args
        if launch.writes:
            shared.append((out, first))
            made.append(dataclasses.replace(launch, kernel="up", args=(first, 1)))
        elif more:
            made.append(dataclasses.replace(launch, kernel="sub", args=(first, more[0])))
        else:
            made.append(dataclasses.replace(launch, kernel="sin"))
    return made, shared


def sequential(launches: list[Launch], outputs: Any, args: list[Tensor]) -> list[Tensor]:
    values: dict[Any, Any] = {Buffer(0): args[0], Buffer(1): args[1]}
    for launch in launches:
        op = getattr(Tensor, {"up": "add_"}.get(launch.kernel, launch.kernel))
        values[launch.outputs[0]] = op(*(values.get(arg, arg) for arg in launch.args))
    return [values[b] for b in outputs]


@pytest.mark.parametrize("seed", range(25))
def test_every_interleaving_gives_the_sequential_result(seed: int) -> None:
    launches, outputs = random_launches(seed, 16, 2 + seed % 3)
    launches, shared = operators(launches)
    plan = schedule((Buffer(0), Buffer(1)), (), launches, outputs, shared=shared)
    run = linked(plan)
    theirs = [torch.arange(3.0).double(), torch.ones(3).double()]
    want = sequential(launches, outputs, [x.clone() for x in theirs])
    for adversary in range(4):
        with simulated.adversary(seed * 4 + adversary):
            got = run(there(theirs))
            torch.testing.assert_close([x.cpu() for x in got], want)


def test_a_plan_that_could_race_is_refused() -> None:
    x, y, z = map(Buffer, range(3))
    launches = [Launch("sin", (x,), (), (y,), stream="side"), Launch("sin", (y,), (), (z,))]
    whole = schedule((x,), (), launches, (z,))
    last = max(i for i, s in enumerate(whole.steps) if isinstance(s, Wait) and s.stream == MAIN)
    broken = dataclasses.replace(whole, steps=(*whole.steps[:last], *whole.steps[last + 1 :]))
    with pytest.raises(RuntimeError, match="nothing orders") as caught:
        linked(broken)
    assert "b1" in str(caught.value)


@pytest.fixture
def chains(tmp_path: Path) -> graft.Compiled:
    args = there([torch.randn(16, 16) for _ in range(2)])
    graft.compile(Chains(), tuple(args), mode="eager").save(tmp_path / "p")
    program = graft.load(tmp_path / "p")
    assert NOTE in program.report.notes
    assert program.plan.streams == [MAIN, "side"]
    return program


def test_calls_on_different_streams_do_not_share_memory_too_early(chains: graft.Compiled) -> None:
    args = [torch.randn(16, 16) for _ in range(2)]
    want, placed = Chains()(*args), there(args)
    callers = [torch.npu.Stream() for _ in range(3)]
    for seed in range(6):
        with simulated.adversary(seed):
            kept: list[Any] = []
            for number in range(9):
                with torch.npu.stream(callers[number % 3]):
                    kept.append(chains(*placed))
                    kept.append(chains(*placed)[0])  # its second output is freed at once
            torch.npu.synchronize()
            for got in kept:
                for one, other in zip(got if isinstance(got, tuple) else [got], want, strict=False):
                    torch.testing.assert_close(one.cpu(), other)


def test_many_threads_call_one_program(chains: graft.Compiled) -> None:
    args = [torch.randn(16, 16) for _ in range(2)]
    want, placed = Chains()(*args), there(args)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with torch.npu.stream(torch.npu.Stream()):
                for _ in range(10):
                    torch.testing.assert_close([x.cpu() for x in chains(*placed)], list(want))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_an_exception_leaves_no_stream_hanging() -> None:
    x, w, y, z = map(Buffer, range(4))
    launches = [Launch("sub", (x, w), (), (y,), stream="side"), Launch("sin", (y,), (), (z,))]
    run = linked(schedule((x, w), (), launches, (z,)))
    with pytest.raises(RuntimeError, match="size"):
        run(there([torch.ones(2), torch.ones(3)]))
    made = run(there([torch.ones(2), torch.zeros(2)]))[0]
    torch.testing.assert_close(made.cpu(), torch.ones(2).sin())


def test_a_program_of_the_second_device(tmp_path: Path) -> None:
    args = there([torch.randn(8, 8) for _ in range(2)])
    graft.compile(Chains(), tuple(args), mode="eager").save(tmp_path / "p")
    program = graft.load(tmp_path / "p", device="npu:1")
    fresh = [torch.randn(8, 8) for _ in range(2)]
    made = program(*(x.to("npu:1") for x in fresh))
    assert [x.device.index for x in made] == [1, 1]
    torch.testing.assert_close([x.cpu() for x in made], list(Chains()(*fresh)))
    assert torch.npu.current_device() == 0
