"""`graft.Graph`: what the author of a pass holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchgraft.config import Config
from torchgraft.errors import BadValue, NotFound
from torchgraft.fx import meta


class Graph:
    """A graph to read and to edit in place. `graph.gm` is the `torch.fx.GraphModule` under it.

    A new node gets its value (`node.meta["val"]`: shape, dtype, device) when it is made, so a
    pass can read it at once. Nodes that nothing uses any more are removed after the pass.
    """

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any], config: Config) -> None:
        self.gm, self.example_inputs, self.config = gm, example_inputs, config
        self._origin: Node | None = None  # where `before` is working

    @property
    def nodes(self) -> list[Node]:
        """Every operator call, in order."""
        return [node for node in self.gm.graph.nodes if node.op == "call_function"]

    @property
    def inputs(self) -> list[Node]:
        return [node for node in self.gm.graph.nodes if node.op == "placeholder"]

    @property
    def outputs(self) -> list[Any]:
        return meta.outputs_of(self.gm)

    def all(self, target: Any) -> list[Node]:
        """Every call of an overload (`aten.add.Tensor`) or of a packet's overloads (`aten.add`)."""
        return [node for node in self.nodes if _calls(node, target)]

    def one(self, target: Any) -> Node:
        """The only call of `target`; `NotFound` when there is none or more than one."""
        found = self.all(target)
        if len(found) != 1:
            present = sorted({str(node.target) for node in self.nodes})
            raise NotFound(str(target), len(found), present)
        return found[0]

    @contextlib.contextmanager
    def before(self, node: Node) -> Iterator[None]:
        """Inside, `call` puts nodes just before `node`, with its source line."""
        outer, self._origin = self._origin, node
        try:
            with self.gm.graph.inserting_before(node):
                yield
        finally:
            self._origin = outer

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new call of `target`: after the last of its inputs, or where `before` says."""
        if not callable(target):
            raise BadValue("graph.call", target, "an operator such as torch.ops.aten.mul.Tensor")
        if self._origin is not None:
            return self._make(target, args, kwargs, self._origin)
        used: list[Node] = []
        map_arg((args, kwargs), used.append)
        after = [*used, *self.gm.graph.find_nodes(op="placeholder")]
        if not after:
            with self.gm.graph.inserting_before(next(iter(self.gm.graph.nodes))):
                return self._make(target, args, kwargs, None)
        last = max(after)  # nodes compare by their place in the graph
        with self.gm.graph.inserting_after(last):
            return self._make(target, args, kwargs, last)

    def _make(self, target: Any, args: Any, kwargs: Any, origin: Node | None) -> Node:
        node = self.gm.graph.call_function(target, args, kwargs)
        if origin is not None:
            meta.inherit(node, origin)
        node.meta["val"] = meta.compute(self.gm, node)
        return node

    def replace(self, node: Node, value: Any) -> None:
        """Let everything that used `node` use `value` (a node or a constant); drop `node`."""
        if isinstance(value, Node):
            node.replace_all_uses_with(value)
            meta.inherit(value, node)
        else:
            for user in list(node.users):
                user.args = map_arg(user.args, lambda n: value if n is node else n)
                user.kwargs = map_arg(user.kwargs, lambda n: value if n is node else n)
        self.gm.graph.erase_node(node)

    def __str__(self) -> str:
        return text(self.gm)


def _calls(node: Node, target: Any) -> bool:
    return bool(node.target == target or getattr(node.target, "overloadpacket", None) == target)


def text(gm: GraphModule) -> str:
    """The graph, a line a node: name, type, call, source line."""
    lines = []
    for node in gm.graph.nodes:
        if node.op == "output":
            lines.append(f"return {node.args[0]}")
            continue
        kind = meta.describe(node.meta.get("val"))
        if node.op == "call_function":
            parts = [repr(a) for a in node.args] + [f"{k}={v!r}" for k, v in node.kwargs.items()]
            line = meta.source_line(node)
            called = f"{target_name(node.target)}({', '.join(parts)})"
            lines.append(f"{node.name}: {kind} = {called}" + (f"  # {line}" if line else ""))
        else:
            lines.append(f"{node.name}: {kind} = {node.op} {node.target}")
    return "\n".join(lines)


def target_name(target: Any) -> str:
    """`aten.add.Tensor`, `getitem`."""
    return str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))
