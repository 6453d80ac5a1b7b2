"""Asking the converters: every call once, in order, linear in the size of the graph."""

from __future__ import annotations

import collections
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from torchgraft import _torch
from torchgraft.config import Config
from torchgraft.convert.define import Converter, candidates
from torchgraft.convert.net import CURRENT, Net, Value
from torchgraft.errors import BadConversion, ConverterFailed, Declined, GraftError
from torchgraft.fx import meta
from torchgraft.fx.dialect import is_view
from torchgraft.fx.edit import target_name
from torchgraft.passes.builtin import dead_code, reaches_output
from torchgraft.report import Conversion

aten = torch.ops.aten


def convert(
    gm: GraphModule, config: Config, pinned: Collection[str] = ()
) -> tuple[list[Conversion], dict[str, str]]:
    """Replace every call that a converter takes, in place.

    Gives what was asked and answered, and by the name of each replaced node the name of what
    stands for it now. Nodes named in `pinned` stay as they are. A converter also sees the calls
    that others made, never those that came from itself.
    """
    table = candidates(config)
    log: list[Conversion] = []
    became: dict[str, str] = {}
    if not table:
        return log, became
    before = meta.snapshot(gm.graph)
    todo: collections.deque[tuple[Node, tuple[Converter, ...]]] = collections.deque(
        (node, ()) for node in gm.graph.nodes if node.target in table
    )
    while todo:
        node, line = todo.popleft()
        if node.name in pinned:
            continue
        for one in table[node.target]:
            if one in line:
                continue
            name, net, reason = node.name, Net(gm, node), None
            try:
                results = _ask(one, net)
            except Declined as error:
                net.drop()
                reason = error.reason
            log.append(_entry(node, one, reason))
            if reason is not None:
                node.meta["declined"] = f"{one.name}: {reason}"
                continue
            became[name] = _replace(gm, net, results, before)
            before.update((n, (n.target, n.args, n.kwargs)) for n in net.made)  # values are known
            todo.extendleft(
                (made, (*line, one)) for made in reversed(net.made) if made.target in table
            )
            break
    if became:
        meta.refresh(gm, before, "converters")
        dead_code(gm, (), config)
    return log, became


def unheard(gm: GraphModule, config: Config) -> list[str]:
    """A note for each converter of an operator that torch itself takes apart while tracing."""
    present = {node.target for node in gm.graph.nodes}
    return [
        f"converter {one}: torch takes {op} apart while it traces; convert its parts instead"
        for op, found in candidates(config).items()
        if op not in present
        for one in found
        if one.ops == (op,) and _torch.is_composite(op)
    ]


def _entry(node: Node, one: Converter, reason: str | None) -> Conversion:
    return Conversion(
        node.name, target_name(node.target), one.name, one.where, reason, meta.source_line(node)
    )


def _ask(one: Converter, net: Net) -> list[Node | None]:
    """The nodes that a converter gives for a call; raises `Declined` where it does not."""
    node = net.node
    args, kwargs = map_aggregate((node.args, node.kwargs), _value)
    try:
        if one.when is not None:
            answer = one.when(*args, **kwargs)
            if answer is not True:
                raise Declined(answer if isinstance(answer, str) else "when= said no")
        scope = CURRENT.set(net)
        try:
            given = one.fn(net, *args, **kwargs)
        finally:
            CURRENT.reset(scope)
        if given is NotImplemented:
            raise Declined("NotImplemented")
    except (Declined, BadConversion):
        raise
    except GraftError:
        net.drop()
        raise
    except Exception as error:
        net.drop()
        raise ConverterFailed(str(one), _described(node), error) from error
    return _checked(one, net, given)


def _value(arg: Any) -> Any:
    return Value(arg) if isinstance(arg, Node) else arg


def _described(node: Node) -> str:
    line = meta.source_line(node)
    return f"{node.format_node()}" + (f"  # {line}" if line else "")


def _checked(one: Converter, net: Net, given: Any) -> list[Node | None]:
    """The results as nodes, each of the type of what it stands for."""
    wanted = net.node.meta["val"]
    many = isinstance(wanted, (tuple, list))
    results: Sequence[Any] = given if many and isinstance(given, (tuple, list)) else [given]
    wants = list(wanted) if many else [wanted]
    if many and any(user.target is not operator.getitem for user in net.node.users):
        raise Declined("its results are used as one list")
    if len(results) != len(wants):
        raise BadConversion(
            str(one), _described(net.node), f"{len(wants)} results", f"{len(results)} ({given!r})"
        )
    nodes: list[Node | None] = []
    used = {user.args[1] for user in net.node.users if user.target is operator.getitem}
    for i, (result, want) in enumerate(zip(results, wants, strict=True)):
        node = result.node if isinstance(result, Value) else result
        if node is None and many and i not in used:
            nodes.append(None)  # nobody reads it
            continue
        place = f"result {i} " if many else ""
        if not isinstance(node, Node):
            got = f"{place}{node!r}, which is no value of the graph"
            raise BadConversion(str(one), _described(net.node), _type(want), got)
        if not same_type(want, node.meta.get("val")):
            got = f"{place}{_type(node.meta.get('val'))} from {node.name!r}"
            raise BadConversion(str(one), _described(net.node), _type(want), got)
        nodes.append(node)
    return nodes


def same_type(want: Any, got: Any) -> bool:
    """Whether two fake values agree in dtype, device and (symbolic) shape."""
    if isinstance(want, Tensor) and isinstance(got, Tensor):
        return (want.dtype, want.device, want.ndim) == (got.dtype, got.device, got.ndim) and all(
            _same_size(a, b) for a, b in zip(want.shape, got.shape, strict=True)
        )
    return meta.alike(want, got)


def _same_size(one: Any, other: Any) -> bool:
    one, other = _torch.expression(one), _torch.expression(other)
    # Two spellings of one expression (`2*s0` and `s0 + s0`) differ by nothing.
    return bool(one == other) or getattr(one - other, "is_zero", False) is True


def _type(value: Any) -> str:
    where = f" on {value.device}" if isinstance(value, Tensor) else ""
    return f"{meta.describe(value)}{where}"


def _replace(gm: GraphModule, net: Net, results: list[Node | None], before: meta.Snapshot) -> str:
    """Let the results take the place of the node; the name of the (first) one."""
    node = net.node
    name = next((r.name for r in results if r is not None), "")
    if isinstance(node.meta["val"], (tuple, list)):
        for user in list(node.users):
            if user.target is operator.getitem:
                part = results[user.args[1]]  # type: ignore[index]
                assert part is not None
                _stand(net, user, part, before)
                gm.graph.erase_node(user)
    else:
        assert results[0] is not None
        name = _stand(net, node, results[0], before).name
    gm.graph.erase_node(node)
    return name


def _stand(net: Net, node: Node, result: Node, before: meta.Snapshot) -> Node:
    """Let `result` stand for `node`. A caller must not get an old tensor for a new one.

    Users of a value of exactly the same type, strides included, keep their own: `before` is told.
    """
    if result not in net.made and not is_view(node) and reaches_output(node):
        result = net.add(aten.clone.default, Value(result)).node
    users = node.replace_all_uses_with(result)
    if meta.alike(node.meta["val"], result.meta["val"]):
        before.update((n, (n.target, n.args, n.kwargs)) for n in users if n in before)
    return result
