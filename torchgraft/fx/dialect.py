"""The one dialect: functional core ATen, spelled one way whichever front end a graph came from.

Decomposition (which operators there are) is torch's core ATen set, less what Inductor declines to
decompose. Spelling (how a call is written) is done here: no aliases, one overload for tensor-scalar
arithmetic, scalars as numbers, arguments by position with defaults left out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft import _torch
from torchgraft.comm.ops import is_collective
from torchgraft.fx import meta

aten = torch.ops.aten

# They give their first input back; what they did for autograd or export is over by now.
_ALIASES = {
    aten.alias.default,
    aten.detach.default,
    aten.detach_.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.lift.default,
}
# Checks that front ends leave behind; the declared inputs are checked by the call itself.
_CHECKS = {aten._assert_tensor_metadata.default}
# torch.compile writes tensor-scalar arithmetic with the .Tensor overload; so do we.
_SCALAR_TWINS = {
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.div.Scalar_mode: aten.div.Tensor_mode,
}
# A 0-dim constant in these means the number in it, as long as the result's dtype agrees.
_NUMBER_TAKERS = {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.div.Tensor_mode,
    aten.fmod.Tensor,
    aten.remainder.Tensor,
}
_SCALAR_OVERLOADS = {
    aten.eq.Tensor: aten.eq.Scalar,
    aten.ne.Tensor: aten.ne.Scalar,
    aten.lt.Tensor: aten.lt.Scalar,
    aten.le.Tensor: aten.le.Scalar,
    aten.gt.Tensor: aten.gt.Scalar,
    aten.ge.Tensor: aten.ge.Scalar,
    aten.pow.Tensor_Tensor: aten.pow.Tensor_Scalar,
}


def _convolution(*args: Any) -> Tensor:
    """TorchScript traces `_convolution`, which is `convolution` and three backend switches."""
    result: Tensor = aten.convolution.default(*args[:9])
    return result


_OWN = {aten._convolution.default: _convolution}


Table = Mapping[Any, Callable[..., Any]]


def decompositions(keep: Collection[Any] = (), own: Table = MappingProxyType({})) -> dict[Any, Any]:
    """What AOTAutograd decomposes a graph by, for it to be in our dialect.

    Operators in `keep` (those that a converter takes) stay whole, if torch itself lets them;
    `own` are the user's.
    """
    return {**_without(keep, {**_torch.core_decompositions(), **_OWN}), **own}


def export_decompositions(
    keep: Collection[Any] = (), own: Table = MappingProxyType({})
) -> dict[Any, Any]:
    """The same for `ExportedProgram.run_decompositions`."""
    return {**_without(keep, {**_torch.export_decompositions(), **_OWN}), **own}


def _without(keep: Collection[Any], table: dict[Any, Any]) -> dict[Any, Any]:
    return {op: body for op, body in table.items() if op not in keep} if keep else table


def canonicalise(gm: GraphModule) -> None:
    """Respell every call in the one way, in place. Idempotent; values stay as they are."""
    graph = gm.graph
    before = meta.snapshot(graph)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _CHECKS:
            graph.erase_node(node)
        elif node.target in _ALIASES:
            _forward(node)
        else:
            node.target = _SCALAR_TWINS.get(node.target, node.target)
            _scalars(gm, node)
            _reversed_sub(node)
            node.args, node.kwargs = spell(node.target, node.args, node.kwargs)
    _drop_unused(gm)
    meta.refresh(gm, before, "canonicalise")


def spell(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by position where the schema allows it, defaults at the end left out."""
    if not _torch.is_op(target):
        return args, dict(kwargs)
    schema = target._schema.arguments
    positional = [a for a in schema if not a.kwarg_only]
    given = list(args)
    named = dict(kwargs)
    for argument in positional[len(given) :]:
        if argument.name in named:
            given.append(named.pop(argument.name))
        elif argument.has_default_value() and any(
            a.name in named for a in positional[len(given) + 1 :]
        ):
            given.append(argument.default_value)
        else:
            break
    while (
        given
        and positional[len(given) - 1].has_default_value()
        and _is(given[-1], positional[len(given) - 1].default_value)
    ):
        given.pop()
    defaults = {a.name: a.default_value for a in schema if a.kwarg_only and a.has_default_value()}
    kept = {k: v for k, v in named.items() if not (k in defaults and _is(v, defaults[k]))}
    return tuple(given), kept


