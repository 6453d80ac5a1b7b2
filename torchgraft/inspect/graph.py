"""A graph as plain rows: what every dump and page is made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchgraft.fx import meta
from torchgraft.fx.edit import target_name
from torchgraft.fx.mark import modules_of


@dataclasses.dataclass(frozen=True)
class Row:
    """One node. `args` is the call as a reader writes it, `inputs` the names of nodes in it."""

    name: str
    kind: str  # "input", "constant", "call", "output"
    op: str
    type: str
    args: str
    inputs: tuple[str, ...]
    module: str = ""
    line: str = ""


_KINDS = {"placeholder": "input", "get_attr": "constant", "output": "output"}


def row(node: Node, call: tuple[Any, Any, Any] | None = None) -> Row:
    """The row of a node, as it is or as an earlier `call` (target, args, kwargs) says it was."""
    target, args, kwargs = call or (node.target, node.args, node.kwargs)
    used: dict[str, None] = {}
    map_arg((args, kwargs), lambda n: used.setdefault(n.name))
    kind = _KINDS.get(node.op, "call")
    if kind == "output":
        shown = repr(args[0])
    else:
        parts = [repr(a) for a in args] + [f"{k}={v!r}" for k, v in kwargs.items()]
        shown = ", ".join(parts)
    modules = modules_of(node)
    return Row(
        node.name,
        kind,
        target_name(target) if kind == "call" else str(target),
        "" if kind == "output" else meta.describe(node.meta.get("val")),
        shown,
        tuple(used),
        modules[-1][0] if modules else "",
        meta.source_line(node) or "",
    )


def rows(gm: GraphModule) -> list[Row]:
    """Every node of a graph, in order."""
    return [row(node) for node in gm.graph.nodes]


def shape_of(value: Any) -> list[int | str] | None:
    """The sizes of a tensor; a symbolic one is its name."""
    if not isinstance(value, Tensor):
        return None
    return [size if isinstance(size, int) else str(size) for size in value.shape]


def attributes(node: Node) -> Mapping[str, Any]:
    """The arguments of a call that are no nodes, by the names of its schema."""
    schema = getattr(node.target, "_schema", None)
    names = [arg.name for arg in schema.arguments] if schema is not None else []
    given = {names[i] if i < len(names) else str(i): arg for i, arg in enumerate(node.args)}
    given.update(node.kwargs)
    return {name: arg for name, arg in given.items() if not _nodes_in(arg)}


def _nodes_in(arg: Any) -> bool:
    found: list[Node] = []
    map_arg(arg, found.append)
    return bool(found)
