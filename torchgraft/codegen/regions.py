"""Cutting a graph: what goes to the code generator, in as few pieces as dependencies allow."""

from __future__ import annotations

import dataclasses
import heapq
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from torchgraft import _torch
from torchgraft.comm.ops import is_collective, is_wait
from torchgraft.comm.overlap import overlapped
from torchgraft.fx import meta
from torchgraft.fx.dialect import is_random, is_view
from torchgraft.fx.label import stream_of
from torchgraft.op.define import explain_choice

aten = torch.ops.aten

GENERATED, KERNEL, ATEN = "generated", "kernel", "aten"

# Namespaces whose operators are torch's own: Inductor lowers them or calls them as ATen would.
_TORCH = {"aten", "prims", "prim", "inductor", "quantized_decomposed", "mkldnn", "onednn"}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a node runs, and why."""

    runs: str
    reason: str = ""
    kind: str = "generated"  # one of `report.KINDS`


PART = "part"
_CUSTOM, _UNSUPPORTED = "custom operator", "unsupported"
Placement = Callable[[Node], Place]


def place(node: Node) -> Place:
    """Where a node runs by its own nature."""
    target = node.target
    if target is operator.getitem and isinstance(node.args[0], Node):
        return place(node.args[0])
    if is_collective(node) or is_wait(node):
        return Place(KERNEL, "done by torch.distributed", "collective")
    if _torch.is_functionalised(target):
        return Place(
            KERNEL, "a custom operator that writes its inputs, launched on copies of them", _CUSTOM
        )
    if _torch.is_higher_order(target):
        return Place(
            ATEN, f"{getattr(target, '__name__', target)} takes whole graphs", _UNSUPPORTED
        )
    namespace = getattr(target, "namespace", "aten")
    if _torch.is_op(target) and namespace not in _TORCH:
        return Place(KERNEL, "a custom operator, launched as itself" + _chosen(node), _CUSTOM)
    if _may_be_one_image(node):
        return Place(KERNEL, "its layout depends on whether there is one image", _CUSTOM)
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    for value in _leaves(values):
        if (reason := _refused(value)) is not None:
            return Place(ATEN, reason, _UNSUPPORTED)
    return Place(GENERATED)


def _may_be_one_image(node: Node) -> bool:
    """Whether a call is a transposed convolution of one image or of several. torch chooses another
    library for one, so Inductor's code for it would be for several alone (torch 2.13)."""
    if node.target is not aten.convolution.default or not node.args[6]:
        return False
    images = node.args[0].meta["val"]  # type: ignore[union-attr]
    mode = getattr(images, "fake_mode", None)
    return mode is not None and images.ndim > 3 and _torch.may_be(mode, images.shape[0], 1)