def _is(value: Any, default: Any) -> bool:
    if isinstance(value, Node) or isinstance(default, Node):
        return False
    return type(value) is type(default) and bool(value == default)


def _forward(node: Node) -> None:
    source = node.args[0]
    assert isinstance(source, Node)
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)


def _scalars(gm: GraphModule, node: Node) -> None:
    """Write 0-dim constants as numbers where that gives the same result type."""
    for i, arg in enumerate(node.args[:2]):
        number = _number(gm, arg)
        if number is None or (node.target is aten.pow.Tensor_Tensor and _below_zero(number)):
            continue  # an integer to a negative number: as two tensors it is 0 or 1, else an error
        target = node.target
        if target in _SCALAR_OVERLOADS and i == 1:
            target = _SCALAR_OVERLOADS[target]
        elif target not in _NUMBER_TAKERS or i == 0:
            continue
        args = (*node.args[:i], number, *node.args[i + 1 :])
        with _torch.faking(gm.meta["fake_mode"]):
            result = target(*meta.value(args), **meta.value(node.kwargs))
        if meta.alike(result, node.meta.get("val")):
            node.target, node.args = target, args


def _below_zero(number: int | float | bool | complex) -> bool:
    return not isinstance(number, complex) and number < 0


def _reversed_sub(node: Node) -> None:
    """`-x + 1`, which is how TorchScript writes `1 - x`, is `sub(1, x)`; bit for bit the same.

    Not for integers: -x wraps around in the type of x, which `1.0 - x` would not.
    """
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return
    negated, number = node.args
    if (
        isinstance(negated, Node)
        and negated.target is aten.neg.default
        and len(negated.users) == 1
        and negated.meta["val"].is_floating_point()
        and isinstance(number, (int, float))
    ):
        node.target, node.args = aten.sub.Tensor, (number, negated.args[0])
        node.graph.erase_node(negated)


def _number(gm: GraphModule, arg: Any) -> int | float | bool | complex | None:
    if not isinstance(arg, Node) or arg.op != "get_attr" or "weight" in arg.meta:
        return None
    held = meta.attribute(gm, str(arg.target))
    if isinstance(held, Tensor) and held.ndim == 0 and held.device.type == "cpu":
        number: int | float | bool | complex = held.item()
        return number
    return None


def _drop_unused(gm: GraphModule) -> None:
    for node in reversed(gm.graph.nodes):
        if node.op == "get_attr" and not node.users:
            gm.graph.erase_node(node)


def is_random(node: Node) -> bool:
    """Whether a call draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema = node.target._schema  # type: ignore[union-attr]
    for number, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            given = node.kwargs.get(argument.name, argument.default_value)
            return bool(node.args[number] if number < len(node.args) else given)
    return True


def say_overloads(gm: GraphModule) -> None:
    """Name the overload of calls that leave it open, where there is one only: what a call does is
    known from that on, and so is whether it may go when nobody reads its result."""
    for node in gm.graph.nodes:
        if _torch.is_packet(node.target) and node.target.overloads() == ["default"]:
            node.target = node.target.default


def is_pure(node: Node) -> bool:
    """Whether a call with the same inputs always gives the same value and does nothing else."""
    if node.op != "call_function" or is_random(node) or is_collective(node):
        return False
    if node.target is operator.getitem or not hasattr(node.target, "_schema"):
        return not _torch.is_higher_order(node.target)
    return not node.target._schema.is_mutable and not node.is_impure(impure_random=False)


def is_view(node: Node) -> bool:
    """Whether a call's result may share memory with an input."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.op == "call_function"  # getitem and the like: whatever they are given
    return node.target is aten.reshape.default or any(r.alias_info for r in schema.returns)


def is_held(node: Node) -> bool:
    """Whether a value is a constant, a view of one or a copy."""
    while node.op == "call_function" and node.all_input_nodes:
        if not is_view(node) and node.target is not aten.clone.default:
            return False
        node = node.all_input_nodes[0]
    return node.op == "get_attr"
