"""Who runs what: the user's wishes, what the generator takes, and what follows from a seam.

Only tensors and sizes cross a seam between generated code and ATen. A number or a truth value
that is computed on one side and used on the other draws its neighbour to ATen.
"""

from __future__ import annotations

import collections
import operator
import re
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft.codegen import inductor, regions, spread
from torchgraft.codegen.regions import ATEN, GENERATED, KERNEL, PART, Place
from torchgraft.comm.ops import is_collective, is_wait
from torchgraft.config import Config
from torchgraft.fx import mark, names
from torchgraft.report import Report

aten = torch.ops.aten


def decide(
    gm: GraphModule, config: Config, report: Report, known: Mapping[Node, Place]
) -> list[regions.Unit]:
    """Where every node runs, and the graph cut accordingly. `known` places come first."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    forced = _Forced(config)
    values = [n.meta.get("val") for n in gm.graph.nodes]
    machine = None if config.mode == "eager" else inductor.unavailable(values)
    if machine is not None:
        report.notes.append(machine)
    places: dict[Node, Place] = {}
    for node in calls:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, Node) and source in places:
            places[node] = places[source]
        else:
            places[node] = known.get(node) or _place(node, config, forced, machine)
    report.notes += forced.unused(calls, report.front_end)
    if config.captures and report.device == "cuda":
        _part(calls, places)
    _link(calls, places)
    if spread.wanted(config, report.device) and not any("piece" in node.meta for node in calls):
        found = spread.spread(
            gm, lambda node: places[node].runs == GENERATED, spread.machine_for(report.device)
        )
        if isinstance(found, spread.Spread) or config.streams == "auto":
            report.notes.append(f"streams: {found}")
    while True:
        units = regions.cut(gm, places.__getitem__)
        if not _too_small(units, places, config.min_block_size):
            return units
        _link(calls, places)


def _place(node: Node, config: Config, forced: _Forced, machine: str | None) -> Place:
    if is_collective(node) or is_wait(node):
        return regions.place(node)
    if config.mode == "eager":
        return Place(ATEN, "mode 'eager'", "mode")
    if (why := forced(node)) is not None:
        return why
    place = regions.place(node)
    if machine is not None and place.runs == GENERATED:
        return Place(ATEN, machine, "unsupported")
    if place.runs == ATEN and "declined" in node.meta:
        return Place(ATEN, f"{place.reason}; {node.meta['declined']}", "declined")
    return place


class _Forced:
    """What the config and the model's code say must run on torch."""

    def __init__(self, config: Config) -> None:
        self.ops = {str(name): False for name in config.torch_executed_ops}
        for name in self.ops:
            names.packet(name)  # raises where there is no such operator
        self.modules = {_text(module): False for module in config.torch_executed_modules}

    def __call__(self, node: Node) -> Place | None:
        if "copy" in node.meta:
            return Place(KERNEL, str(node.meta["copy"]), "copy")
        if "pinned" in node.meta:
            return Place(ATEN, str(node.meta["pinned"]), "pinned")
        if mark.in_fallback(node):
            return Place(ATEN, "inside `with graft.fallback()`", "forced block")
        for name in self.ops:
            source = node.meta.get("original_aten")  # what it was before it was decomposed
            if names.matches(node.target, name) or names.matches(source, name):
                self.ops[name] = True
                return Place(ATEN, f"{name} is in torch_executed_ops", "forced op")
        if self.modules:
            for path, kind in mark.modules_of(node):
                for wish in self.modules:
                    if _is_module(wish, path, kind):
                        self.modules[wish] = True
                        shown = f"module {path or 'the model'!r} ({kind.rpartition('.')[2]})"
                        return Place(ATEN, f"{shown} is in torch_executed_modules", "forced module")
        return None

    def unused(self, calls: Sequence[Node], front_end: str) -> list[str]:
        """A note for each wish that met no node, and a warning where none could."""
        notes = [
            f"torch_executed_ops: no node is {name}" for name, met in self.ops.items() if not met
        ]
        unmet = [name for name, met in self.modules.items() if not met]
        notes += [f"torch_executed_modules: no node is in {name}" for name in unmet]
        known = any(path for node in calls for path, _ in mark.modules_of(node))
        if unmet and front_end == "script" and not known:
            notes.append(_NO_MODULES)
            warnings.warn(f"torchgraft: {_NO_MODULES}", stacklevel=2)
        return notes


_NO_MODULES = (
    "torch_executed_modules has no effect: no node of this program says which module it is of. "
    "A ScriptModule that was frozen and then saved has forgotten it: save it unfrozen, or name "
    "operators in torch_executed_ops"
)


def _text(module: object) -> str:
    return f"{module.__module__}.{module.__qualname__}" if isinstance(module, type) else str(module)


def _is_module(wish: str, path: str, kind: str) -> bool:
    """A path, a class name (qualified or not), or a regular expression for either."""
    if wish in (path, kind, kind.rpartition(".")[2]):
        return True
    if kind.startswith("?.") and wish.endswith(kind[1:]):  # where it is defined was forgotten
        return True
    return any(re.fullmatch(wish, text) for text in (path, kind) if text)


def _part(calls: Sequence[Node], places: dict[Node, Place]) -> None:
    """Take the parts of an input apart before its regions, such as each layer's of one cache.

    Inside a region a part is a place that is written into the kernels which read it, so that those
    of each layer are others to compile; outside it is an address. A captured graph has no call for
    it. An input that is written stays whole: the generator must see what a write is to.
    """
    parts = collections.defaultdict[Node, list[Node]](list)
    for node in calls:
        source = node.args[0] if node.target is aten.select.int else None
        if (
            isinstance(source, Node)
            and source.op == "placeholder"
            and places[node].runs == GENERATED
            and not node.meta.get("after")  # then it is not there from the start
        ):
            parts[source].append(node)
    for source, found in parts.items():
        if len(found) > 1 and not any(user.target is aten.copy_.default for user in source.users):
            places |= dict.fromkeys(found, Place(KERNEL, "an address in an input", PART))


def _crosses(value: object) -> bool:
    """Whether a value may pass from generated code to ATen or back."""
    if isinstance(value, (list, tuple)):
        return all(map(_crosses, value))
    return value is None or isinstance(value, (Tensor, int, torch.SymInt))


def _link(calls: list[Node], places: dict[Node, Place]) -> None:
    """Draw to ATen what is tied to it by something that may not cross."""
    ties: dict[Node, list[Node]] = {}
    for node in calls:
        if node.target is not operator.getitem and not _crosses(node.meta.get("val")):
            for user in node.users:
                if user in places:
                    ties.setdefault(node, []).append(user)
                    ties.setdefault(user, []).append(node)
    todo = collections.deque(node for node in ties if places[node].runs != GENERATED)
    while todo:
        node = todo.popleft()
        for other in ties[node]:
            if places[other].runs == GENERATED:
                why = f"{node.name} gives or takes a value that is no tensor"
                places[other] = Place(ATEN, why, "non-tensor link")
                todo.append(other)


def _too_small(units: list[regions.Unit], places: dict[Node, Place], least: int) -> bool:
    found = False
    for unit in units:
        size = sum(node.target is not operator.getitem for node in unit.nodes)
        if unit.place.runs == GENERATED and size < least:
            found = True
            for node in unit.nodes:
                places[node] = Place(
                    ATEN, f"{size} nodes in a row, min_block_size is {least}", "small block"
                )
    return found
