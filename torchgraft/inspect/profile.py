"""`compiled.profile(inputs)`: how long each launch of a program took, on which stream, and when."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from torchgraft import progress
from torchgraft.comm.call import bind
from torchgraft.comm.capture import refusal
from torchgraft.fx.cost import Cost, Machine, bytes_of, main_dtype, measure
from torchgraft.fx.dialect import is_view
from torchgraft.inspect import trace
from torchgraft.inspect.cost import costs
from torchgraft.inspect.timeline import Timeline, measured
from torchgraft.plan import Buffer, Launch, PlanStep
from torchgraft.program import Program, execute, written
from torchgraft.report import Report
from torchgraft.run import cuda, host

WARM_UP = 2
"""Calls before the first one that counts."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch of the plan. `share` is its part of the roofline: 1 is as fast as can be."""

    name: str
    stream: str
    seconds: float  # the median
    cost: Cost
    share: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """What was measured. `print(profile)` is a table; `save` writes a trace for Perfetto."""

    name: str
    device: str
    machine: Machine
    kernels: tuple[Kernel, ...]
    calls: tuple[Timeline, ...]
    """Each call on its own time axis."""
    seconds: float
    """The median of a whole call as a user makes it: nothing inside is timed then."""
    captured: bool = False
    """Whether launches were timed inside one CUDA graph, so that none has to wait for the host."""

    @property
    def timeline(self) -> Timeline:
        """The call in the middle, by its length."""
        return sorted(self.calls, key=lambda call: call.seconds)[len(self.calls) // 2]

    @property
    def hidden(self) -> float | None:
        """The share of the time of collectives in which something else ran; None without any."""
        return self.timeline.hidden

    @property
    def trace(self) -> dict[str, Any]:
        """Chrome trace events of every call: a track a stream, an arrow a wait."""
        made = trace.Trace()
        process = f"{self.name} ({self.device})"
        offset = 0.0
        for number, call in enumerate(self.calls):
            args = [
                {
                    "call": number,
                    "bytes": k.cost.bytes,
                    "flops": k.cost.flops,
                    "nodes": k.cost.nodes,
                }
                for k in self.kernels
            ]
            trace.add_timeline(made, process, call, args, offset)
            offset += call.seconds * 1.1
        return made.data()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace: open it at ui.perfetto.dev or chrome://tracing."""
        trace.write(path, self.trace)

    def tensorboard(self, folder: str | os.PathLike[str], worker: str | None = None) -> str:
        """Write the trace under a name that TensorBoard's profiler finds; the path."""
        path = pathlib.Path(folder) / trace.tensorboard_name(worker)
        trace.write(path, self.trace)
        return str(path)

    def __str__(self) -> str:
        total = sum(kernel.seconds for kernel in self.kernels)
        lines = [
            f"{self.name} on {self.device}: {self.seconds * 1e6:.1f} us a call, "
            f"{len(self.kernels)} launches, {total * 1e6:.1f} us in them",
            f"peak: {self.machine.bandwidth / 1e9:.1f} GB/s, "
            f"{self.machine.flops / 1e9:.1f} GFLOP/s",
            *(["timed inside one CUDA graph"] if self.captured else []),
            *([] if self.hidden is None else [f"collectives: {self.hidden:.0%} hidden by others"]),
            f"{'us':>10} {'part':>6} {'MB':>9} {'MFLOP':>9} {'roofline':>8}  {'stream':8} kernel",
        ]
        same: dict[tuple[str, str], list[Kernel]] = {}
        for kernel in self.kernels:
            same.setdefault((kernel.stream, kernel.name), []).append(kernel)
        rows = [(sum(k.seconds for k in group), key, group) for key, group in same.items()]
        for took, (stream, name), group in sorted(rows, key=lambda row: -row[0]):
            moved = sum(k.cost.bytes for k in group)
            flops = sum(k.cost.flops for k in group)
            least = sum(k.share * k.seconds for k in group)
            lines.append(
                f"{took * 1e6:10.1f} {took / (total or 1):6.1%} {moved / 1e6:9.3f} "
                f"{flops / 1e6:9.3f} {least / (took or 1):8.1%}  {stream:8} {len(group)} x {name}"
            )
        return "\n".join(lines)


def profile(
    program: Program, inputs: Sequence[Any], call: Callable[[], object], repeat: int = 10
) -> Profile:
    """Measure a program on the values of its graph's inputs.

    Inputs that the program writes are given as copies.
    """
    device = torch.device(program.report.device)
    run = Stopwatch(program, capture=True)
    calls: list[Timeline] = []
    with torch.no_grad():
        for number in progress.each("call", range(repeat + WARM_UP)):
            given = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
            _, timeline = run(given)
            if number >= WARM_UP:
                calls.append(timeline)
    values = [node.meta.get("val") for node in program.gm.graph.nodes]
    machine = measure(device, main_dtype(values))
    kernels = []
    for i, (launch, cost) in enumerate(zip(program.plan.launches, costs(program), strict=True)):
        took = statistics.median(c.spans[i].end - c.spans[i].start for c in calls)
        share = min(machine.seconds(cost) / took, 1.0) if took else 0.0
        kernels.append(Kernel(launch.kernel, launch.stream, took, cost, share))
    whole = statistics.median(_timed(call, device) for _ in range(repeat))
    report = program.report
    program.profile = Profile(
        report.name, report.device, machine, tuple(kernels), tuple(calls), whole, run.captured
    )
    return program.profile


class Stopwatch:
    """Runs a program's plan launch by launch with a clock around each: on the host the thread's, on
    a device events of the launch's stream. One call at a time.

    With `capture` the launches and their events are one CUDA graph where that can be, whatever the
    mode of the program: short kernels are over before the host has launched the next one, which
    would count as their time.
    """

    def __init__(self, program: Program, *, capture: bool = False) -> None:
        device = torch.device(program.report.device)
        self.clock: Clock = HostClock() if device.type == "cpu" else DeviceClock(device)
        self._plan, self._sizes = program.plan, buffer_sizes(program)
        self._notes = Report("", "", "")
        instrumented = _instrumented(program, self.clock)

        def run(inputs: list[Any]) -> Any:
            self.clock.begin()
            return instrumented(inputs)

        self._run: Callable[[list[Any]], Any] = run
        self._capture = capture and device.type == "cuda"
        if self._capture:
            self._run = cuda.Captured(
                run,
                report=self._notes,
                written=written(program.gm),
                alias_outputs=True,
                refusal=lambda: refusal(program.plan),
                collective=bool(program.plan.collectives),
            )

    def __call__(self, inputs: list[Any]) -> tuple[Any, Timeline]:
        """The outputs, and when each launch ran."""
        result = self._run(inputs)
        return result, measured(self._plan, self.clock.times(), self._sizes)

    @property
    def captured(self) -> bool:
        """Whether it measures inside a CUDA graph; known after the first call."""
        return self._capture and not any("not captured" in note for note in self._notes.notes)


def buffer_sizes(program: Program) -> dict[Buffer, int]:
    """The memory of each buffer; a view has none of its own."""
    return {
        buffer: 0 if is_view(node) else bytes_of(node.meta.get("val"))
        for node, buffer in program.linker.numbers.items()
    }


def _timed(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter() - start


def _instrumented(program: Program, clock: Clock) -> Any:
    """The program's plan, linked over kernels that are timed: each launch gets one of its own."""
    plan, bound, guarded = bind(program.plan, program.linker.kernels)
    kernels: dict[str, host.Kernel] = {}
    steps: list[PlanStep] = []
    for step in plan.steps:
        if isinstance(step, Launch):
            kernel, number = bound[step.kernel], len(kernels)
            kernels[str(number)] = host.Kernel(clock.around(kernel.fn, number), kernel.boxed)
            step = dataclasses.replace(step, kernel=str(number))
        steps.append(step)
    plan = dataclasses.replace(plan, steps=tuple(steps))
    return guarded(execute(plan, kernels, program.linker.constants, program.report.device))


class Clock(Protocol):
    """Measures the launches of one call at a time."""

    def begin(self) -> None: ...
    def around(self, fn: Callable[..., Any], number: int) -> Callable[..., Any]: ...
    def times(self) -> list[tuple[float, float]]: ...


class HostClock:
    """Launches by the clock of the thread that runs them."""

    def begin(self) -> None:
        self._spans: dict[int, tuple[float, float]] = {}
        self.start = time.perf_counter()

    def around(self, fn: Callable[..., Any], number: int) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = fn(*args, **kwargs)
            self._spans[number] = (start - self.start, time.perf_counter() - self.start)
            return result

        return timed

    def times(self) -> list[tuple[float, float]]:
        return [span for _, span in sorted(self._spans.items())]


class DeviceClock:
    """Launches by events on the stream that they are enqueued on."""

    def __init__(self, device: torch.device) -> None:
        self._api: Any = torch.get_device_module(device)

    def begin(self) -> None:
        if self._api is not torch.cuda or not torch.cuda.is_current_stream_capturing():
            self._api.synchronize()
        self._events: dict[int, tuple[Any, Any]] = {}
        self._start = self._event()

    def _event(self) -> Any:
        """Now, on the current stream. Inside a CUDA graph every replay records it again."""
        external = {"external": True} if self._api is torch.cuda else {}
        event = self._api.Event(enable_timing=True, **external)
        event.record()
        return event

    def around(self, fn: Callable[..., Any], number: int) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self._event()
            result = fn(*args, **kwargs)
            self._events[number] = (start, self._event())
            return result

        return timed

    def times(self) -> list[tuple[float, float]]:
        self._api.synchronize()
        return [
            (self._start.elapsed_time(start) / 1e3, self._start.elapsed_time(end) / 1e3)
            for _, (start, end) in sorted(self._events.items())
        ]
