"""`graft.Graph`: what the author of a pass holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchgraft.config import Config
from torchgraft.errors import BadValue, NotFound
from torchgraft.fx import label, meta
from torchgraft.plan import MAIN


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
            meta.inherit(node, origin, place=self._origin is not None)
        node.meta["val"] = meta.compute(self.gm, node)
        return node

    def place(self, *nodes: Node, stream: str) -> None:
        """Run nodes on a stream. What crosses streams waits by itself; "main" is the caller's.

        >>> import torch, torchgraft as graft
        >>> @graft.fx_pass(stage="pre", register=False)
        ... def beside(graph):
        ...     graph.place(graph.one(torch.ops.aten.mm), stream="side")
        >>> model, x = lambda x: (x @ x) + x, torch.eye(2)
        >>> print(graft.compile(model, (x,), mode="eager", pre_passes=[beside]).plan.timeline())
        main             side
        ---------------  ---------------
        record entry
                         wait entry
                         aten.mm.default
                         record after0
        wait after0
        aten.add.Tensor
        """
        if not isinstance(stream, str) or not stream:
            raise BadValue("graph.place stream", stream, "the name of a stream")
        for node in nodes:
            self._own("graph.place", node)
            node.meta["stream"] = stream

    def order(self, first: Node, *, then: Node | Sequence[Node]) -> None:
        """Let `then` start only when `first` is over, whatever their streams. Order that data asks
        for is kept without it; a circle raises `OrderCycle` when the pass is over."""
        self._own("graph.order", first)
        for node in [then] if isinstance(then, Node) else then:
            self._own("graph.order", node)
            label.come_after(node, [first])

    def _own(self, where: str, node: Any) -> None:
        if not isinstance(node, Node) or node.op != "call_function" or node.graph != self.gm.graph:
            raise BadValue(where, node, "operator calls of this graph, as graph.one gives them")

    def replace(self, node: Node, value: Any) -> None:
        """Let everything that used `node` use `value` (a node or a constant); drop `node`."""
        if isinstance(value, Node):
            node.replace_all_uses_with(value)
            meta.inherit(value, node, place=False)
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
            stream = label.stream_of(node)
            notes = [f"on {stream!r}"] * (stream != MAIN) + ([line] if line else [])
            said = f"  # {', '.join(notes)}" if notes else ""
            lines.append(f"{node.name}: {kind} = {called}{said}")
        else:
            lines.append(f"{node.name}: {kind} = {node.op} {node.target}")
    return "\n".join(lines)


def target_name(target: Any) -> str:
    """`aten.add.Tensor`, `getitem`."""
    return str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))
