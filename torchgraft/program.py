"""From a captured graph to something that runs: passes, regions, code, plan, executor."""

from __future__ import annotations

import collections
import copy
import dataclasses
import logging
import operator
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft import _torch
from torchgraft.codegen import inductor, regions
from torchgraft.codegen.decide import decide
from torchgraft.codegen.regions import ATEN, GENERATED, KERNEL, Place, Unit
from torchgraft.config import Config
from torchgraft.convert.run import convert, unheard
from torchgraft.errors import NotCompiled, ResultChanged, first_line
from torchgraft.fx import dialect, meta
from torchgraft.fx.edit import target_name
from torchgraft.fx.mark import in_fallback
from torchgraft.passes import pipeline
from torchgraft.plan import Buffer, Free, Launch, Plan, buffers, is_literal
from torchgraft.report import Conversion, Placed, Report, remember
from torchgraft.run import cuda, host

if TYPE_CHECKING:
    from torchgraft.verify.watch import Watch

log = logging.getLogger("torchgraft")


@dataclasses.dataclass
class Program:
    """A compiled graph. Call it with the list of its inputs (which it may empty)."""

    gm: GraphModule
    plan: Plan
    run: _torch.Flat
    report: Report
    linker: Linker


@dataclasses.dataclass(frozen=True)
class Role:
    """What a graph is for: decides what the generator may assume."""

    front_end: str
    is_inference: bool = True
    is_backward: bool = False
    static: frozenset[int] = frozenset()  # inputs that keep their address between calls


def build(
    gm: GraphModule, config: Config, role: Role, name: str, linker: type[Linker] | None = None
) -> Program:
    """Compile a graph in our dialect. `gm` is changed."""
    with _torch.compiling(), _torch.size_oblivious(gm.meta.get("dynamic", False)):
        return _build(gm, config, role, name, linker or Linker)


def _build(gm: GraphModule, config: Config, role: Role, name: str, linker: type[Linker]) -> Program:
    report = Report(name, role.front_end, config.mode, _device(gm))
    program = _assemble(gm, config, role, report, linker)
    program.run = captured(program.run, config.mode, role.static, written(gm), report)
    _say(report, config)
    remember(report)
    log.debug("%s\n%s", report, program.plan)
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
    report.steps = pipeline.run(gm, meta.inputs_of(gm), config, watch)
    report.notes += unheard(gm, config)
    report.conversions = _convert(gm, config, watch)
    regions.keep_old(gm)
    meta.drop_unused(gm)
    gm.recompile()
    report.seconds["passes"] = time.perf_counter() - start
    start = time.perf_counter()
    program = _link(linker(gm, config, role, report))
    if watch is not None and captured is not None and config.verify != "each":
        program = _compared(program, watch, captured, role)
    report.seconds["code"] = time.perf_counter() - start
    return program


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


def _link(linker: Linker) -> Program:
    plan = linker.plan()
    run = host.link(plan, linker.kernels, linker.constants)
    return Program(linker.gm, plan, run, linker.report, linker)


def captured(
    run: _torch.Flat, mode: str, static: frozenset[int], written: frozenset[int], report: Report
) -> _torch.Flat:
    """The program as one CUDA graph, where its mode asks for that."""
    if mode in ("reduce-overhead", "max-autotune") and report.device == "cuda":
        return cuda.Captured(run, static=static, written=written, report=report)
    return run


def _compared(program: Program, watch: Watch, captured: GraphModule, role: Role) -> Program:
    """The program, its results compared with the captured graph's; nodes are pinned on the way."""
    from torchgraft.verify.bisect import at_end

    config, report = program.linker.config, program.report
    while (error := watch.end(program.run, captured)) is not None:
        assert watch.inputs is not None
        found = at_end(program, captured, watch.inputs, error)
        nodes = [n for n in program.gm.graph.nodes if n.name == found.node]
        if config.verify == "end" or not nodes or "pinned" in nodes[0].meta:
            what = f"node {found.node!r}" if found.node else "its outputs"
            raise ResultChanged(found.by, what, found.node, found.line, found.error, None)
        nodes[0].meta["pinned"] = f"{found.by} changed its result"
        report.notes.append(f"pinned: {found}")
        report.nodes.clear()
        program = _link(type(program.linker)(program.gm, config, role, report))
    return program


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


@dataclasses.dataclass
class Branch:
    """A branch of `cond` or `while_loop`, as the function that those call."""

    program: Program
    single: bool  # it gives one value, not a tuple

    def __call__(self, *operands: Any) -> Any:
        outputs = self.program.run(list(operands))
        return outputs[0] if self.single else tuple(outputs)