def _chosen(node: Node) -> str:
    """`: ` and the kernel that a call of a declared operator gets, where that is known."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    choice = explain_choice(node.target, args, dict(kwargs))
    return f": {choice}" if choice else ""


def _leaves(values: list[Any]) -> list[Any]:
    leaves: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            leaves += _leaves(list(value))
        else:
            leaves.append(value)
    return leaves


def _refused(value: Any) -> str | None:
    """Why the code generator does not take a value, or None."""
    if _torch.has_unbacked(value):
        return "its size depends on data"
    if isinstance(value, GraphModule):
        return "it takes a whole graph"
    if not isinstance(value, Tensor):
        return None
    if value.dtype.is_complex:
        return "complex numbers"
    if value.is_quantized or value.layout != torch.strided:
        return f"{value.layout if not value.is_quantized else value.dtype} tensors"
    if value.device.type == "meta":
        return "meta tensors"
    if value.device.type == _torch.foreign_device():
        return f"no code is generated for the device {value.device.type}"
    return None


_MOVES = {aten.clone.default, aten.copy.default, aten._to_copy.default}


def keep_old(gm: GraphModule) -> None:
    """Save an input that is written before another write has read its old value.

    `old = x.clone(); x.copy_(y); y.copy_(old)`: the clone goes, because nothing shows it, and
    Inductor then reads x too late (torch 2.13 by itself, too).
    """
    writes = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    written: set[Any] = set()
    last = next(iter(reversed(gm.graph.find_nodes(op="placeholder"))), None)
    for write in writes:
        user, source = write, write.args[1]
        while isinstance(source, Node) and (source.target in _MOVES or is_view(source)):
            user, source = source, source.args[source.target is aten.copy.default]
        if isinstance(source, Node) and source in written and source is not write.args[0]:
            assert last is not None
            with gm.graph.inserting_after(last):
                saved = gm.graph.call_function(aten.clone.default, (source,))
            saved.meta["val"] = meta.compute(gm, saved)
            saved.meta["copy"] = "the old value of an input that is written"
            user.replace_input_with(source, saved)
        written.add(write.args[0])


@dataclasses.dataclass
class Unit:
    """Nodes launched together: a region for the generator, or one call."""

    name: str
    place: Place
    nodes: list[Node]

    @property
    def stream(self) -> str:
        return stream_of(self.nodes[0])

    @property
    def is_barrier(self) -> bool:
        """Whether the order against every other launch must be kept."""
        return any(map(_is_barrier, self.nodes))

    @property
    def is_random(self) -> bool:
        return any(map(is_random, self.nodes))


Side = tuple[bool, str]
"""Who runs a node (generated code or not), and on which stream."""


def cut(gm: GraphModule, placement: Placement) -> list[Unit]:
    """The graph as units, in an order that respects every dependency.

    A node's level counts the changes of side on the way to it, and the orders (`meta["after"]`);
    nodes of one level and one side make one region, if it is the generated one. So an opaque call
    or another stream splits only what really lies before it from what really lies after it. Where
    the graph was placed piece by piece (`codegen/spread.py`), each piece starts on a new level.
    A part of an input is there from the start, as the input is, and splits nothing.
    """
    places: dict[Node, Place] = {}
    levels: dict[Node, int] = {}
    sides: dict[Node, Side] = {}
    written: list[Node] = []
    floor: tuple[int, Side | None] = (0, None)  # the last barrier
    top, drawn = 0, 0
    piece, base = None, 0
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        places[node] = here = placement(node)
        if node.target is aten.copy_.default:
            written.append(node)
            continue
        side = sides[node] = (here.runs == GENERATED, stream_of(node))
        if node.meta.get("piece") != piece:
            piece, base = node.meta.get("piece"), top + 1
        level = max(base, floor[0] + (floor[1] is not None and side != floor[1]))
        for used in node.all_input_nodes:
            if used in levels and places[used].kind != PART:
                level = max(level, levels[used] + (side != sides[used]))
        for first in node.meta.get("after", ()):
            level = max(level, levels.get(first, -1) + 1)
        if is_random(node) and not side[0]:  # on ATen, numbers are drawn in the order of the graph
            level = drawn = max(level, drawn)
        if _is_barrier(node):
            level = max(level, top)
            floor = (level, side)
        levels[node] = level
        top = max(top, level)
    _place_writes(written, places, levels)
    return _units(places, levels)


def _is_barrier(node: Node) -> bool:
    """Whether the order of a call against all others must be kept."""
    if is_random(node) or node.target is aten.copy_.default:
        return False
    return node.is_impure(impure_random=False) and not is_collective(node)


def _place_writes(written: list[Node], places: dict[Node, Place], levels: dict[Node, int]) -> None:
    """Writes to inputs come after everything that may still read the old values: with the last
    region, if that is all there is on the last level."""
    last = max(levels.values(), default=0)
    sides = {(places[n].runs, stream_of(n)) for n, level in levels.items() if level == last}
    for node in written:
        here = (places[node].runs, stream_of(node))
        levels[node] = last + (here[0] != GENERATED or not sides <= {here})


def _units(places: dict[Node, Place], levels: dict[Node, int]) -> list[Unit]:
    regions: dict[Any, Unit] = {}
    units: list[Unit] = []
    for node, place in places.items():
        source = node.args[0] if node.target is operator.getitem else None
        if place.runs == GENERATED:
            key = (levels[node], stream_of(node), node.meta.get("between"))
            if key not in regions:
                regions[key] = Unit("", Place(GENERATED), [])
                units.append(regions[key])
            regions[key].nodes.append(node)
        elif (
            isinstance(source, Node) and source in levels and source.target is not operator.getitem
        ):
            continue  # part of its producer's launch; a part of a part is a launch of its own
        else:
            units.append(Unit(node.name, place, [node]))
    units = _sorted(units)
    for number, unit in enumerate(u for u in units if u.place.runs == GENERATED):
        unit.name = f"region{number}"
    return units


def _sorted(units: list[Unit]) -> list[Unit]:
    """The units in an order that respects every dependency and is else the graph's, which keeps
    memory as short-lived as the program does. Units come by the place of their first node."""
    of = {node: i for i, unit in enumerate(units) for node in unit.nodes}
    before: list[set[int]] = []
    keys: list[tuple[float, float, int]] = []
    barriers, drawn = 0, None
    for i, unit in enumerate(units):
        used = {
            n for node in unit.nodes for n in (*node.all_input_nodes, *node.meta.get("after", ()))
        }
        parts = {n.args[0] for n in used if n.target is operator.getitem and n not in of}
        firsts = {of[n] for n in used | parts if n in of} - {i}
        if unit.is_random and unit.place.runs != GENERATED:
            firsts |= {drawn} if drawn is not None else set()
            drawn = i
        before.append(firsts)
        if any(node.target is aten.copy_.default for node in unit.nodes):
            keys.append((float("inf"), 0, i))  # writes come when all has been read
        else:
            keys.append((barriers, float("inf") if unit.is_barrier else 0, i))
            barriers += unit.is_barrier
    if any(is_collective(unit.nodes[0]) for unit in units):
        return [units[i] for i in overlapped([unit.nodes for unit in units], before, keys)]
    after: dict[int, list[int]] = {}
    for i, firsts in enumerate(before):
        for first in firsts:
            after.setdefault(first, []).append(i)
    ready = [keys[i] for i, firsts in enumerate(before) if not firsts]
    heapq.heapify(ready)
    result: list[Unit] = []
    while ready:
        done = heapq.heappop(ready)[2]
        result.append(units[done])
        for i in after.get(done, ()):
            before[i].discard(done)
            if not before[i]:
                heapq.heappush(ready, keys[i])
    assert len(result) == len(units), "levels keep units free of circles"
    return result


def extract(gm: GraphModule, unit: Unit) -> tuple[GraphModule, list[Node], list[Node]]:
    """A region as a graph of its own, with its inputs and outputs among the outer nodes.

    Constants stay constants. Symbols that the region's sizes mention are made inputs where no
    input's size gives them.
    """
    inside = set(unit.nodes)
    inputs: dict[Node, None] = {}
    for node in unit.nodes:
        for used in node.all_input_nodes:
            if used not in inside and used.op != "get_attr":
                inputs[used] = None
    for node in _missing_symbols(gm, unit, list(inputs)):
        inputs[node] = None
    outputs = [n for n in unit.nodes if any(user not in inside for user in n.users)]
    graph, root = Graph(), torch.nn.Module()
    env: dict[Node, Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in unit.nodes:
        for used in node.all_input_nodes:
            if used.op == "get_attr" and used not in env:
                name = f"constant{len(env)}"
                setattr(root, name, meta.attribute(gm, str(used.target)))
                env[used] = graph.create_node("get_attr", name)
                env[used].meta = dict(used.meta)
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[n] for n in outputs))
    return _torch.graph_module(root, graph), list(inputs), outputs


def _missing_symbols(gm: GraphModule, unit: Unit, inputs: list[Node]) -> list[Node]:
    needed = {
        s
        for n in [*unit.nodes, *inputs]
        for v in _leaves([n.meta.get("val")])
        for s in _torch.symbols_of(v)
    }
    given = {_torch.expression(size) for n in inputs for size in _direct(n.meta.get("val"))}
    missing = {s for s in needed if s not in given}
    return [_provider(gm, s) for s in sorted(missing, key=str)] if missing else []


def _direct(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return list(value.shape)
    return [value] if isinstance(value, torch.SymInt) else []


def _provider(gm: GraphModule, symbol: Any) -> Node:
    """The node that gives a symbol's value: an input that is it, or a size of an input.

    A size node made here is marked `meta["provider"]`; it belongs to no unit and runs first.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    node: Node
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        given = node.op == "placeholder" or node.meta.get("provider")
        if given and isinstance(value, torch.SymInt) and _torch.expression(value) == symbol:
            return node
    for node in placeholders:
        for dim, size in enumerate(_direct(node.meta.get("val"))):
            if _torch.expression(size) == symbol:
                with gm.graph.inserting_after(placeholders[-1]):
                    made: Node = gm.graph.call_function(aten.sym_size.int, (node, dim))
                made.meta = {"val": size, "provider": True}
                return made
    raise AssertionError(f"no input gives {symbol}")
