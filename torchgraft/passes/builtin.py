"""The built-in passes: small, each its own function, each keeps the program's results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft import _torch
from torchgraft.comm.ops import is_wait
from torchgraft.config import Config
from torchgraft.fx import alias, meta
from torchgraft.fx.cost import bytes_of
from torchgraft.fx.dialect import is_pure, is_view

aten = torch.ops.aten

_VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.permute.default,
    aten.slice.Tensor,
    aten.squeeze.dims,
    aten.squeeze.dim,
    aten.squeeze.default,
}
_COPIES = {aten.clone.default, aten._to_copy.default, aten.copy.default}
_BY_ONE = {aten.mul.Tensor, aten.div.Tensor}


def remove_noops(gm: GraphModule, example_inputs: Sequence[Any], config: Config) -> None:
    """Drop views to the same shape, casts to the same type, copies nobody can tell, x*1, x/1."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
            continue
        source = node.args[node.target is aten.copy.default]
        if not isinstance(source, Node):
            continue
        if not meta.alike(source.meta.get("val"), node.meta.get("val")):
            continue
        if (
            node.target in _VIEWS
            or (node.target in _COPIES and (not reaches_output(node) or _is_own(source)))
            or (node.target in _BY_ONE and _is_one(node.args[1]) and not reaches_output(node))
        ):
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)


def _is_own(source: Node) -> bool:
    """Whether a value is fresh memory that nobody else has: what a collective gave, which torch
    copies into the tensor that `torch.distributed.all_reduce(tensor)` was called with."""
    return is_wait(source) and len(source.users) == 1


def _is_one(arg: Any) -> bool:
    return isinstance(arg, (int, float)) and not isinstance(arg, bool) and arg == 1


def reaches_output(node: Node) -> bool:
    """Whether a caller could tell this value's memory from another's: it, or a view of it, is
    returned."""
    return any(
        user.op == "output" or (is_view(user) and reaches_output(user)) for user in node.users
    )


def dead_code(gm: GraphModule, example_inputs: Sequence[Any], config: Config) -> None:
    """Drop calls and constants that nothing uses and that do nothing else."""
    for node in reversed(gm.graph.nodes):
        if not node.users and (node.op == "get_attr" or is_pure(node)):
            gm.graph.erase_node(node)


def common_subexpressions(gm: GraphModule, example_inputs: Sequence[Any], config: Config) -> None:
    """Compute once what is computed twice from the same inputs; two outputs stay two tensors."""
    seen: dict[Any, Node] = {}
    for node in list(gm.graph.nodes):
        if node.op == "get_attr":
            key: Any = node.target
        elif is_pure(node):
            key = _key(node)
        else:
            continue
        first = seen.setdefault(key, node) if key is not None else node
        if first is not node and not (node.op == "call_function" and reaches_output(node)):
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)


def _key(node: Node) -> Any:
    """Equal for equal calls on one stream. Types count: 1, 1.0 and True are different arguments."""

    def freeze(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return tuple(map(freeze, arg))
        if isinstance(arg, dict):
            return tuple((k, freeze(v)) for k, v in arg.items())
        if isinstance(arg, float):
            return (float, arg.hex())
        return arg if isinstance(arg, Node) else (type(arg), arg)

    key = (node.target, freeze(node.args), freeze(node.kwargs), node.meta.get("stream"))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def fold_constants(gm: GraphModule, example_inputs: Sequence[Any], config: Config) -> None:
    """Compute at compile time what depends on frozen weights and constants alone, and of what
    depends on nothing, such as masks, what is better held than computed in each call."""
    better, changed = _better_held(gm), set(alias.written(gm.graph.nodes))
    for node in list(gm.graph.nodes):
        if not is_pure(node) or not (node.all_input_nodes or node in better) or node in changed:
            continue
        if _torch.has_unbacked(node.meta.get("val")):
            continue  # a size that data tells has a name, which others may have
        if is_view(node) and reaches_output(node):  # of the copy that the caller gets
            continue
        if any(used.op != "get_attr" for used in node.all_input_nodes):
            continue
        held = {n: meta.attribute(gm, str(n.target)) for n in node.all_input_nodes}
        if not all(isinstance(t, Tensor) for t in held.values()):
            continue
        if node not in better and _grows(node, held.values()):
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), held.__getitem__)
        assert callable(node.target)
        with torch.no_grad(), _torch.no_autocast():
            result = node.target(*args, **kwargs)
        if isinstance(result, Tensor):
            if "prepare" in gm.meta and not held:
                gm.meta["prepare"].constant(result)
            elif "prepare" in gm.meta:
                gm.meta["prepare"].folded(gm, node, result)
            _to_constant(gm, node, result)


LARGEST = 1 << 24
"""Bytes up to which what depends on nothing is held."""
MANY = 4
"""Calls that are more to do for each number than to read it; fewer are part of what reads it."""


def _better_held(gm: GraphModule) -> set[Node]:
    """Calls that make values out of nothing, and constants, for calls that are given an input, too:
    many calls, or those for attention, which reads its mask from memory."""
    known: set[Node] = set()
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if bytes_of(value) > LARGEST or _torch.has_unbacked(value):
            continue
        if node.op == "get_attr" or (is_pure(node) and known.issuperset(node.all_input_nodes)):
            known.add(node)
    found: set[Node] = set()
    for node in known:
        users = [user for user in node.users if user not in known]
        if not users:
            continue
        calls = _behind(node)
        masks = any("scaled_dot_product" in str(user.target) for user in users)
        many = sum(bool(call.all_input_nodes) and not is_view(call) for call in calls) >= MANY
        if (masks or many) and any(not call.all_input_nodes for call in calls):
            found |= calls
    return found


def _behind(node: Node) -> set[Node]:
    """A call, and those that its inputs come from."""
    found, ahead = set[Node](), [node]
    while ahead:
        if (one := ahead.pop()) not in found and one.op == "call_function":
            found.add(one)
            ahead += one.all_input_nodes
    return found


def _grows(node: Node, inputs: Any) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return True
    held = sum(t.numel() * t.element_size() for t in inputs)
    return bool(value.numel() * value.element_size() > 2 * held)


def _to_constant(gm: GraphModule, node: Node, value: Tensor) -> None:
    name = f"_folded_{node.name}"
    gm.register_buffer(name, value, persistent=False)
    first = next(n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr"))
    with gm.graph.inserting_before(first):  # constants come first, so that any node can read them
        constant = gm.graph.create_node("get_attr", name)
    constant.meta = {**node.meta, "weight": name}
    node.replace_all_uses_with(constant)
    gm.graph.erase_node(node)


def view_to_reshape(gm: GraphModule, example_inputs: Sequence[Any], config: Config) -> None:
    """Let a view copy where strides forbid viewing: later passes may change strides."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is aten.view.default:
            node.target = aten.reshape.default