class Linker:
    """Cuts the graph, compiles the regions and lays the launches out as a plan."""

    def __init__(self, gm: GraphModule, config: Config, role: Role, report: Report) -> None:
        self.gm, self.config, self.role, self.report = gm, config, role, report
        self.kernels: dict[str, host.Kernel] = {}
        self.constants: dict[str, Any] = {}
        self.numbers: dict[Node, Buffer] = {}
        self.objects: dict[str, Buffer] = {}
        self.launches: list[Launch] = []
        self.owned: dict[Any, Tensor] = {}  # copies of the module's weights
        self.branches: dict[str, Branch] = {}
        self.units: list[Unit] = []

    def plan(self) -> Plan:
        inputs = tuple(self._number(n) for n in self.gm.graph.find_nodes(op="placeholder"))
        self.units = decide(self.gm, self.config, self.report, self._control_flow())
        for unit in self.units:
            if unit.place.runs == GENERATED:
                self._region(unit)
            else:
                self._calls(unit, unit.place)
        providers = [n for n in self.gm.graph.nodes if n.meta.get("provider")]
        first = [self._call(node) for node in providers]
        outputs = tuple(self._argument(meta.outputs_of(self.gm)))
        held = self.gm.graph.find_nodes(op="get_attr")
        constants = (
            *((self.numbers[n], str(n.target)) for n in held if n in self.numbers),
            *((buffer, name) for name, buffer in self.objects.items()),
        )
        for name, tensor in list(self.gm.named_buffers()):  # let go of the module's
            if tensor.layout == torch.strided and _view(tensor) in self.owned:
                setattr(self.gm, name, self.owned[_view(tensor)])
        steps = _with_frees([*first, *self.launches], outputs, {b for b, _ in constants})
        return Plan(inputs, constants, tuple(steps), outputs)

    def _control_flow(self) -> dict[Node, Place]:
        """Where branches and loops run: each branch is compiled, a program of its own."""
        places: dict[Node, Place] = {}
        for target in (torch.ops.higher_order.cond, torch.ops.higher_order.while_loop):
            for node in self.gm.graph.find_nodes(op="call_function", target=target):
                if self.config.mode == "eager" or in_fallback(node):
                    continue
                graphs = [n for n in node.all_input_nodes if n.op == "get_attr"]
                try:
                    for graph in graphs:
                        if isinstance(meta.attribute(self.gm, str(graph.target)), GraphModule):
                            self.branch(str(graph.target))
                except ResultChanged:
                    raise
                except Exception as error:
                    why = f"a branch could not be compiled: {first_line(error)}"
                    log.debug("torchgraft: %s", why, exc_info=True)
                    places[node] = Place(ATEN, why, "failed")
                    continue
                places[node] = Place(KERNEL, "its branches are compiled", "control flow")
        return places

    def branch(self, target: str) -> Branch:
        """The graph of this name, compiled."""
        if target in self.branches:
            return self.branches[target]
        held = meta.attribute(self.gm, target)
        gm = GraphModule(held, copy.deepcopy(held.graph))
        gm.meta |= {k: v for k, v in self.gm.meta.items() if k in ("fake_mode", "prepare")}
        output = next(iter(reversed(gm.graph.nodes)))
        single = not isinstance(output.args[0], (tuple, list))
        if single:
            output.args = ((output.args[0],),)
        for node in gm.graph.nodes:
            if node.op == "get_attr" and "val" not in node.meta:
                node.meta["val"] = meta.compute(gm, node)
        dialect.canonicalise(gm)
        report = Report(target, self.role.front_end, self.config.mode, self.report.device)
        role = dataclasses.replace(self.role, static=frozenset())
        program = _assemble(gm, self.config, role, report, type(self))
        for node in report.nodes:
            name, region = f"{target}/{node.node}", f"{target}/{node.region}"
            self.report.nodes.append(dataclasses.replace(node, node=name, region=region))
        self.report.conversions += report.conversions
        self.report.notes += [f"{target}: {note}" for note in report.notes]
        self.branches[target] = Branch(program, single)
        return self.branches[target]

    def _fresh(self) -> Buffer:
        return Buffer(len(self.numbers) + len(self.objects))

    def _number(self, node: Node) -> Buffer:
        return self.numbers.setdefault(node, self._fresh())

    def _argument(self, arg: Any) -> Any:
        """A node's argument with buffers for nodes; constants are noted on the way."""
        if isinstance(arg, Node):
            if arg.op == "get_attr":
                held = meta.attribute(self.gm, str(arg.target))
                held = self.branches.get(str(arg.target), held)
                self.constants.setdefault(str(arg.target), self._own(held))
            return self._number(arg)
        if isinstance(arg, (list, tuple)):
            items = [self._argument(item) for item in arg]
            return items if isinstance(arg, list) else tuple(items)
        return arg if is_literal(arg) else self._object(arg)

    def _own(self, constant: Any) -> Any:
        """A constant that nobody outside can change: a copy where it is a weight of the module."""
        borrowed: frozenset[int] = self.gm.meta.get("borrowed", frozenset())
        if not isinstance(constant, Tensor) or constant.layout != torch.strided:
            return constant
        if constant.untyped_storage().data_ptr() not in borrowed:
            return constant
        if (key := _view(constant)) not in self.owned:
            self.owned[key] = constant.clone(memory_format=torch.preserve_format)
            if "prepare" in self.gm.meta:
                self.gm.meta["prepare"].same(self.owned[key], constant)
        return self.owned[key]

    def _object(self, value: Any) -> Buffer:
        """A constant for an argument that has no text form, such as an operator or a function."""
        for name, held in self.constants.items():
            if held is value:
                return self.objects[name]
        name = f"{type(value).__name__}_{len(self.objects)}"
        self.constants[name] = value
        self.objects[name] = self._fresh()
        return self.objects[name]

    def _region(self, unit: Unit) -> None:
        inner, inputs, outputs = regions.extract(self.gm, unit)
        try:
            run = self.generate(inner, inputs)
        except Exception as error:
            why = f"the code generator failed on {unit.name}: {first_line(error)}"
            log.warning("torchgraft: %s, so it runs on ATen", why)
            log.debug("torchgraft: the generator's failure", exc_info=True)
            self._calls(unit, Place(ATEN, why, "failed"))
            return
        self.kernels[unit.name] = host.Kernel(run, boxed=True)
        args = tuple(self._number(n) for n in inputs)
        made = tuple(self._number(n) for n in outputs)
        self.launches.append(Launch(unit.name, args, (), made, unpack=True))
        self._note(unit, Place(GENERATED, "generated code"))

    def generate(self, inner: GraphModule, inputs: Sequence[Node]) -> _torch.Flat:
        """Code for a region that was extracted."""
        return inductor.generate(
            inner,
            [n.meta["val"] for n in inputs],
            self.config,
            is_inference=self.role.is_inference,
            is_backward=self.role.is_backward,
            own=self._own,
        )

    def _calls(self, unit: Unit, place: Place) -> None:
        for node in unit.nodes:
            if not _is_part(node):
                self.launches.append(self._call(node))
        self._note(unit, place)

    def _call(self, node: Node) -> Launch:
        assert callable(node.target)
        name = self._kernel(node.target)
        parts = [user for user in node.users if _is_part(user)]
        args = self._argument(node.args)
        kwargs = tuple((k, self._argument(v)) for k, v in node.kwargs.items())
        if parts and len(parts) == len(node.users) and isinstance(node.meta["val"], (tuple, list)):
            outputs: list[Buffer | None] = [None] * len(node.meta["val"])
            for part in parts:
                index = part.args[1]
                assert isinstance(index, int)
                # Two getitems of one part share its buffer.
                outputs[index] = self.numbers[part] = outputs[index] or self._number(part)
            return Launch(name, args, kwargs, tuple(outputs), unpack=True)
        outputs = [self._number(node)] if node.users else []
        return Launch(name, args, kwargs, tuple(outputs))

    def _kernel(self, target: Any) -> str:
        name = target_name(target)
        while self.kernels.setdefault(name, host.Kernel(target)).fn is not target:
            name += "_"
        return name

    def _note(self, unit: Unit, place: Place) -> None:
        for node in unit.nodes:
            self.report.nodes.append(
                Placed(
                    node.name,
                    target_name(node.target),
                    place.runs,
                    unit.name,
                    place.reason,
                    meta.source_line(node),
                    place.kind,
                )
            )


def _is_part(node: Node) -> bool:
    """Whether a node takes one part of a call's result, which the call's launch unpacks."""
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return False
    source = node.args[0]
    return (
        source.op == "call_function"
        and source.target is not operator.getitem
        and isinstance(source.meta.get("val"), (tuple, list))
        and all(user.target is operator.getitem for user in source.users)
    )


def _view(tensor: Tensor) -> Any:
    """Equal for two tensors that are the same view of the same memory."""
    address = tensor.untyped_storage().data_ptr()
    return (address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def _with_frees(
    launches: list[Launch], outputs: tuple[Any, ...], constants: set[Buffer]
) -> list[Launch | Free]:
    """The launches with each buffer freed right after its last use."""
    keep = set(buffers(outputs)) | constants
    last: dict[Buffer, int] = {}
    for i, launch in enumerate(launches):
        for used in buffers((launch.args, dict(launch.kwargs), launch.outputs)):
            last[used] = i
    steps: list[Launch | Free] = []
    for i, launch in enumerate(launches):
        steps.append(launch)
        dying = sorted((b for b, at in last.items() if at == i and b not in keep), key=repr)
        steps += [Free(buffer) for buffer in dying]
    return steps
