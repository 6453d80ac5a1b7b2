"""Keeping a graph true between passes: checking it, and `meta["val"]` on every node."""

from __future__ import annotations

import linecache
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from torchgraft import _torch
from torchgraft.errors import BrokenGraph

Snapshot = dict[Node, tuple[Any, Any, Any]]


def snapshot(graph: Graph) -> Snapshot:
    """What each node computes, to tell later which ones changed."""
    return {node: (node.target, node.args, node.kwargs) for node in graph.nodes}


def value(arg: Any) -> Any:
    """An argument with each node in it replaced by its fake value."""
    return torch.fx.node.map_arg(arg, lambda node: node.meta.get("val"))


def compute(gm: GraphModule, node: Node) -> Any:
    """The fake value that a node gives, from its inputs' values."""
    mode = gm.meta["fake_mode"]
    if node.op == "get_attr":
        held = attribute(gm, str(node.target))
        return _torch.fake_of(mode, held) if isinstance(held, Tensor) else held
    assert callable(node.target)
    with _torch.faking(mode):
        return node.target(*value(node.args), **value(node.kwargs))


def attribute(gm: GraphModule, path: str) -> Any:
    """What a `get_attr` node's target names."""
    held: Any = gm
    for part in path.split("."):
        held = getattr(held, part)
    return held


def check(
    gm: GraphModule, name: str, inputs: int, outputs: int, before: Snapshot | None = None
) -> None:
    """Raise `BrokenGraph` unless the graph is well formed; `name` is the pass to blame. What was
    in the graph `before` may write in place, if torch itself put it there."""
    seen: set[Node] = set()
    ends: list[Node] = []
    for node in gm.graph.nodes:
        for used in node.all_input_nodes:
            if used not in seen:
                known = "later in the graph" if used in set(gm.graph.nodes) else "not in the graph"
                raise BrokenGraph(name, node.name, f"it uses {used.name!r}, which is {known}")
        if node.op == "get_attr" and not _has(gm, str(node.target)):
            raise BrokenGraph(name, node.name, f"the module has no attribute {node.target!r}")
        if node.op in ("call_module", "call_method"):
            raise BrokenGraph(
                name, node.name, f"{node.op} {node.target!r}; a graph holds operator calls only"
            )
        if _writes(node) and not _same(node, before or {}):
            raise BrokenGraph(
                name,
                node.name,
                f"{node.target} writes in place; a graph computes new values, and "
                f"aten.copy_.default(input, value) is its one way to write an input",
            )
        if node.op == "output":
            ends.append(node)
        seen.add(node)
    count = sum(node.op == "placeholder" for node in seen)
    if count != inputs:
        raise BrokenGraph(name, "placeholder", f"{inputs} inputs became {count}")
    if len(ends) != 1:
        raise BrokenGraph(name, "output", f"there are {len(ends)} output nodes, there must be one")
    if not isinstance(ends[0].args[0], (tuple, list)) or len(ends[0].args[0]) != outputs:
        raise BrokenGraph(name, "output", f"it must return a tuple of {outputs} values")
    gm.graph.lint()


def check_outputs(gm: GraphModule, name: str, before: Sequence[Any]) -> None:
    """Raise `BrokenGraph` where an output has another shape or type than it had."""
    for i, (old, new) in enumerate(zip(before, output_values(gm), strict=True)):
        if not _same_type(old, new):
            what = f"output {i} was {_typed(old)} and is {_typed(new)} now"
            raise BrokenGraph(
                name, "output", f"{what}; what a program returns is not its to change"
            )


