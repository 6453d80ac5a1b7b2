"""Mode `max-autotune`: the program in several ways, timed in turns, the fastest kept.

First the ways to lay out the whole (several streams or one, branches merged or not), then for each
region, the most costly first, the generator's own tuning. All of it within
`Config(autotune_seconds=...)`, counted from the start of the compile: where that ends in the midst
of a region, the rest of it is as predicted. A way that fails, for want of memory or otherwise, is
dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from torchgraft import _torch, progress
from torchgraft._torch import tuning
from torchgraft.codegen.regions import GENERATED, Unit, extract
from torchgraft.config import Config
from torchgraft.errors import first_line
from torchgraft.fx.cost import NOMINAL, Cost, bytes_of, flops_of, has_formula
from torchgraft.link import Linker, Role
from torchgraft.report import Report, Trial
from torchgraft.run import cuda, host
from torchgraft.verify.samples import draws
from torchgraft.verify.watch import copied

if TYPE_CHECKING:
    from torchgraft.program import Program

ROUNDS = 9
"""How often each way is timed, in turns."""
UNCLEAR = 0.1
"""A spread of timings (between the quartiles, over the median) that a choice can drown in."""
_LONG_ENOUGH = 2e-3
"""Seconds that one timing lasts at least."""

Assemble = Callable[[GraphModule, Config, Role, Report], "Program"]
clock = time.monotonic


def sample(call: Callable[[], object], device: str) -> float:
    """Seconds of one call, over as many as last long enough. Each is waited for: of small programs
    in a row, it would be the launches that are timed."""
    sync: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    count = 1
    while True:
        sync()
        start = time.perf_counter()
        for _ in range(count):
            call()
            sync()
        took = time.perf_counter() - start
        if took >= _LONG_ENOUGH:
            return took / count
        count *= 2


@dataclasses.dataclass
class Tuner:
    """One compile under its budget."""

    config: Config
    role: Role
    assemble: Assemble

    def run(self, gm: GraphModule, report: Report) -> Program:
        """The fastest program for a graph, which is changed."""
        self.began = clock()
        with progress.shown("autotune", ticks=False):
            return self._run(gm, report)

    def _run(self, gm: GraphModule, report: Report) -> Program:
        source = copied(gm)
        # As predicted: what the other modes do, and nothing is measured.
        plain = self.config.replace(mode="reduce-overhead")
        first = self.assemble(gm, plain, self.role, report)
        took = clock() - self.began
        if first.plan.collectives:  # another process may choose otherwise, and wait for ever
            report.notes.append("autotune: nothing is measured in a program with collectives")
            return first
        inputs = _inputs(source)
        if inputs is None:
            report.notes.append("autotune: no inputs could be drawn, so nothing was measured")
            return first
        programs = {_name(first): first}
        changes: dict[str, Mapping[str, Any]] = {_name(first): {}}
        ways = _ways(first, self.config)
        tried, left_out = 0, 0
        for name, change in progress.each("building", ways, name=operator.itemgetter(0)):
            if self._left() < took:
                left_out += 1
                continue
            config = plain.replace(**change, dump=None, report=None)
            other = Report(report.name, report.front_end, report.mode, report.device)
            with self._dropping(report, name):
                programs[name] = self.assemble(copied(source), config, self.role, other)
                changes[name] = change
                tried += 1
        if len(programs) > 1:
            calls = {
                name: self._call(one.run, inputs, report.device) for name, one in programs.items()
            }
            kept = self._choose("the program", calls, report)
            if programs[kept] is not first:
                program = programs[kept]
                program.choice = changes[kept]
                program.report.notes += [n for n in report.notes if n.startswith("autotune")]
                program.report.trials += report.trials
                report, first = program.report, program
        regions = self._regions(first, took)
        if not tried + regions and (ways or _tunable(first)):
            report.notes.append(
                f"autotune: {self.config.autotune_seconds:g} s are too few to try anything, so the "
                f"plan is as predicted; raise Config(autotune_seconds=...)"
            )
        elif left_out:
            report.notes.append(f"autotune: the time was up before {left_out} of {len(ways)} ways")
        return first

    def _regions(self, program: Program, took: float) -> int:
        """Let the generator tune region by region; how many were tried."""
        linker, report = program.linker, program.report
        units = _tunable(program)
        kernels, tried = dict(linker.kernels), 0
        longest = took / max(1, len(units))
        for unit in progress.each("tuning", units, name=operator.attrgetter("name")):
            if self._left() < longest:
                count = len(units) - tried
                if tried:
                    report.notes.append(
                        f"autotune: the time was up before {count} of {len(units)} regions"
                    )
                break
            start, rest = clock(), longest  # what the region takes without tuning, about
            with self._dropping(report, f"{unit.name} tuned"):
                tried += 1
                with tuning.until(functools.partial(self._ends, rest)) as untimed:
                    self._region(unit, linker, kernels, report)
                if untimed.count:
                    report.notes.append(
                        f"autotune: {unit.name}: the time was up, so {untimed.count} products, "
                        f"convolutions or kernels in it were not tuned"
                    )
            longest = max(longest, clock() - start)
        if kernels != linker.kernels:
            linker.kernels = kernels
            program.relink()
        return tried

    def _region(
        self, unit: Unit, linker: Linker, kernels: dict[str, host.Kernel], report: Report
    ) -> None:
        inner, inputs, _ = extract(linker.gm, unit)
        drawn = next(draws(inner))
        tuned = linker.generate(inner, inputs, self.config)
        ways = {"as predicted": kernels[unit.name].fn, "tuned": tuned}
        calls = {name: self._call(run, drawn, report.device) for name, run in ways.items()}
        if self._choose(unit.name, calls, report) == "tuned":
            kernels[unit.name] = host.Kernel(tuned, boxed=True)

    def _call(self, run: _torch.Flat, inputs: Sequence[Any], device: str) -> Callable[[], object]:
        """A call as it will be: on CUDA, the replay of a captured graph."""
        if device == "cuda":
            scratch = Report("", "", "")
            static = frozenset(range(len(inputs)))
            run = cuda.Captured(run, static=static, report=scratch)
        return lambda: run(list(inputs))

    def _choose(self, what: str, calls: Mapping[str, Callable[[], object]], report: Report) -> str:
        """Time the calls in turns; the name of the one with the least median. The first, which is
        as predicted, stays unless that one is clearly faster: chance would choose between them."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        with _torch.real():
            for _ in progress.each(f"timing {what}", range(ROUNDS)):
                for name in list(times):
                    with self._dropping(report, f"{what}, {name}", times, name):
                        times[name].append(sample(calls[name], report.device))
        if not times:
            return next(iter(calls))
        medians = {name: statistics.median(held) for name, held in times.items()}
        kept, first = min(medians, key=lambda name: medians[name]), next(iter(calls))
        if first in times and _quartiles(times[kept])[1] >= _quartiles(times[first])[0]:
            kept = first
        spreads = {name: _spread(held) for name, held in times.items()}
        report.trials += [
            Trial(what, name, medians[name], spreads[name], name == kept) for name in medians
        ]
        shown = ", ".join(
            f"{name} {seconds * 1e6:.1f} µs{' (kept)' * (name == kept)}"
            for name, seconds in medians.items()
        )
        report.notes.append(f"autotune: {what}: {shown}")
        _, high = _quartiles(times[kept])
        rivals = [n for n, held in times.items() if n != kept and _quartiles(held)[0] < high]
        if rivals and max(spreads[kept], *(spreads[n] for n in rivals)) > UNCLEAR:
            said = (
                f"autotune: {what}: timings vary by {max(spreads.values()):.0%}, more than the "
                f"ways differ, so the choice means little and is {kept!r}; is the machine busy?"
            )
            report.notes.append(said)
            warnings.warn(f"torchgraft: {report.name}: {said}", stacklevel=2)
        return kept

    def _left(self) -> float:
        return self.began + self.config.autotune_seconds - clock()

    def _ends(self, rest: float) -> bool:
        return self._left() < rest

    @contextlib.contextmanager
    def _dropping(
        self,
        report: Report,
        name: str,
        times: dict[str, list[float]] | None = None,
        key: str = "",
    ) -> Iterator[None]:
        """What fails is no choice, and the compile goes on."""
        try:
            yield
        except Exception as error:
            report.notes.append(f"autotune: {name} was dropped: {first_line(error)}")
            if times is not None:
                times.pop(key, None)
            if report.device == "cuda":
                torch.cuda.empty_cache()


