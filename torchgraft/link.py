"""Laying a graph out as a plan: regions are compiled, calls become launches, order is kept."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft import _torch, progress
from torchgraft._torch import generator
from torchgraft.codegen import inductor, regions
from torchgraft.codegen.decide import decide
from torchgraft.codegen.once import once
from torchgraft.codegen.regions import ATEN, GENERATED, KERNEL, Place, Unit
from torchgraft.comm.ops import is_collective, kind_of
from torchgraft.config import Config
from torchgraft.errors import BadMarker, OrderCycle, ResultChanged, UnorderedUse, first_line
from torchgraft.fx import alias, dialect, label, meta
from torchgraft.fx.edit import target_name
from torchgraft.fx.mark import in_fallback
from torchgraft.plan import Buffer, Collective, Launch, Plan, is_literal
from torchgraft.report import Placed, Report
from torchgraft.run import host, pages
from torchgraft.stream import memory
from torchgraft.stream.order import schedule

log = logging.getLogger("torchgraft")

_SMALL = 1 << 20
"""Bytes that are not worth a wait."""


@dataclasses.dataclass(frozen=True)
class Role:
    """What a graph is for: decides what the generator may assume."""

    front_end: str
    is_inference: bool = True
    is_backward: bool = False
    static: frozenset[int] = frozenset()  # inputs that keep their address between calls
    checked: bool = False  # whoever calls it has compared its inputs with what was declared


Assemble = Callable[[GraphModule, Config, Role, Report], Any]


@dataclasses.dataclass
class Branch:
    """A branch of `cond` or `while_loop`, as the function that those call."""

    program: Any
    single: bool  # it gives one value, not a tuple
    dense: tuple[bool, ...] = ()  # operands that it wants contiguous

    def __call__(self, *operands: Any) -> Any:
        given = list(operands)
        for i, wanted in enumerate(self.dense):
            if wanted:
                given[i] = given[i].contiguous()
        outputs = self.program.run(given)
        return outputs[0] if self.single else tuple(outputs)


class Linker:
    """Cuts the graph, compiles the regions and lays the launches out as a plan."""

    def __init__(
        self, gm: GraphModule, config: Config, role: Role, report: Report, assemble: Assemble
    ) -> None:
        self.gm, self.config, self.role, self.report = gm, config, role, report
        self._assemble = assemble  # how a branch becomes a program of its own
        self.kernels: dict[str, host.Kernel] = {}
        self.constants: dict[str, Any] = {}
        self.numbers: dict[Node, Buffer] = {}
        self.objects: dict[str, Buffer] = {}
        self.launches: list[Launch] = []
        self.owned: dict[View, Tensor] = {}  # copies of the module's weights
        self.pages = pages.Pages()
        self.branches: dict[str, Branch] = {}
        self.units: list[Unit] = []
        self.shared: list[tuple[Buffer, Buffer]] = []
        self.order: list[tuple[int, int]] = []  # launches: first, then
        self.taken = 0  # regions whose code another rank has generated

    def plan(self) -> Plan:
        inputs = tuple(self._number(n) for n in self.gm.graph.find_nodes(op="placeholder"))
        self.units = decide(self.gm, self.config, self.report, self._control_flow())
        launched: list[range] = []
        for unit in progress.each("code for", self.units, name=lambda one: one.name):
            start = len(self.launches)
            if unit.place.runs == GENERATED:
                self._region(unit)
            else:
                self._calls(unit, unit.place)
            launched.append(range(start, len(self.launches)))
        if self.taken:
            said = f"another rank generated the code of {self.taken} regions: found in the cache"
            self.report.notes.append(said)
        if len({unit.stream for unit in self.units}) > 1:
            self.order = list(_order(self.units, launched, on_host=self.report.device != "cuda"))
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
        self.order = [(one + len(first), two + len(first)) for one, two in self.order]
        self.launches[:0] = first
        parts = (inputs, constants, self.launches, outputs)
        plan = schedule(*parts, shared=self.shared, after=self.order)
        return plan if len(plan.streams) == 1 else self._lean(plan)

    def _lean(self, plan: Plan) -> Plan:
        """The plan, with waits for memory where it would keep much more than one stream does."""
        sizes = {b: nbytes(node.meta.get("val")) for node, b in self.numbers.items()}
        limit = max(self.config.stream_memory * memory.peak(memory.alone(plan), sizes), _SMALL)
        plan, more = memory.lean(plan, sizes, limit, self.order)
        if more:
            self.report.notes.append(
                f"{more} wait{'s' * (more != 1)} between streams added, to keep memory within "
                f"{self.config.stream_memory} times that of one stream"
            )
        most = memory.peak(plan, sizes)
        if most > limit:
            self.report.notes.append(
                f"the streams keep {most / limit:.2f} times the memory that stream_memory grants"
            )
        return plan

    def _control_flow(self) -> dict[Node, Place]:
        """Where branches and loops run: each branch is compiled, a program of its own."""
        places: dict[Node, Place] = {}
        for target in _torch.control_flow():
            for node in self.gm.graph.find_nodes(op="call_function", target=target):
                if in_fallback(node):
                    continue
                graphs = [n for n in node.all_input_nodes if n.op == "get_attr"]
                try:
                    for graph in graphs:
                        if isinstance(meta.attribute(self.gm, str(graph.target)), GraphModule):
                            self.branch(str(graph.target))
                except (ResultChanged, BadMarker, OrderCycle, UnorderedUse):
                    raise  # what somebody wrote, and not what we cannot do
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
        kept = ("fake_mode", "prepare", "folder")
        gm.meta |= {key: held for key, held in self.gm.meta.items() if key in kept}
        output = next(iter(reversed(gm.graph.nodes)))
        single = not isinstance(output.args[0], (tuple, list))
        if single:
            output.args = ((output.args[0],),)
        for node in gm.graph.nodes:
            if node.op == "get_attr" and "val" not in node.meta:
                node.meta["val"] = meta.compute(gm, node)
        dialect.canonicalise(gm)
        report = Report(target, self.role.front_end, self.config.mode, self.report.device)
        role = dataclasses.replace(self.role, static=frozenset(), checked=False)
        program = self._assemble(gm, self.config.replace(streams="off"), role, report)
        for node in report.nodes:
            name, region = f"{target}/{node.node}", f"{target}/{node.region}"
            self.report.nodes.append(dataclasses.replace(node, node=name, region=region))
        self.report.conversions += report.conversions
        self.report.notes += [f"{target}: {note}" for note in report.notes]
        # A loop may slice what it loops over; its body was traced with dense slices.
        with _torch.quiet_guards(gm.meta["fake_mode"]):
            inputs = meta.inputs_of(gm)
            dense = [isinstance(value, Tensor) and value.is_contiguous() for value in inputs]
        self.branches[target] = Branch(program, single, tuple(dense))
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
        """A constant that nobody outside can change, where it is read fast: a copy where it is a
        weight of the module or made by the generator."""
        if not isinstance(constant, Tensor) or constant.layout != torch.strided:
            return constant
        address = constant.untyped_storage().data_ptr()
        if address not in self.gm.meta.get("borrowed", ()):
            return constant if address in self._kept else self.pages.settle(constant)
        if (key := _view(constant)) not in self.owned:
            mine = self.pages.settle(constant)
            if mine is constant:
                mine = constant.clone(memory_format=torch.preserve_format)
            self.owned[key] = mine
            if "prepare" in self.gm.meta:
                self.gm.meta["prepare"].same(mine, constant)
        return self.owned[key]

    @functools.cached_property
    def _kept(self) -> frozenset[int]:
        """Where the graph's constants lie, which it keeps: a copy would be a second one."""
        return meta.addresses(self.gm.buffers())

    def copies(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The program's own copies of weights, laid out as those are; not every weight has one."""
        # A copy keeps the strides of what has no holes, and so all of its memory, in its order.
        dense = {_span(key): copy for key, copy in self.owned.items() if copy.stride() == key[3]}
        found: dict[str, Tensor] = {}
        for name, weight in weights.items():
            if weight.layout == torch.strided and weight.numel():
                copy, dims = dense.get(_span(_view(weight))), range(weight.dim())
                reach = sum((weight.size(dim) - 1) * weight.stride(dim) for dim in dims)
                if copy is not None and reach < copy.numel():
                    found[name] = copy.as_strided(weight.shape, weight.stride())
        return found

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
        writes = tuple(self.numbers[n] for n in alias.written(unit.nodes) if n in inputs)
        self.launches.append(
            Launch(unit.name, args, (), made, unpack=True, stream=unit.stream, writes=writes)
        )
        inside = set(unit.nodes)
        of: dict[Node, Buffer] = {}  # by where the memory comes from
        for node in outputs:
            for root in alias.roots(node, inside):
                if root.op != "get_attr":
                    self._share(
                        node, of.setdefault(root, self._number(root if root in inputs else node))
                    )
        self._note(unit, Place(GENERATED, "generated code"))

    def _share(self, node: Node, base: Buffer) -> None:
        if (own := self._number(node)) != base:
            self.shared.append((own, base))

    def generate(
        self, inner: GraphModule, inputs: Sequence[Node], config: Config | None = None
    ) -> _torch.Flat:
        """Code for a region that was extracted."""
        values, config = [n.meta["val"] for n in inputs], config or self.config
        with once(inner, values, config) as waited:
            found = generator.cache_hits()
            run = inductor.generate(
                inner,
                values,
                config,
                is_inference=self.role.is_inference,
                is_backward=self.role.is_backward,
                own=self._own,
                checked=self.role.checked and all(node.op == "placeholder" for node in inputs),
            )
        self.taken += waited and generator.cache_hits() > found
        return run

    def _calls(self, unit: Unit, place: Place) -> None:
        for node in unit.nodes:
            if not _is_part(node):
                self.launches.append(self._call(node))
        self._note(unit, place)

    def _call(self, node: Node) -> Launch:
        assert callable(node.target)
        name, stream = self._kernel(node.target), label.stream_of(node)
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
            made = list(parts)
        else:
            # Of a provider, the graph itself has no user.
            made = [node] if node.users or node.meta.get("provider") else []
            parts, outputs = [], [self._number(one) for one in made]
        for base in alias.viewed(node):
            for out in made:
                if base in self.numbers and base.op != "get_attr":
                    self._share(out, self.numbers[base])
        writes = tuple(self.numbers[n] for n in alias.written([node]))
        call = (name, args, kwargs, tuple(outputs), bool(parts), stream, writes)
        return Collective(*call, **_told(node)) if is_collective(node) else Launch(*call)

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
                    unit.stream,
                )
            )


