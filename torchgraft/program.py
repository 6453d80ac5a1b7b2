"""From a captured graph to something that runs: passes, regions, code, plan, executor."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchgraft import _torch
from torchgraft.codegen import regions
from torchgraft.comm.agree import Frame
from torchgraft.comm.call import bind, told
from torchgraft.comm.capture import refusal
from torchgraft.comm.place import place as place_collectives
from torchgraft.config import Config
from torchgraft.convert.run import convert, unheard
from torchgraft.errors import NotCompiled, ResultChanged, UnorderedUse
from torchgraft.fx import label, meta, race, returned
from torchgraft.fx.dialect import is_random
from torchgraft.link import Linker, Role
from torchgraft.passes import pipeline
from torchgraft.passes.history import Change, History
from torchgraft.plan import Plan
from torchgraft.report import Conversion, Placed, Report, remember
from torchgraft.run import cuda, host, streams
from torchgraft.stream.order import in_turn

if TYPE_CHECKING:
    from torchgraft.inspect.profile import Profile
    from torchgraft.verify.watch import Watch

log = logging.getLogger("torchgraft.plan")


@dataclasses.dataclass
class Program:
    """A compiled graph. Call it with the list of its inputs (which it may empty)."""

    gm: GraphModule
    plan: Plan
    run: _torch.Flat
    report: Report
    linker: Linker
    history: History = dataclasses.field(default_factory=History)
    profile: Profile | None = None
    """The last `compiled.profile(...)`: what a page shows as measured."""
    choice: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the config that `max-autotune` found to be better otherwise."""
    view: Callable[[Program], None] = lambda program: None
    """Reads what no call needs, where that was not done yet: the graph of one that was loaded."""

    def relink(self) -> None:
        """Run the plan with the linker's kernels as they are now."""
        linker = self.linker
        kernels, constants = linker.kernels, linker.constants
        self.run = link(self.plan, kernels, constants, self.report.device, linker.config.adversary)


def build(
    gm: GraphModule, config: Config, role: Role, name: str, linker: type[Linker] = Linker
) -> Program:
    """Compile a graph in our dialect. `gm` is changed."""
    with _torch.compiling(), _torch.size_oblivious(gm.meta.get("dynamic", False)):
        return _build(gm, config, role, name, linker)


def _build(gm: GraphModule, config: Config, role: Role, name: str, linker: type[Linker]) -> Program:
    report = Report(name, role.front_end, config.mode, _device(gm))
    assemble = functools.partial(_assemble, linker=linker)
    if config.mode == "max-autotune" and role.is_inference and linker is Linker:
        from torchgraft.tune import Tuner

        program = Tuner(config, role, assemble).run(gm, report)
        report = program.report
    else:
        program = assemble(gm, config, role, report)
    inputs = meta.inputs_of(program.gm)
    program.run = captured(
        program,
        config,
        static=role.static,
        written=written(program.gm),
        fixed=role.checked
        and all(isinstance(x, Tensor) and not _torch.symbols_of(x) for x in inputs),
        why=_uncapturable(program.gm),
    )
    _say(report, config)
    remember(report, program)
    if config.report is not None:
        from torchgraft.inspect.page import write_into

        write_into(config.report, report)
    log.info("%s\n%s", report, program.plan)
    return program


def _say(report: Report, config: Config) -> None:
    """Raise or warn where less was compiled than was asked for."""
    report.notes[:] = dict.fromkeys(report.notes)  # a program that is linked again notes again
    if config.require_full_compilation and report.fallbacks:
        raise NotCompiled(report.name, map(_culprit, report.fallbacks))
    if report.nodes and not report.compiled and config.mode != "eager":
        reasons = collections.Counter(f"{n.kind}: {n.reason}" for n in report.nodes)
        [(why, count)] = reasons.most_common(1)
        said = f"nothing was compiled: all {len(report.nodes)} nodes run on ATen ({count} {why})"
        report.notes.append(said)
        warnings.warn(f"torchgraft: {report.name}: {said}", stacklevel=2)


