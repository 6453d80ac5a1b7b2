"""Branches of a program on streams of their own, where a cost model says that it pays.

The graph is taken as atoms (what the generator would fuse), rows of atoms as tasks; the tasks are
placed on streams (`stream/place.py`), and each node is labelled with its stream and with the piece
that is launched as one. Order, proof and memory are then those of any labelled program.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft.codegen.atoms import Atom, atoms, split
from torchgraft.comm.ops import is_collective
from torchgraft.config import Config
from torchgraft.fx.cost import NOMINAL, Machine
from torchgraft.fx.dialect import is_random
from torchgraft.fx.label import stream_of
from torchgraft.plan import MAIN
from torchgraft.stream.place import Placement, Task, best, pieces, serial

aten = torch.ops.aten

MOST = 8
"""Streams of one program."""
GAIN = 0.05
"""The share of the predicted time that more streams must save."""
_MOST_SPLITS = 16
"""How many kernels are tried in parts."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """What was decided, in seconds as predicted: on one stream, and on several."""

    streams: int
    alone: float
    seconds: float
    cut: int = 0  # kernels that were cut because it pays

    def __str__(self) -> str:
        gain = self.alone / self.seconds
        cut = f", {self.cut} kernel{'s' * (self.cut != 1)} cut for it" if self.cut else ""
        return f"{self.streams}, predicted {gain:.2f} times as fast as one{cut}"


def wanted(config: Config, device: str) -> bool:
    """Whether the compiler places this program's nodes on streams."""
    if config.streams is None:
        return device in NOMINAL and config.captures
    return config.streams == "auto" and device in NOMINAL


def machine_for(device: str) -> Machine:
    """What the device can do, nominally: the same program is always placed alike."""
    nominal = NOMINAL[device]
    if device == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return dataclasses.replace(nominal, units=properties.multi_processor_count)
    threads = torch.get_num_threads()
    peak = nominal.flops * threads
    return dataclasses.replace(nominal, units=threads, flops=peak) if device == "cpu" else nominal


def spread(gm: GraphModule, is_generated: Callable[[Node], bool], machine: Machine) -> Spread | str:
    """Label the graph's nodes with streams, and put them into the order of launches; a reason
    where everything stays on one."""
    if (why := _fixed(gm, is_generated, machine)) is not None:
        return why
    work = _Work.of(atoms(gm, is_generated), machine)
    alone = serial(work.tasks)
    least = max(GAIN * alone, 2 * machine.wait)
    placed = best(work.tasks, MOST, machine.wait, alone - least)
    cut = 0
    for fork in work.forks():
        tried = work.without(fork, machine)
        within = (alone if placed is None else placed.seconds) - least
        if (found := best(tried.tasks, MOST, machine.wait, within)) is not None:
            work, placed, cut = tried, found, cut + 1
    if placed is None:
        return "1, as fast as more by prediction"
    _label(gm, work, placed)
    return Spread(len(set(placed.streams)), alone, placed.seconds, cut)


def _fixed(gm: GraphModule, is_generated: Callable[[Node], bool], machine: Machine) -> str | None:
    """Why the compiler may not place the nodes of a program."""
    if machine.units < 2:
        return "1, there is one thread"
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if stream_of(node) != MAIN or node.meta.get("after"):
            return "those of the program"
        if is_collective(node):
            return f"1, {node.name} is a collective"
        if node.target is not aten.copy_.default and (
            is_random(node) or node.is_impure(impure_random=False)
        ):
            return f"1, {node.name} draws random numbers or has effects"
        if is_generated(node) and not _crosses(node.meta.get("val")):
            return f"1, {node.name} gives a value that is no tensor"
    return None


def _crosses(value: object) -> bool:
    """Whether a value may pass from one region to another."""
    if isinstance(value, (list, tuple)):
        return all(map(_crosses, value))
    return value is None or isinstance(value, (Tensor, int, torch.SymInt))


@dataclasses.dataclass(frozen=True)
class _Work:
    """Atoms, rows of them (each reads the one before alone, and is read by the next alone), and
    the rows as tasks to place."""

    atoms: list[Atom]
    rows: list[list[Atom]]
    tasks: list[Task]

    @staticmethod
    def of(found: list[Atom], machine: Machine) -> _Work:
        readers = collections.Counter(first for atom in found for first in atom.before)
        row_of: list[int] = []
        rows: list[list[Atom]] = []
        for atom in found:
            first = next(iter(atom.before)) if len(atom.before) == 1 else None
            if first is not None and readers[first] == 1:
                row_of.append(row_of[first])
                rows[row_of[-1]].append(atom)
            else:
                row_of.append(len(rows))
                rows.append([atom])
        tasks = [
            Task(
                sum(atom.seconds(machine) for atom in row),
                sum(machine.seconds(atom.cost) for atom in row),
                tuple(sorted({row_of[first] for first in row[0].before})),
            )
            for row in rows
        ]
        return _Work(found, rows, tasks)

    def forks(self) -> list[Atom]:
        """Light atoms that several others read, the most costly first."""
        readers = collections.Counter(first for atom in self.atoms for first in atom.before)
        found = [
            atom
            for i, atom in enumerate(self.atoms)
            if readers[i] > 1 and len(atom.nodes) > 1 and not atom.own_kernel
        ]
        return sorted(found, key=lambda atom: -atom.cost.bytes)[:_MOST_SPLITS]

    def without(self, fork: Atom, machine: Machine) -> _Work:
        """The same work with one of its atoms in parts."""
        number = next(i for i, atom in enumerate(self.atoms) if atom.nodes is fork.nodes)
        return _Work.of(split(self.atoms, number), machine)


def _label(gm: GraphModule, work: _Work, placed: Placement) -> None:
    """Write streams and pieces on the nodes, which come in the order of launches then."""
    names = [MAIN, *(f"auto{i}" for i in range(1, MOST))]
    rank = {node: i for i, node in enumerate(gm.graph.nodes)}
    last = next(iter(reversed(gm.graph.nodes)))
    end = next((n for n in gm.graph.nodes if n.target is aten.copy_.default), last)
    for number, piece in enumerate(pieces(work.tasks, placed)):
        held = [node for task in piece for atom in work.rows[task] for node in atom.nodes]
        for node in sorted(held, key=rank.__getitem__):
            node.meta |= {"stream": names[placed.streams[piece[0]]], "piece": number}
            end.prepend(node)