def _told(node: Node) -> dict[str, Any]:
    """What a plan says of a collective."""
    values = [used.meta.get("val") for used in node.all_input_nodes]
    known = not any(_torch.symbols_of(value) for value in (*values, *node.args))
    return {
        "kind": kind_of(node),
        "type": ", ".join(map(meta.describe, values)),
        "nbytes": sum(map(nbytes, values)) if known else None,
        "line": meta.source_line(node),
    }


def nbytes(value: Any) -> int:
    """The size of a value in bytes; 0 where it is not known before it runs."""
    if not isinstance(value, Tensor) or _torch.symbols_of(value):
        return 0
    return value.numel() * value.element_size()


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


View = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]


def _view(tensor: Tensor) -> View:
    """Equal for two tensors that are the same view of the same memory."""
    address = tensor.untyped_storage().data_ptr()
    return (address, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)


def _span(view: View) -> tuple[int, int, int, torch.dtype]:
    """Equal for two tensors without holes that are the same memory."""
    address, offset, shape, _, dtype = view
    return address, offset, shape.numel(), dtype


def _order(
    units: Sequence[Unit], launched: Sequence[range], *, on_host: bool
) -> Iterator[tuple[int, int]]:
    """Pairs of launches (first, then) that must keep their order although no data says so: what
    the user asked for, calls with effects, and random numbers (a CUDA generator hands them out
    when a call is launched, the host's when it runs)."""
    at = {node: span[-1] for unit, span in zip(units, launched, strict=True) for node in unit.nodes}
    last: dict[str, int] = {}
    barrier, drawn = None, None
    for unit, span in zip(units, launched, strict=True):
        firsts = {at[first] for n in unit.nodes for first in n.meta.get("after", ()) if first in at}
        firsts |= {barrier} if barrier is not None else set()
        if unit.is_barrier:
            firsts.update(last.values())
            barrier = span[-1]
        if unit.is_random and on_host:
            firsts |= {drawn} if drawn is not None else set()
            drawn = span[-1]
        for launch in span:
            yield from ((first, launch) for first in sorted(firsts) if first < launch)
        last[unit.stream] = span[-1]
