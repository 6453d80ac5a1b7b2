"""Timings of several peers on one model: a process each, interleaved rounds, answers checked.

Each peer lives in its own process, so that one peer's caches, threads and crashes are not
another's. The parent asks them for one sample in turn; load then falls on all of them alike.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import models, peers


@dataclass(frozen=True)
class Sample:
    """Microseconds a call. `device` is between two CUDA events, no synchronisation inside."""

    wall: float
    cpu: float
    device: float | None = None


@dataclass
class Timing:
    """What one peer did on one model. Only `status == "ok"` has a right answer."""

    model: str
    peer: str
    status: str  # ok | WRONG | skipped | failed
    note: str = ""
    error: float | None = None
    build_s: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # plan, memory and floor, of ours
    samples: list[Sample] = field(default_factory=list)

    def series(self, kind: str) -> list[float]:
        values = (getattr(sample, kind) for sample in self.samples)
        return sorted(value for value in values if value is not None)

    def median(self, kind: str) -> float | None:
        series = self.series(kind)
        return statistics.median(series) if series else None

    def p20(self, kind: str) -> float | None:
        series = self.series(kind)
        return series[int(0.2 * (len(series) - 1))] if series else None

    def spread(self, kind: str) -> float | None:
        """Between the 20th and the 80th percentile, over the median."""
        series = self.series(kind)
        if not series:
            return None
        last = len(series) - 1
        return (series[int(0.8 * last)] - series[int(0.2 * last)]) / statistics.median(series)

    def as_json(self) -> dict[str, Any]:
        kinds = ("wall", "cpu", "device")
        summary = {
            kind: {"median": self.median(kind), "p20": self.p20(kind), "spread": self.spread(kind)}
            for kind in kinds
        }
        return asdict(self) | {"summary": summary}


@dataclass(frozen=True)
class Setup:
    """How to measure: where, for how long, how patient."""

    device: str = "cpu"
    dtype: str = "float32"
    seconds: float = 3.0  # of timing, for each peer on each model
    sample_ms: float = 20.0
    patience: float = 600.0  # seconds a peer may take to build


def _tensors(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, Sequence) else [outputs]


def error(outputs: Any, reference: Sequence[Tensor]) -> float:
    """The worst output's ‖y - ref‖ over the norm of ref's variation; inf when shapes differ.

    Against the variation, not the values: a constant answer near a large mean is not nearly right.
    One wrong element of typical size among n shows as 1/√n.
    """
    found = _tensors(outputs)
    if [tuple(t.shape) for t in found] != [tuple(t.shape) for t in reference]:
        return math.inf
    worst = 0.0
    for y, ref in zip(found, reference, strict=True):
        y = y.detach().to("cpu", torch.float64)
        around = ref - ref.mean() if ref.numel() > 1 else ref
        off = ((y - ref).norm() / around.norm().clamp_min(1e-30)).item()
        worst = max(worst, off) if math.isfinite(off) else math.inf
    return worst


def _write_reference(case: models.Case, device: str, path: Path) -> None:
    """Eager in float64, on two sets of inputs: a stale or folded answer fits only one of them."""
    exact = models.Case(copy.deepcopy(case.model), case.make).to(device, torch.float64)
    with torch.inference_mode():
        answers = [
            [t.to("cpu", torch.float64) for t in _tensors(exact.model(*exact.make(seed)))]
            for seed in (0, 1)
        ]
    torch.save(answers, path)


# ---------------------------------------------------------------- in the worker


def _sync(device: str) -> Callable[[], None]:
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def _calls(run: peers.Run, args: models.Args, device: str, sample_ms: float) -> int:
    """How many calls last a sample, after warming up."""
    sync, calls = _sync(device), 1
    while True:
        start = time.perf_counter()
        for _ in range(calls):
            run(args)
        sync()
        took = (time.perf_counter() - start) * 1e3
        if took >= sample_ms / 2:
            return max(1, round(calls * sample_ms / took))
        calls *= 2


def _sample(run: peers.Run, args: models.Args, device: str, calls: int) -> Sample:
    sync = _sync(device)
    for _ in range(max(2, calls // 10)):  # the last peer left the caches to itself
        run(args)
    sync()
    cpu, wall = time.process_time(), time.perf_counter()
    if device == "cuda":
        for _ in range(calls):
            run(args)
            sync()
    else:
        for _ in range(calls):
            run(args)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    if device != "cuda":
        return Sample(wall / calls * 1e6, cpu / calls * 1e6)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(calls):
        run(args)
    last.record()
    sync()
    between = first.elapsed_time(last) / calls * 1e3
    return Sample(wall / calls * 1e6, cpu / calls * 1e6, between)


def _work(link: Connection, model: str, peer: str, setup: Setup, scratch: Path) -> None:
    log = os.open(scratch / f"{peer}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)  # autotuning and exporters talk; the table should not
    faulthandler.enable()
    torch.set_num_threads(1)
    try:
        case = models.build(model).to(setup.device, getattr(torch, setup.dtype))
        tuples = case.make(0), case.make(1)
        start = time.perf_counter()
        with torch.no_grad():
            run = peers.PEERS[peer].build(case, scratch)
        with torch.inference_mode():
            run(tuples[0])
            _sync(setup.device)()
            build_s = time.perf_counter() - start
            reference = torch.load(scratch / "reference.pt")
            # 1, 0, 1: a call must neither keep nor spoil anything for the next.
            off = max(error(run(tuples[seed]), reference[seed]) for seed in (1, 0, 1))
            calls = _calls(run, tuples[0], setup.device, setup.sample_ms)
            peak = torch.cuda.max_memory_allocated() if setup.device == "cuda" else None
            facts = {} if not hasattr(run, "facts") else run.facts()
            if peak is not None:
                facts["peak MiB"] = round(peak / 2**20)
            link.send(("ready", off, build_s, facts))
            while link.recv():
                link.send(_sample(run, tuples[0], setup.device, calls))
    except peers.Skip as reason:
        link.send(("skipped", str(reason), 0.0))
    except (EOFError, KeyboardInterrupt):
        pass
    except Exception as failure:  # whatever it is, it is this peer's result
        link.send(("failed", first_line(failure), 0.0))


def first_line(failure: BaseException) -> str:
    """The error in one line of a table."""
    text = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {text[0] if text else ''}"[:200]


# ---------------------------------------------------------------- in the parent


def start_method(device: str) -> Any:
    """The context to start workers with: a fork shares weights and imports, but not CUDA."""
    spawn = device == "cuda" or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return multiprocessing.get_context("spawn" if spawn else "fork")


class _Worker:
    """A peer's process, as the parent sees it: `start`, then `sample` until `stop`."""

    def __init__(self, model: str, peer: str, setup: Setup, scratch: Path) -> None:
        self.timing = Timing(model, peer, "failed")
        self.setup, self.log = setup, scratch / f"{peer}.log"
        context = start_method(setup.device)
        self.link, far = context.Pipe()
        arguments = (far, model, peer, setup, scratch)
        self.process = context.Process(target=_work, args=arguments)
        self.process.start()
        self.began = time.monotonic()
        far.close()

    def _answer(self, patience: float) -> Any:
        if not self.link.poll(patience):
            raise TimeoutError(f"no answer in {self.setup.patience:.0f} s")
        try:
            return self.link.recv()
        except EOFError:
            self.process.join(5)
            note = f"process ended, exit code {self.process.exitcode}{self._crash()}"
            raise RuntimeError(note) from None

    def _crash(self) -> str:
        """Where faulthandler saw it crash, if it did."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        current = text.partition("Current thread")[2].splitlines()
        return next((f", at {line.strip()}" for line in current if line.startswith("  File ")), "")

    def start(self) -> None:
        left = self.began + self.setup.patience - time.monotonic()
        try:
            status, detail, build_s, *facts = self._answer(max(0.0, left))
        except (TimeoutError, RuntimeError) as failure:
            self.timing.note = str(failure)
            self.process.kill()  # or it would go on beside those that are timed
            return
        if status == "ready":
            self.timing.status, self.timing.error, self.timing.build_s = "ok", detail, build_s
            self.timing.facts = facts[0]
        else:
            self.timing.status, self.timing.note = status, detail

    def sample(self) -> None:
        try:
            self.link.send(True)
            self.timing.samples.append(self._answer(self.setup.patience))
        except (TimeoutError, RuntimeError, BrokenPipeError) as failure:
            self.timing.status, self.timing.note = "failed", str(failure)

    def stop(self) -> None:
        self.link.close()
        self.process.join(2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class _Race:
    """One model and its peers; eager always runs, its error being the measure of the others'."""

    def __init__(self, model: str, chosen: Iterable[str], setup: Setup, scratch: Path) -> None:
        self.model, self.setup, self.scratch = model, setup, scratch
        self.order = list(dict.fromkeys(["eager", *chosen]))
        self.workers: list[_Worker] = []
        case = models.build(model)
        self.tolerance = case.tolerance
        _write_reference(case, setup.device, scratch / "reference.pt")

    def enter(self) -> Iterator[_Worker]:
        """Start the peers' processes; each begins to build at once."""
        for peer in self.order:
            self.workers.append(_Worker(self.model, peer, self.setup, self.scratch))
            yield self.workers[-1]

    def run(self) -> list[Timing]:
        timings = [worker.timing for worker in self.workers]
        _judge(timings, self.tolerance)
        _rounds(self.workers, self.setup)
        return timings

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()


