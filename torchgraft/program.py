"""From a captured graph to something that runs: passes, regions, code, plan, executor."""

from __future__ import annotations

import dataclasses
import logging
import operator
import time
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft import _torch
from torchgraft.codegen import inductor, regions
from torchgraft.codegen.regions import ATEN, GENERATED, Place, Unit
from torchgraft.config import Config
from torchgraft.errors import first_line
from torchgraft.fx import meta
from torchgraft.fx.edit import target_name
from torchgraft.passes import pipeline
from torchgraft.plan import Buffer, Free, Launch, Plan, buffers, is_literal
from torchgraft.report import Placed, Report, remember
from torchgraft.run import cuda, host

log = logging.getLogger("torchgraft")


@dataclasses.dataclass
class Program:
    """A compiled graph. Call it with the list of its inputs (which it may empty)."""

    gm: GraphModule
    plan: Plan
    run: _torch.Flat
    report: Report


@dataclasses.dataclass(frozen=True)
class Role:
    """What a graph is for: decides what the generator may assume."""

    front_end: str
    is_inference: bool = True
    is_backward: bool = False
    static: frozenset[int] = frozenset()  # inputs that keep their address between calls


def build(gm: GraphModule, config: Config, role: Role, name: str) -> Program:
    """Compile a graph in our dialect. `gm` is changed."""
    with _torch.compiling(), _torch.size_oblivious(gm.meta.get("small_sizes", False)):
        return _build(gm, config, role, name)


def _build(gm: GraphModule, config: Config, role: Role, name: str) -> Program:
    report = Report(name, role.front_end, config.mode, _device(gm))
    start = time.perf_counter()
    report.steps = pipeline.run(gm, meta.inputs_of(gm), config)
    meta.drop_unused(gm)
    gm.recompile()
    report.seconds["passes"] = time.perf_counter() - start
    start = time.perf_counter()
    linker = _Linker(gm, config, role, report)
    plan = linker.plan()
    report.seconds["code"] = time.perf_counter() - start
    run = host.link(plan, linker.kernels, linker.constants)
    if config.mode in ("reduce-overhead", "max-autotune") and report.device == "cuda":
        run = cuda.Captured(run, static=role.static, written=_written(gm), report=report)
    remember(report)
    log.debug("%s\n%s", report, plan)
    return Program(gm, plan, run, report)


def _device(gm: GraphModule) -> str:
    values = [n.meta.get("val") for n in gm.graph.nodes]
    kinds = {v.device.type for v in values if isinstance(v, Tensor)}
    return "cuda" if "cuda" in kinds else next(iter(sorted(kinds - {"cpu"})), "cpu")


def _written(gm: GraphModule) -> frozenset[int]:
    """Which inputs the program writes to."""
    inputs = gm.graph.find_nodes(op="placeholder")
    written = {
        n.args[0]
        for n in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    }
    return frozenset(i for i, node in enumerate(inputs) if node in written)


class _Linker:
    """Cuts the graph, compiles the regions and lays the launches out as a plan."""

    def __init__(self, gm: GraphModule, config: Config, role: Role, report: Report) -> None:
        self.gm, self.config, self.role, self.report = gm, config, role, report
        self.kernels: dict[str, host.Kernel] = {}
        self.constants: dict[str, Any] = {}
        self.numbers: dict[Node, Buffer] = {}
        self.objects: dict[str, Buffer] = {}
        self.launches: list[Launch] = []

    def plan(self) -> Plan:
        inputs = tuple(self._number(n) for n in self.gm.graph.find_nodes(op="placeholder"))
        for unit in regions.cut(self.gm, self._placement()):
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
        steps = _with_frees([*first, *self.launches], outputs, {b for b, _ in constants})
        return Plan(inputs, constants, tuple(steps), outputs)

    def _placement(self) -> regions.Placement:
        if self.config.mode == "eager":
            return lambda node: Place(ATEN, "mode 'eager'")
        values = [n.meta.get("val") for n in self.gm.graph.nodes]
        if (why := inductor.unavailable(values)) is not None:
            self.report.notes.append(why)
            return lambda node: Place(ATEN, why)
        return regions.place

    def _fresh(self) -> Buffer:
        return Buffer(len(self.numbers) + len(self.objects))

    def _number(self, node: Node) -> Buffer:
        return self.numbers.setdefault(node, self._fresh())

    def _argument(self, arg: Any) -> Any:
        """A node's argument with buffers for nodes; constants are noted on the way."""
        if isinstance(arg, Node):
            if arg.op == "get_attr":
                held = meta.attribute(self.gm, str(arg.target))
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
        shared = constant.untyped_storage().data_ptr() in borrowed
        return constant.clone(memory_format=torch.preserve_format) if shared else constant

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
            run = inductor.generate(
                inner,
                [n.meta["val"] for n in inputs],
                self.config,
                is_inference=self.role.is_inference,
                is_backward=self.role.is_backward,
                own=self._own,
            )
        except Exception as error:
            why = f"the code generator failed on {unit.name}: {first_line(error)}"
            log.warning("torchgraft: %s, so it runs on ATen", why)
            log.debug("torchgraft: the generator's failure", exc_info=True)
            self._calls(unit, Place(ATEN, why))
            return
        self.kernels[unit.name] = host.Kernel(run, boxed=True)
        args = tuple(self._number(n) for n in inputs)
        made = tuple(self._number(n) for n in outputs)
        self.launches.append(Launch(unit.name, args, (), made, unpack=True))
        self._note(unit, Place(GENERATED, "generated code"))

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
