"""Timelines of plans, profiles of programs, and traces that viewers can read."""

from __future__ import annotations

import itertools
import json
import pathlib
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from perfetto import Imported, imported
from samples import compiled
from torch import Tensor

import torchgraft as graft
from torchgraft.inspect import trace
from torchgraft.inspect.cost import costs
from torchgraft.inspect.timeline import Arrow, Span, Timeline, measured, predict
from torchgraft.plan import Buffer, Plan

FORK = Plan.parse("""\
def plan(b0):
    record('main', 'entry')
    b1 = launch('main', 'long', b0)
    wait('side', 'entry')
    b2 = launch('side', 'short', b0)
    b3 = launch('side', 'next', b2)
    free('side', b2)
    record('side', 'done')
    wait('main', 'done')
    b4 = launch('main', 'join', b1, b3)
    free('main', b1)
    free('main', b3)
    return (b4,)""")
SIZES = {Buffer(i): 10**i for i in range(5)}


def test_a_prediction_waits_only_where_the_plan_does() -> None:
    line = predict(FORK, [5.0, 1.0, 2.0, 1.0], SIZES)
    assert [(s.kernel, s.stream, s.start, s.end) for s in line.spans] == [
        ("long", "main", 0.0, 5.0),
        ("short", "side", 0.0, 1.0),
        ("next", "side", 1.0, 3.0),
        ("join", "main", 5.0, 6.0),
    ]
    assert line.arrows == (Arrow("done", 2, 3),)
    assert [s.kernel for s in line.spans if s.critical] == ["long", "join"]
    assert line.seconds == 6.0
    # b1 and b2 from the start, b3 from 1 on, b2 is freed at 3, b4 comes at 5, then b1 and b3 go.
    assert line.memory == ((0.0, 110), (1.0, 1110), (3.0, 1010), (5.0, 11010), (6.0, 10000))


def test_the_critical_path_may_cross_streams() -> None:
    line = predict(FORK, [1.0, 2.0, 2.0, 1.0], SIZES)
    assert [s.kernel for s in line.spans if s.critical] == ["short", "next", "join"]
    taken = measured(FORK, [(0.0, 1.0), (0.5, 2.5), (2.5, 4.0), (4.5, 5.0)], SIZES)
    assert [s.kernel for s in taken.spans if s.critical] == ["short", "next", "join"]
    assert taken.seconds == 5.0


# --- The trace-event format: the fields of its document, and what Perfetto makes of them ---

COMMON = {"ph": str, "pid": int, "tid": int, "name": str}
FIELDS: dict[str, dict[str, Any]] = {
    "M": {"args": dict},
    "X": {"ts": float, "dur": float, "cat": str, "args": dict},
    "s": {"ts": float, "id": int, "cat": str},
    "f": {"ts": float, "id": int, "cat": str, "bp": str},
    "C": {"ts": float, "args": dict},
}


def check_trace(data: dict[str, Any]) -> Imported:
    """What Perfetto shows of a trace; raise unless every event has its fields, every track and
    process a name, and nothing of it is dropped."""
    data = json.loads(json.dumps(data, allow_nan=False))
    assert set(data) == {"traceEvents", "displayTimeUnit"}
    assert data["displayTimeUnit"] in ("ms", "ns")
    for event in data["traceEvents"]:
        wanted = {**COMMON, **FIELDS[event["ph"]]}
        assert set(event) == set(wanted), event
        for name, kind in wanted.items():
            assert isinstance(event[name], (int, float) if kind is float else kind), event
        assert event.get("ts", 0) >= 0
        assert event.get("bp", "e") == "e"
    found = imported(data)
    assert found.problems == []
    assert {one.track for one in found.slices} == found.tracks.keys()
    assert {pid for pid, _ in found.tracks} == found.processes.keys()
    return found


def test_a_plan_with_two_streams_is_a_valid_trace() -> None:
    made = trace.Trace()
    line = predict(FORK, [5.0, 1.0, 2.0, 1.0], SIZES)
    trace.add_timeline(made, "program", line, [{} for _ in line.spans])
    found = check_trace(made.data())
    assert found.processes == {1: "program"}
    assert list(found.tracks.values()) == ["stream main", "stream side"]
    assert [one.name for one in found.slices] == ["long", "short", "next", "join"]
    assert [(one.name, two.name) for one, two in found.flows] == [("next", "join")]
    assert [size for _, size in found.counters["memory memory"]] == [110, 1110, 1010, 11010, 10000]