def measure(
    names: Iterable[str],
    chosen: Sequence[str],
    setup: Setup,
    tell: Callable[[Timing], object] = lambda timing: None,
    together: bool = False,
) -> Iterator[list[Timing]]:
    """Timings of the chosen peers, model by model, in the order asked for.

    A peer is right when its error is within the case's tolerance, or within four times eager's own
    error at this precision. A wrong one is timed too, and marked WRONG. `tell` hears of each
    peer once it is built, which can take minutes. Peers are built one after the other, since two
    builds at once would slow each other; `together`, those of all models at once, which is
    quicker with many processors and says nothing about the time of a build.
    """
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:

        def race(name: str) -> _Race:
            folder = tempfile.TemporaryDirectory(prefix=f"bench-{name}-")
            made = _Race(name, chosen, setup, Path(stack.enter_context(folder)))
            stack.callback(made.stop)
            return made

        if together:
            races = [race(name) for name in names]
            for worker in [worker for one in races for worker in one.enter()]:
                worker.start()
                tell(worker.timing)
            yield from (one.run() for one in races)
            return
        for name in names:
            one = race(name)
            for worker in one.enter():
                worker.start()
                tell(worker.timing)
            yield one.run()
            one.stop()


def _judge(timings: list[Timing], tolerance: float) -> None:
    eager = timings[0].error
    allowed = max(tolerance, 4 * eager if eager is not None and math.isfinite(eager) else 0.0)
    for timing in timings:
        if timing.status == "ok" and not (timing.error is not None and timing.error <= allowed):
            timing.status = "WRONG"
            timing.note = f"off by {timing.error:.1e}, {allowed:.1e} allowed"


def _rounds(workers: list[_Worker], setup: Setup) -> None:
    live = [worker for worker in workers if worker.timing.status in ("ok", "WRONG")]
    end, rounds = time.perf_counter() + setup.seconds * len(live), 0
    while live and (rounds < 5 or time.perf_counter() < end):
        for worker in live:
            worker.sample()
        live = [worker for worker in live if worker.timing.status in ("ok", "WRONG")]
        live = live[1:] + live[:1]  # nobody always follows the same neighbour
        rounds += 1