def _culprit(node: Placed) -> str:
    at = f" at {node.line}" if node.line else ""
    return f"{node.node} ({node.op}){at}: {node.kind}: {node.reason}"


def captured(
    program: Program,
    config: Config,
    *,
    static: frozenset[int],
    written: frozenset[int],
    fixed: bool,
    why: str | None = None,
) -> _torch.Flat:
    """The program as one CUDA graph, where its mode asks for that and no `why` is against it."""
    report = program.report
    if not config.captures or report.device != "cuda":
        return program.run
    from torchgraft.native import executor

    return cuda.Captured(
        program.run,
        report=report,
        static=static,
        written=written,
        alias_outputs=config.alias_outputs,
        fixed=fixed,
        refusal=lambda: why or refusal(program.plan),
        collective=bool(program.plan.collectives),
        native=executor.capture(),
    )


def _uncapturable(gm: GraphModule) -> str | None:
    """What in a graph a CUDA graph cannot hold: the host would have to look, or to draw."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and _torch.has_unbacked(value):
            return f"the size of {node.name} depends on data"
        if is_random(node) and isinstance(value, Tensor) and value.device.type == "cpu":
            return f"{node.name} draws random numbers on the CPU"
    return None


def _assemble(
    gm: GraphModule, config: Config, role: Role, report: Report, linker: type[Linker]
) -> Program:
    """Everything from the captured graph to a function that runs."""
    watch: Watch | None = None
    if config.verify != "off":
        from torchgraft.verify.watch import Watch

        watch = Watch(gm, config, report)
    captured = watch.old if watch is not None else None
    start = time.perf_counter()
    labels, history = label.Labels(), _history(gm, config, report)
    report.steps = pipeline.run(gm, meta.inputs_of(gm), config, watch, labels, history)
    report.notes += labels.notes
    if labels.explicit and not role.is_backward:
        report.notes += _completed(gm, labels.explicit)
    report.notes += unheard(gm, config)
    before, outputs = meta.snapshot(gm.graph), meta.output_values(gm)
    report.conversions = _convert(gm, config, watch)
    returned.keep_strides(gm, outputs)
    report.notes += place_collectives(gm, config.bucket_bytes)
    regions.keep_old(gm)
    returned.copy_constants(gm)
    history.add(Change.since(before, gm, "converters"), gm)
    meta.drop_unused(gm)
    gm.recompile()
    report.seconds["passes"] = time.perf_counter() - start
    start = time.perf_counter()
    program = _link(gm, config, role, report, linker)
    if watch is not None and captured is not None and config.verify != "each":
        program = _compared(program, watch, captured, role)
    program.history = history
    if history.on_plan is not None:
        history.on_plan(program.plan)
    report.seconds["code"] = time.perf_counter() - start
    return program


def _history(gm: GraphModule, config: Config, report: Report) -> History:
    """Keeps what each step does; with `Config(dump=...)` each graph is written, too."""
    if config.dump is None:
        return History()
    from torchgraft.inspect.dump import Dump

    dump = Dump(config.dump, config.dump_formats, report.name, gm)
    return History(on_step=dump.step, on_plan=dump.plan)


def _completed(gm: GraphModule, explicit: str) -> list[str]:
    """Order that was written as events and does not suffice is an error; that of marker operators
    is completed, as all order that data asks for is, and that is said."""
    notes = []
    for value, kind, one, two in race.races(gm):
        if explicit == "events":
            raise UnorderedUse(value.name, kind, race.said(one), race.said(two))
        wait = f"{race.said(two)}, after {race.said(one)}"
        notes.append(f"a wait was added, {kind} of {value.name}: {wait}")
    return notes


def _convert(gm: GraphModule, config: Config, watch: Watch | None) -> list[Conversion]:
    """Ask the converters; with "pin", again without those whose result was another."""
    pinned: set[str] = set()
    while True:
        if watch is not None:
            watch.before(gm)
        asked, became = convert(gm, config, pinned)
        if watch is None or not became:
            return asked
        by = {c.node: f"converter {c.converter!r} ({c.where})" for c in asked if c.reason is None}
        guilty = watch.after(gm, "the converters", became, by)
        if guilty is None:
            return asked
        pinned |= {guilty} if guilty and guilty not in pinned else set(became)


def _link(
    gm: GraphModule, config: Config, role: Role, report: Report, kind: type[Linker]
) -> Program:
    linker = kind(gm, config, role, report, functools.partial(_assemble, linker=kind))
    plan = linker.plan()
    fresh = kind is Linker and report.device == "cpu" and config.adversary is None
    if fresh and not plan.collectives:
        from torchgraft.native import executor

        run = executor.walked(plan, linker.kernels, linker.constants)
        if run is not None:
            report.notes += [] if executor.NOTE in report.notes else [executor.NOTE]
            return Program(gm, plan, run, report, linker)
    parts = (plan, linker.kernels, linker.constants, report.device, config.adversary)
    return Program(gm, plan, link(*parts, frame=gm.meta.get("frame")), report, linker)


def link(
    plan: Plan,
    kernels: Mapping[str, host.Kernel],
    constants: Mapping[str, Any],
    device: str,
    adversary: int | None = None,
    frame: Frame | None = None,
) -> _torch.Flat:
    """A function that runs the plan, which is proved first: list of inputs in, outputs out."""
    with told(plan):
        streams.prove(plan)
    if plan.collectives:
        plan, kernels, guarded = bind(plan, kernels, frame)
        return guarded(execute(plan, kernels, constants, device, adversary))
    return execute(plan, kernels, constants, device, adversary)


def execute(
    plan: Plan,
    kernels: Mapping[str, host.Kernel],
    constants: Mapping[str, Any],
    device: str,
    adversary: int | None = None,
) -> _torch.Flat:
    """A function that runs a plan that was proved, its collectives bound."""
    if plan.collectives and device == "cpu" and adversary is None:
        plan = in_turn(plan) or plan
    if len(plan.streams) == 1:
        return host.link(plan, kernels, constants)
    if device == "cpu" or not hasattr(torch.get_device_module(device), "Stream"):
        return streams.link_host(plan, kernels, constants, adversary)
    return streams.link_device(plan, kernels, constants, device)


def _compared(program: Program, watch: Watch, captured: GraphModule, role: Role) -> Program:
    """The program, its results compared with the captured graph's; nodes are pinned on the way."""
    from torchgraft.verify.bisect import at_end

    config, report = program.linker.config, program.report
    while True:
        tried = drawn_alike(program)
        error = watch.end(tried.run, captured)
        if error is None and tried is not program:
            error = watch.end(program.run, captured, values=False)
        if error is None:
            return program
        assert watch.inputs is not None
        found = at_end(tried, captured, watch.inputs, error)
        nodes = [n for n in program.gm.graph.nodes if n.name == found.node]
        if config.verify == "end" or not nodes or "pinned" in nodes[0].meta:
            what = f"node {found.node!r}" if found.node else "its outputs"
            raise ResultChanged(found.by, what, found.node, found.line, found.error, None)
        nodes[0].meta["pinned"] = f"{found.by} changed its result"
        report.notes.append(f"pinned: {found}")
        report.nodes.clear()
        program = _link(program.gm, config, role, report, type(program.linker))


def drawn_alike(program: Program) -> Program:
    """The program to compare values of: itself, or its twin whose random numbers ATen draws."""
    from torchgraft.verify.compare import seeded

    gm, linker = seeded(program.gm), program.linker
    if gm is None:
        return program
    scratch = Report(program.report.name, linker.role.front_end, program.report.mode)
    return _link(gm, linker.config, linker.role, scratch, Linker)


def _device(gm: GraphModule) -> str:
    values = [n.meta.get("val") for n in gm.graph.nodes]
    kinds = {v.device.type for v in values if isinstance(v, Tensor)}
    return "cuda" if "cuda" in kinds else next(iter(sorted(kinds - {"cpu"})), "cpu")


def written(gm: GraphModule) -> frozenset[int]:
    """Which inputs the program writes to."""
    inputs = gm.graph.find_nodes(op="placeholder")
    written = {
        n.args[0]
        for n in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    }
    return frozenset(i for i, node in enumerate(inputs) if node in written)