def _same_type(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and one.device == other.device
        return same and _same_sizes(one.shape, other.shape)
    return isinstance(one, Tensor) == isinstance(other, Tensor)


def _typed(value: Any) -> str:
    if not isinstance(value, Tensor):
        return describe(value)
    return f"{describe(value)} on {value.device}"


def _writes(node: Node) -> bool:
    """Whether one of torch's operators writes to an argument; copying into an input is allowed."""
    if node.op != "call_function" or getattr(node.target, "namespace", "") != "aten":
        return False
    into = node.args[0] if node.args else None
    if node.target is torch.ops.aten.copy_.default and getattr(into, "op", "") == "placeholder":
        return False
    return bool(node.target._schema.is_mutable)  # type: ignore[union-attr]


def _same(node: Node, before: Snapshot) -> bool:
    return before.get(node) == (node.target, node.args, node.kwargs)


def refresh(gm: GraphModule, before: Snapshot, name: str) -> int:
    """Recompute the values of new and changed nodes and of what depends on them; how many."""
    changed: set[Node] = set()
    count = 0
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if _same(node, before) and "val" in node.meta and changed.isdisjoint(node.all_input_nodes):
            continue
        old = node.meta.get("val")
        kept = node in before and before[node][0] is node.target
        try:
            made = _recompute(gm, node)
            node.meta["val"] = _named_as(old, made, node, gm) if kept else made
        except BrokenGraph:
            raise
        except Exception as error:
            raise BrokenGraph(name, node.name, f"{node.format_node()}: {error}") from error
        count += 1
        if not alike(old, node.meta["val"]):
            changed.add(node)
    return count


def _named_as(old: Any, made: Any, node: Node, gm: GraphModule) -> Any:
    """A value anew; a size that its own call finds in data (`nonzero`) keeps its name, which
    computing it again changes, and by which later nodes and the outputs know it."""
    if not isinstance(made, Tensor) or not isinstance(old, Tensor) or made.ndim != old.ndim:
        return made
    known = set().union(*(_torch.unbacked(n.meta.get("val")) for n in node.all_input_nodes))
    pairs = list(zip(old.shape, made.shape, strict=True))
    found = [_torch.has_unbacked(was) and _torch.unbacked(now) - known for was, now in pairs]
    rest = [pair for pair, is_found in zip(pairs, found, strict=True) if not is_found]
    if not any(found) or not all(_same_sizes([was], [now]) for was, now in rest):
        return made
    with _torch.faking(gm.meta["fake_mode"]):
        return old.to(made.dtype)


def _recompute(gm: GraphModule, node: Node) -> Any:
    """`compute`, where a view of what has other strides now becomes a reshape, which may copy."""
    if node.target is not torch.ops.aten.view.default:
        return compute(gm, node)
    try:
        return compute(gm, node)
    except (ValueError, RuntimeError):
        node.target = torch.ops.aten.reshape.default
        return compute(gm, node)


def alike(one: Any, other: Any) -> bool:
    """Whether two fake values have the same type, shape, strides and device."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (
            one.dtype == other.dtype
            and one.device == other.device
            and one.layout == other.layout
            and _same_sizes(one.shape, other.shape)
            and (one.layout != torch.strided or _same_sizes(one.stride(), other.stride()))
        )
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False  # a size beside the tensor that it is one of
    if isinstance(one, _torch.SYMBOLIC) or isinstance(other, _torch.SYMBOLIC):
        return bool(_torch.expression(one) == _torch.expression(other))
    return type(one) is type(other) and one == other


def _same_sizes(one: Any, other: Any) -> bool:
    return [_torch.expression(s) for s in one] == [_torch.expression(s) for s in other]


def _has(gm: GraphModule, path: str) -> bool:
    try:
        attribute(gm, path)
    except AttributeError:
        return False
    return True


def outputs_of(gm: GraphModule) -> list[Any]:
    """The values that the graph returns: nodes and constants."""
    output = next(iter(reversed(gm.graph.nodes)))
    return list(output.args[0])


def output_values(gm: GraphModule) -> list[Any]:
    """The fake values of what the graph returns, constants as they are."""
    return [value(output) for output in outputs_of(gm)]


def inputs_of(gm: GraphModule) -> list[Any]:
    """The fake values of the graph's inputs."""
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


def addresses(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Where the tensors' memory is; a sparse one has none of its own."""
    strided = [t for t in tensors if t.layout == torch.strided]
    return frozenset(t.untyped_storage().data_ptr() for t in strided)


def drop_unused(gm: GraphModule) -> None:
    """Let go of tensors that no node reads any more, such as weights that were folded."""
    used = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
    for name in [*gm._buffers, *gm._parameters]:
        if name not in used:
            delattr(gm, name)


_ORIGIN = ("stack_trace", "nn_module_stack", "custom", "original_aten")
_PLACE = ("stream", "after", "scope")


def inherit(node: Node, origin: Node, *, place: bool = True) -> None:
    """Let a node say that it comes from where `origin` comes from: line, module, marks; and, with
    `place`, run where and when it would have."""
    for key in (*_ORIGIN, *_PLACE) if place else _ORIGIN:
        if key in origin.meta:
            node.meta.setdefault(key, origin.meta[key])


def call(gm: GraphModule, origin: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new call, with its value, where the graph inserts; it comes from where `origin` does."""
    made = gm.graph.call_function(target, args, kwargs)
    inherit(made, origin)
    made.meta["val"] = compute(gm, made)
    return made


PACKAGE = str(pathlib.Path(__file__).parents[1]) + "/"
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source_line(node: Node) -> str | None:
    """`file:line` of the model code that a node comes from, where it is known: the innermost line
    outside torch and torchgraft themselves, if there is one."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    theirs = ("<eval_with_key>", PACKAGE)  # the first is code that torch.fx wrote, as in a branch
    own = [f for f in frames if "/torch/" not in f[0] and not f[0].startswith(theirs)] or frames
    if not own:
        return None
    file, line = own[-1]
    if file.startswith("<torchgraft"):  # generated from TorchScript: the comment names the source
        comment = linecache.getline(file, int(line)).rpartition("  # ")[2].strip()
        return comment.partition(" in ")[0] or None
    return f"{file}:{line}"


def describe(value: Any) -> str:
    """A value's type as a reader wants it: `f32[2, 3]`, `int`, `(f32[2], i64[])`."""
    if isinstance(value, Tensor):
        sizes = ", ".join(str(s) for s in value.shape)
        return f"{_SHORT.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{sizes}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(describe, value))})"
    return type(value).__name__


_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