def _name(program: Program) -> str:
    count = len(program.plan.streams)
    return f"{count} streams" if count > 1 else "one stream"


def _ways(first: Program, config: Config) -> list[tuple[str, dict[str, Any]]]:
    """Other ways to lay the program out that would differ: a name, and changes to the config."""
    ways: list[tuple[str, dict[str, Any]]] = []
    if len(first.plan.streams) > 1 and config.streams is None:
        ways.append(("one stream", {"streams": "off"}))
    merged = [step for step in first.report.steps if step.name == "merge_branches" and step.added]
    if merged:
        ways.append(("branches apart", {"merge_branches": False}))
    return ways


def _tunable(program: Program) -> list[Unit]:
    """Regions in which the generator has something to choose, the most costly first."""
    on_cuda = program.report.device == "cuda"
    units = [
        unit
        for unit in program.linker.units
        if unit.place.runs == GENERATED
        and unit.name in program.linker.kernels
        and (on_cuda or any(has_formula(node.target) for node in unit.nodes))
    ]
    machine = NOMINAL["cuda" if on_cuda else "cpu"]

    def seconds(unit: Unit) -> float:
        moved = sum(bytes_of(node.meta.get("val")) for node in unit.nodes)
        return machine.seconds(Cost(moved, sum(map(flops_of, unit.nodes))))

    return sorted(units, key=seconds, reverse=True)


def _inputs(gm: GraphModule) -> list[Any] | None:
    """Inputs to time a program on: our own, whatever it writes to."""
    for drawn in draws(gm):
        with _torch.real():
            return [x.clone() if isinstance(x, torch.Tensor) else x for x in drawn]
    return None


def _quartiles(times: Sequence[float]) -> tuple[float, float]:
    if len(times) < 2:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def _spread(times: Sequence[float]) -> float:
    low, high = _quartiles(times)
    return (high - low) / statistics.median(times)