def test_slices_that_touch_are_not_dropped() -> None:
    """A clock counts in whole nanoseconds, which is where a cut goes either way."""
    ticks = list(itertools.accumulate(random.Random(0).choices(range(10**5), k=5001)))
    spans = [
        Span(i, "kernel", "main", start * 1e-9, end * 1e-9)
        for i, (start, end) in enumerate(itertools.pairwise(ticks))
    ]
    made = trace.Trace()
    trace.add_timeline(made, "program", Timeline(tuple(spans), (), ()), [{}] * len(spans))
    assert len(check_trace(made.data()).slices) == len(spans)


def spoiled(change: Callable[[list[dict[str, Any]]], object]) -> dict[str, Any]:
    made = trace.Trace()
    line = predict(FORK, [5.0, 1.0, 2.0, 1.0], SIZES)
    trace.add_timeline(made, "program", line, [{} for _ in line.spans])
    data = made.data()
    change(data["traceEvents"])
    return data


@pytest.mark.parametrize(
    "change",
    [
        lambda events: events[-1].pop("ts"),
        lambda events: next(e for e in events if e["ph"] == "f").update(id=99),
        lambda events: next(e for e in events if e["ph"] == "s").update(ts=1e9),
        lambda events: next(e for e in events if e["ph"] == "X").update(dur=5.5e6),
        lambda events: next(e for e in events if e["ph"] == "f").update(tid=9),
        lambda events: next(e for e in events if e["ph"] == "X").update(dur=-1.0),
    ],
)
def test_the_check_of_a_trace_can_fail(change: Callable[[list[dict[str, Any]]], object]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        check_trace(spoiled(change))


# --- Profiles ---


def test_a_profile_measures_every_launch(tmp_path: pathlib.Path) -> None:
    program, x = compiled(), torch.ones(3, 4)
    profile = program.profile((x,), repeat=3)
    launches = program.plan.launches
    assert [kernel.name for kernel in profile.kernels] == [launch.kernel for launch in launches]
    assert len(profile.calls) == 3
    assert all(kernel.seconds > 0 for kernel in profile.kernels)
    assert sum(k.seconds for k in profile.kernels) > 0
    assert profile.seconds > 0
    check_trace(profile.trace)
    slices = [event for event in profile.trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == 3 * len(launches)
    profile.save(tmp_path / "deep" / "trace.json")
    check_trace(json.loads((tmp_path / "deep" / "trace.json").read_text()))
    path = pathlib.Path(profile.tensorboard(tmp_path / "board", worker="me"))
    assert re.fullmatch(r"me\.\d+\.pt\.trace\.json", path.name)
    check_trace(json.loads(path.read_text()))


def test_a_profile_of_two_streams_has_a_track_each_and_bound_arrows() -> None:
    def model(x: Tensor) -> Tensor:
        with graft.stream("side"):
            left = torch.relu(x @ x)
        return left + torch.tanh(x)

    program = graft.compile(model, (torch.ones(8, 8),), mode="eager")
    profile = program.profile((torch.ones(8, 8),), repeat=3)
    found = check_trace(profile.trace)
    assert set(found.tracks.values()) == {"stream main", "stream side"}
    assert len(found.slices) == 3 * len(program.plan.launches)
    arrows = [
        (call.spans[a.before], call.spans[a.after]) for call in profile.calls for a in call.arrows
    ]
    assert len(arrows) >= 3
    drawn = sorted((one.name, two.name) for one, two in found.flows)
    assert drawn == sorted((one.kernel, two.kernel) for one, two in arrows)
    assert all(found.tracks[one.track] != found.tracks[two.track] for one, two in found.flows)


def test_the_table_adds_equal_kernels_up() -> None:
    program = compiled()
    lines = str(program.profile((torch.ones(3, 4),), repeat=2)).splitlines()
    assert lines[0].startswith("Stack on cpu: ")
    [row] = [line for line in lines if line.endswith("4 x aten.addmm.default")]
    assert row.split()[-4] == "main"


def test_a_profile_writes_no_inputs() -> None:
    def model(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    x = torch.zeros(3)
    program = graft.compile(model, (x,), mode="eager")
    program.profile((x,), repeat=2)
    assert x.tolist() == [0, 0, 0]
    with pytest.raises(graft.GraftError, match="declared size 3"):
        program.profile((torch.zeros(4),))


@pytest.mark.slow
def test_generated_code_is_profiled_by_region() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).relu()

    x = torch.randn(64, 32).t()  # other strides than declared are adapted, as a call does
    program = graft.compile(model, (torch.ones(32, 64), torch.ones(64, 16)))
    profile = program.profile((x, torch.ones(64, 16)), repeat=2)
    [kernel] = profile.kernels
    assert kernel.name == "region0"
    assert kernel.cost.flops == 2 * 32 * 64 * 16 + 32 * 16
    assert kernel.cost.bytes == 4 * (32 * 64 + 64 * 16 + 32 * 16)
    assert set(kernel.cost.nodes) == {"mm", "relu"}


@pytest.mark.slow
def test_weights_inside_generated_code_are_read() -> None:
    program = graft.compile(torch.nn.Linear(64, 32).eval(), (torch.ones(2, 64),))
    [owner] = program._programs
    [cost] = costs(owner)
    assert cost.bytes == 4 * (64 * 32 + 32 + 2 * 64 + 2 * 32)


def test_costs_follow_from_shapes() -> None:
    def model(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state.copy_(x)
        parts = x.view(6, 2).split(3)
        return parts[1] * 2, x.sum()

    program = graft.compile(model, (torch.ones(3, 4), torch.ones(3, 4)), mode="eager")
    [owner] = program._programs
    found = {cost.nodes[0]: cost for cost in costs(owner) if cost.nodes}
    assert len(found) == len(owner.plan.launches)
    assert found["mul"].flops == 6
    assert found["sum_1"].flops == 12
    assert found["sum_1"].bytes == 4 * 13
    views = [cost for name, cost in found.items() if "view" in name or "reshape" in name]
    assert all(cost.bytes == cost.flops == 0 for cost in views)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["eager", "default", "reduce-overhead"])
def test_cuda_launches_are_timed_on_their_streams(mode: str, tmp_path: pathlib.Path) -> None:
    def model(x: Tensor) -> Tensor:
        with graft.stream("side"):
            left = torch.relu(x @ x)
        return left + torch.tanh(x @ x.T)

    x = torch.randn(2048, 2048, device="cuda")
    program = graft.compile(model, (x,), mode=mode)
    profile = program.profile((x,), repeat=5)
    print(profile)  # seen where it fails
    assert (profile.device, profile.captured) == ("cuda", True)
    assert [k.name for k in profile.kernels] == [step.kernel for step in program.plan.launches]
    assert {kernel.stream for kernel in profile.kernels} == {"main", "side"}
    found = check_trace(profile.trace)
    assert set(found.tracks.values()) == {"stream main", "stream side"}
    assert len(found.slices) == 5 * len(program.plan.launches)
    products = [kernel for kernel in profile.kernels if kernel.cost.flops >= 2 * 2048**3]
    assert len(products) == 2
    assert all(0.1 < kernel.share <= 1 for kernel in products)
    assert sum(k.seconds for k in products) > 0.5 * sum(k.seconds for k in profile.kernels)
    for call in profile.calls:
        assert call.seconds > 0
        for arrow in call.arrows:  # a wait is seen: what comes after begins after
            assert call.spans[arrow.before].end <= call.spans[arrow.after].start + 5e-6
    program.report.html(tmp_path / "report.html")
    torch.testing.assert_close(program(x), model(x), rtol=1e-3, atol=1e-2)


@pytest.mark.cuda
def test_short_cuda_kernels_do_not_count_the_host() -> None:
    """A row of small calls is bound by their launches; a kernel's time is its own."""

    def model(x: Tensor) -> Tensor:
        for _ in range(50):
            x = torch.sin(x)
        return x

    x = torch.randn(64, device="cuda")
    profile = graft.compile(model, (x,), mode="eager").profile((x,))
    assert len(profile.kernels) == 50
    assert profile.captured
    assert sum(kernel.seconds for kernel in profile.kernels) < profile.seconds


@pytest.mark.cuda
def test_what_cannot_be_captured_is_timed_launch_by_launch() -> None:
    x = torch.randn(64, device="cuda")
    program = graft.compile(lambda x: x[x > 0] * 2, (x,), mode="eager")
    profile = program.profile((x,), repeat=2)
    assert not profile.captured
    assert all(kernel.seconds > 0 for kernel in profile.kernels)
