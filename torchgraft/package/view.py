"""The graph and the report of a package, for readers: as objects, nothing is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.fx import Graph, GraphModule, Node

from torchgraft import _torch
from torchgraft.errors import BadPackage
from torchgraft.package import codec
from torchgraft.package.archive import Archive
from torchgraft.package.codec import field
from torchgraft.plan import Buffer
from torchgraft.program import Program
from torchgraft.report import Conversion, Placed, Report, Step, Trial
from torchgraft.run.host import Kernel

T = TypeVar("T")


@dataclasses.dataclass
class Unit:
    """A region, or a call on its own."""

    name: str
    nodes: list[Node]


@dataclasses.dataclass
class Links:
    """What pages and profiles ask a linker for, of a program that was loaded."""

    kernels: Mapping[str, Kernel]
    constants: Mapping[str, Any]
    numbers: dict[Node, Buffer] = dataclasses.field(default_factory=dict)
    units: list[Unit] = dataclasses.field(default_factory=list)

    def read(self, gm: GraphModule, placed: Sequence[Placed]) -> None:
        """Learn which node each value is, and which region it is computed in."""
        nodes = {node.name: node for node in gm.graph.nodes}
        self.numbers = {n: n.meta["buffer"] for n in nodes.values() if "buffer" in n.meta}
        units: dict[str, list[Node]] = {}
        for one in placed:
            if one.node in nodes:  # a branch's have a graph of their own
                units.setdefault(one.region, []).append(nodes[one.node])
        self.units = [Unit(name, members) for name, members in units.items()]


def attach(
    archive: Archive,
    number: int,
    place: codec.Device,
    bound: Callable[[], Program],
    program: Program,
) -> None:
    """Give a loaded program its graph, and what pages and profiles ask for."""
    if program.gm is not None:
        return
    if program.linker is None:  # C++ walks it: a profile does not
        program.linker = bound().linker
    program.gm = graph_module(archive.json("graph.json"), number, place)
    links: Any = program.linker
    links.read(program.gm, program.report.nodes)


def report(data: Any, index: int, name: str, front_end: str, mode: str) -> Report:
    """A report as it was; fields that this version does not know are left out."""
    entry = data[index] if index < len(data) else {}
    found = Report(name, front_end, mode, str(entry.get("device", "cpu")))
    found.steps = [_revive(Step, one) for one in entry.get("steps", [])]
    found.nodes = [_revive(Placed, one) for one in entry.get("nodes", [])]
    found.conversions = [_revive(Conversion, one) for one in entry.get("conversions", [])]
    found.notes = [str(note) for note in entry.get("notes", [])]
    found.trials = [_revive(Trial, one) for one in entry.get("trials", [])]
    found.seconds = {str(k): float(v) for k, v in entry.get("seconds", {}).items()}
    return found


def _revive(cls: type[T], data: Any) -> T:
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in known}
    try:
        return cls(**values)
    except TypeError as error:
        raise BadPackage(f"its report is of another version ({error})") from None


def graph_module(data: Any, index: int, device: codec.Device) -> GraphModule:
    """A graph as it ran, with the types of its values; it holds no weights and does not run."""
    graph, root = Graph(), torch.nn.Module()
    mode = _torch.new_fake_mode()
    nodes: dict[str, Node] = {}
    for entry in data[index] if index < len(data) else []:
        name, op = field(entry, "name", str), field(entry, "op", str)
        args, kwargs = _read(entry.get("args"), nodes, device), entry.get("kwargs")
        kwargs = {key: _read(arg, nodes, device) for key, arg in (kwargs or {}).items()}
        if op == "output":
            node = graph.output(args[0])
        elif op == "call_function":
            node = graph.create_node(op, _target(entry.get("target")), args, kwargs, name)
        elif op in ("placeholder", "get_attr"):
            target = field(entry, "target", str)
            if op == "get_attr" and not hasattr(root, target):
                setattr(root, target, None)
            node = graph.create_node(op, target, (), {}, name)
        else:
            raise BadPackage(f"a graph has a node of kind {op!r}")
        node.meta["val"] = _value(mode, entry.get("val"), device)
        if entry.get("line"):
            file, _, line = str(entry["line"]).rpartition(":")
            node.meta["stack_trace"] = f'File "{file}", line {line}'
        if isinstance(entry.get("buffer"), int):
            node.meta["buffer"] = Buffer(entry["buffer"])
        nodes[name] = node
    made = GraphModule(root, graph)
    made.meta["fake_mode"] = mode
    return made


def _value(mode: Any, data: Any, device: codec.Device) -> Any:
    if isinstance(data, list):
        return tuple(_value(mode, part, device) for part in data)
    if data is None:
        return None
    sizes, steps = (
        [codec.to_expression(part) for part in field(data, key, list)]
        for key in ("shape", "stride")
    )
    dtype = codec.named("dtype", field(data, "dtype", str))
    return _torch.fake(mode, sizes, steps, dtype, device(field(data, "device", str)))


def _target(data: Any) -> Callable[..., Any]:
    found = codec.to_target(data) if isinstance(data, dict) else None
    if found is not None:
        return found  # type: ignore[no-any-return]
    name = data.get("name") if isinstance(data, dict) else data

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise BadPackage(f"{name} is not here")

    missing.__name__ = str(name)
    return missing


def _read(data: Any, nodes: dict[str, Node], device: codec.Device) -> Any:
    if isinstance(data, list):
        return [_read(part, nodes, device) for part in data]
    if isinstance(data, dict) and set(data) == {"t"}:
        return tuple(_read(part, nodes, device) for part in data["t"])
    if isinstance(data, dict) and set(data) == {"n"}:
        if data["n"] not in nodes:
            raise BadPackage(f"a graph uses {data['n']!r} before it is computed")
        return nodes[data["n"]]
    if isinstance(data, dict) and set(data) == {"repr"}:
        return str(data["repr"])
    return codec.to_value(data, device)
