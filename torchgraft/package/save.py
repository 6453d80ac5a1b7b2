"""`compiled.save`: a compiled program as the members of a package."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from torchgraft import _torch
from torchgraft.compile import Compiled, Partial, captured_for
from torchgraft.config import Config
from torchgraft.errors import NotSavable
from torchgraft.fx import meta, returned
from torchgraft.fx.capture import Capture
from torchgraft.fx.prepare import Prepare
from torchgraft.link import Branch
from torchgraft.package import archive, codec, machine, tensors
from torchgraft.package.library import Library, LibraryLinker
from torchgraft.plan import Buffer, Free, Launch, Plan
from torchgraft.program import Program, written
from torchgraft.report import Report


@dataclasses.dataclass(frozen=True)
class Package:
    """What goes into a file: the head of its manifest, and its members."""

    head: dict[str, Any]
    members: dict[str, Any]

    def add(self, name: str, data: Any) -> None:
        """One more member, as JSON."""
        self.members[name] = _json(data)

    def write(self, path: str | os.PathLike[str]) -> str:
        """Write the file at once: a reader sees all of it or nothing."""
        return archive.write(path, self.head, self.members)

    def content(self) -> bytearray:
        """The bytes of the file."""
        with tempfile.TemporaryDirectory() as folder:
            self.write(path := Path(folder) / "program.graft")
            return bytearray(path.read_bytes())


def packaged(model: Any, inputs: Any, config: Config) -> tuple[Compiled, Package]:
    """`graft.compile` into a package alone."""
    taken = captured_for(model, inputs, None, config)
    if isinstance(taken, Partial):
        raise taken.why_not_saved()
    return ahead(*taken, config)


def ahead(
    name: str, front_end: str, captures: Sequence[Capture], config: Config
) -> tuple[Compiled, Package]:
    """A program that is compiled as a package alone, not for this process; it cannot be called."""
    compiled = Compiled(name, front_end, captures, config, link=False)
    package = pack(compiled, weights_of(captures))
    compiled.warn_excluded()
    return compiled, package


def weights_of(captures: Sequence[Capture]) -> dict[str, Tensor]:
    """The weights as they were captured."""
    return {
        name: getattr(taken.gm, weight.attribute)
        for taken in captures
        for name, weight in taken.weights.items()
    }


def constants_of(captures: Sequence[Capture]) -> dict[str, Tensor]:
    """The tensors in the captured graphs that are no weights, by their names in a package."""
    return {
        f"constant.{gear}.{name}": constant
        for gear, taken in enumerate(captures)
        for name, constant in taken.constants.items()
        if isinstance(constant, Tensor)
    }


def pack(compiled: Compiled, weights: Mapping[str, Tensor]) -> Package:
    """Compile a program again with its regions as libraries, and lay it out as a package."""
    prepare = Prepare()
    kinds: dict[str, tuple[str, bool]] = {}
    held = {name: tensor.detach() for name, tensor in weights.items()}
    for name, tensor in held.items():
        prepare.weight(name, tensor)
        kinds[name] = ("weight", True)
    for source in compiled.captures:
        for name, tensor in source.states.items():
            if name not in kinds:
                prepare.weight(name, tensor)
                kinds[name] = ("state", name in source.saved)
    for name, constant in constants_of(compiled.captures).items():
        prepare.weight(name, constant)
        kinds[name] = ("constant", False)
    with tempfile.TemporaryDirectory(prefix="torchgraft-") as folder:
        programs = []
        for gm, source in compiled.fresh(held):
            gm.meta |= {"prepare": prepare, "folder": folder, "borrowed": frozenset()}
            programs.append(compiled.build(gm, source, LibraryLinker))
        compiled.note_excluded(programs)
        writer = _Writer(prepare)
        gears = [
            {
                **codec.signature(compiled.signature(i)),
                "states": list(source.states),
                "program": writer.program(program),
                "static": sorted(program.linker.role.static),
                "written": sorted(written(program.gm)),
                "views": writer.views(program.gm, compiled.views(i, program), len(source.states)),
            }
            for i, (source, program) in enumerate(zip(compiled.captures, programs, strict=True))
        ]
        body: dict[str, Any] = {
            "name": compiled.name,
            "front_end": compiled.front_end,
            "mode": compiled.config.mode,
            "alias_outputs": compiled.config.alias_outputs,
            "gears": gears,
            "programs": writer.programs,
            "prepare": writer.prepared(),
            "weights": _weights(prepare, kinds),
        }
        stored = {entry["tensor"]: prepare.weights[entry["tensor"]] for entry in body["weights"]}
        members = {
            "program.json": _json(body),
            "graph.json": _json([_graph(program) for program in programs]),
            "report.json": _json([_report(program.report) for program in programs]),
            **{name: Path(path).read_bytes() for name, path in writer.libraries.items()},
            archive.WEIGHTS: tensors.write(stored),
        }
    return Package(_head(programs, writer), members)


def _head(programs: list[Program], writer: _Writer) -> dict[str, Any]:
    from torchgraft import __version__

    device = torch.device(programs[0].report.device)
    return {
        "format": archive.FORMAT,
        "version": archive.VERSION,
        "torchgraft": __version__,
        "torch": machine.release(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "requires": machine.requirements(device, bool(writer.libraries)),
        "libraries": machine.libraries(writer.custom.values()),
    }


def _json(data: Any) -> bytes:
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()


def _weights(prepare: Prepare, kinds: Mapping[str, tuple[str, bool]]) -> list[dict[str, Any]]:
    """One entry per weight; those that are the same view of the same memory share a tensor."""
    first: dict[Any, str] = {}
    listed = []
    for name, tensor in prepare.weights.items():
        kind, saved = kinds.get(name, ("constant", False))
        captured = name in kinds
        strided = tensor.layout == torch.strided
        stride = tensor.stride() if strided else ()
        at = (tensor.data_ptr(), tensor.dtype, tensor.shape, stride) if strided else name
        listed.append(
            {
                "name": name,
                "kind": kind,
                "tensor": first.setdefault(at, name) if tensor.numel() else name,
                "dtype": codec.value(tensor.dtype)["dtype"],
                "shape": list(tensor.shape),
                "stride": list(stride),
                "device": str(tensor.device),
                "saved": saved,
                "made": name in prepare.unknown,
                "sha256": None if captured or not strided else tensors.digest(tensor),
            }
        )
    return listed


class _Writer:
    """Numbers programs, libraries and values while they are written down."""

    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare
        self.programs: list[dict[str, Any]] = []
        self.libraries: dict[str, str] = {}
        self.custom: dict[str, Any] = {}  # operators that are not torch's own

    def program(self, program: Program) -> int:
        linker = program.linker
        launched = {launch.kernel for launch in program.plan.launches}
        entry = {
            "plan": codec.plan(program.plan),
            "kernels": {
                name: self._kernel(name, kernel.fn)
                for name, kernel in linker.kernels.items()
                if name in launched
            },
            "constants": {
                name: self._constant(program, name) for _, name in program.plan.constants
            },
        }
        self.programs.append(entry)
        return len(self.programs) - 1

    def _kernel(self, name: str, fn: Any) -> dict[str, Any]:
        if isinstance(fn, Library):
            bound = {n: self.prepare.value(tensor) for n, tensor in fn.constants.items()}
            return {
                "kind": "library",
                "member": self._library(fn.path),
                "device": str(fn.device),
                "constants": bound,
                "ints": list(fn.ints),
                "int_outputs": list(fn.int_outputs),
            }
        return self._target(name, fn)

    def _target(self, name: str, fn: Any) -> dict[str, Any]:
        found = codec.target(fn)
        if found is None:
            raise NotSavable(
                f"{name} is a Python function, not an operator",
                "Declare it with @graft.op, and call that.",
            )
        if found["kind"] == "op" and not codec.is_torchs(found["name"]):
            self.custom[fn.name()] = fn
        return dict(found)

    def _library(self, path: str) -> str:
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
        for file in (Path(path), Path(path).with_suffix(".json")):
            if file.exists():
                self.libraries[f"lib/{digest}{file.suffix}"] = str(file)
        return f"lib/{digest}.so"

    def _constant(self, program: Program, name: str) -> dict[str, Any]:
        linker = program.linker
        held = linker.constants[name]
        if isinstance(held, GraphModule):  # a branch that runs node by node
            held = linker.branch(name)
        if isinstance(held, Tensor):
            return {"kind": "value", "value": self.prepare.value(held)}
        if isinstance(held, Branch):
            index = self.program(held.program)
            dense = list(held.dense)
            return {"kind": "program", "program": index, "single": held.single, "dense": dense}
        return self._target(name, held)

    def prepared(self) -> dict[str, Any]:
        """The plan from weights to values."""
        return self._calls(self.prepare.graph, self.prepare.values)

    def views(
        self, gm: GraphModule, views: Mapping[int, tuple[int, Any]], states: int
    ) -> list[list[int]]:
        """Outputs that are views of inputs, each with the program that makes it from the inputs."""
        count = len(gm.graph.find_nodes(op="placeholder")) - states
        listed = []
        for output, (at, _) in views.items():
            graph = returned.alone(gm, meta.outputs_of(gm)[output], count)
            entry = self._calls(graph, list(graph.output_node().args))
            if entry not in self.programs:
                self.programs.append(entry)
            listed.append([output, at, self.programs.index(entry)])
        return listed

    def _calls(self, graph: Graph, values: Sequence[Any]) -> dict[str, Any]:
        """A graph of operators as an entry of `programs` that gives these of its nodes."""
        kernels, launches = dict[str, Any](), list[Launch]()
        numbers = {node: Buffer(i) for i, node in enumerate(graph.nodes)}
        outputs = tuple(numbers[node] for node in values)
        needed = set(values)
        for node in reversed(graph.nodes):
            if node in needed:
                needed |= set(node.all_input_nodes)
        for node in graph.nodes:
            if node.op == "call_function" and node in needed:
                name = str(node.target)
                kernels[name] = self._target(name, node.target)
                given: Any = (node.args, node.kwargs)
                args, kwargs = map_arg(given, lambda n: numbers[n])  # type: ignore[arg-type, return-value]
                launches.append(Launch(name, args, tuple(kwargs.items()), (numbers[node],)))
        inputs = tuple(numbers[n] for n in graph.find_nodes(op="placeholder"))
        steps = _with_frees(launches, {*outputs, *inputs})
        plan = Plan(inputs, (), tuple(steps), outputs)
        return {"plan": codec.plan(plan), "kernels": kernels, "constants": {}}


def _with_frees(launches: list[Launch], keep: set[Buffer]) -> list[Launch | Free]:
    """Each buffer freed behind its last use, so that loading never holds two copies of much."""
    last = {used: i for i, launch in enumerate(launches) for used in launch.reads}
    steps: list[Launch | Free] = []
    for i, launch in enumerate(launches):
        steps.append(launch)
        dying = sorted((b for b, at in last.items() if at == i and b not in keep), key=repr)
        steps += [Free(buffer) for buffer in dying]
    return steps


# --- The graph and the report, for readers ---


def _report(report: Report) -> dict[str, Any]:
    return dataclasses.asdict(dataclasses.replace(report, program=None)) | {"program": None}  # type: ignore[arg-type]


def _graph(program: Program) -> list[dict[str, Any]]:
    """Every node as JSON; operators by name, values by type and by their number in the plan."""
    numbers = program.linker.numbers
    return [
        {
            "name": node.name,
            "op": node.op,
            "target": codec.target(node.target)
            or str(getattr(node.target, "__name__", node.target)),
            "args": _shown(node.args),
            "kwargs": _shown(node.kwargs),
            "type": meta.describe(node.meta.get("val")),
            "val": _typed(node.meta.get("val")),
            "line": meta.source_line(node),
            "buffer": numbers[node].index if node in numbers else None,
        }
        for node in program.gm.graph.nodes
    ]


def _shown(item: Any) -> Any:
    if isinstance(item, Node):
        return {"n": item.name}
    if isinstance(item, (list, tuple)):
        parts = [_shown(part) for part in item]
        return parts if isinstance(item, list) else {"t": parts}
    if isinstance(item, Mapping):
        return {key: _shown(part) for key, part in item.items()}
    try:
        return codec.value(item)
    except NotSavable:
        return {"repr": str(codec.target(item) or item)}


def _typed(value: Any) -> Any:
    try:
        if isinstance(value, Tensor) and value.layout == torch.strided:
            sizes = [codec.expression(_torch.expression(size)) for size in value.shape]
            strides = [codec.expression(_torch.expression(step)) for step in value.stride()]
            return {
                "dtype": codec.value(value.dtype)["dtype"],
                "shape": sizes,
                "stride": strides,
                "device": str(value.device),
            }
        if isinstance(value, (list, tuple)):
            return [_typed(part) for part in value]
    except NotSavable:
        pass
    return None
