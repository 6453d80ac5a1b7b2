"""`graft.Net` and `graft.Value`: what the author of a converter holds."""

from __future__ import annotations

import operator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from torchgraft import _torch
from torchgraft.errors import BadValue
from torchgraft.fx import dialect, meta
from torchgraft.fx.names import operator_named

aten = torch.ops.aten


class Value:
    """A tensor (or a size) of the graph: its type is known, its numbers are not."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node

    @property
    def _fake(self) -> Any:
        value = self.node.meta["val"]
        if not isinstance(value, Tensor):
            raise BadValue(f"value {self.node.name!r}", value, "a tensor")
        return value

    @property
    def shape(self) -> torch.Size:
        """Its sizes; a dynamic one is a `torch.SymInt`, which `net.add` takes, too."""
        shape: torch.Size = self._fake.shape
        return shape

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._fake.dtype
        return dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        device: torch.device = self._fake.device
        return device

    def __repr__(self) -> str:
        return f"<Value {self.node.name}: {meta.describe(self.node.meta['val'])}>"


CURRENT: ContextVar[Net | None] = ContextVar("torchgraft_net", default=None)
"""The net of the converter that is running: what a builder adds its call to."""


class Net:
    """Makes the calls that take the place of one call. Each has its type as soon as it is made."""

    def __init__(self, gm: GraphModule, node: Node) -> None:
        self.gm, self.node = gm, node
        self.made: list[Node] = []
        self.value_type: type[Value] = Value

    def add(self, op: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call of an operator, by name (`"ns::op"`, `"ns::op.overload"`) or as an `OpOverload`.

        Gives a `Value`, or a tuple of them where the operator gives several. A name without an
        overload means the one that fits the arguments, as in a Python call.
        """
        given, named = map_aggregate((args, kwargs), self._plain)
        if isinstance(op, str):
            op = operator_named(op, meta.value(given), meta.value(named))
        elif _torch.is_packet(op):
            op = operator_named(str(op), meta.value(given), meta.value(named))
        if not _torch.is_op(op):
            raise BadValue("net.add", op, "an operator, or its name")
        node = self._make(op, *dialect.spell(op, given, named))
        value = node.meta["val"]
        if isinstance(value, (tuple, list)):
            parts = (self._make(operator.getitem, (node, i), {}) for i in _range(value))
            return tuple(map(self.value_type, parts))
        return self.value_type(node)

    def constant(
        self, value: Any, *, dtype: torch.dtype | None = None, device: Any = None
    ) -> Value:
        """A tensor that the program holds: a tensor, a number or nested lists of them.

        Without a `device` it lives where the result of the converted call does.
        """
        if device is None and not isinstance(value, Tensor):
            device = _device(self.node.meta.get("val"))
        held = torch.as_tensor(value, dtype=dtype, device=device).detach()
        name = f"_held_{self.node.name}_{len(self.made)}"
        while hasattr(self.gm, name):
            name += "_"
        self.gm.register_buffer(name, held, persistent=False)
        with self.gm.graph.inserting_before(self.node):
            node = self.gm.graph.create_node("get_attr", name)
        node.meta["val"] = meta.compute(self.gm, node)
        self.made.append(node)
        return self.value_type(node)

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """The value in another dtype; itself where it has that one."""
        if value.dtype == dtype:
            return value
        result: Value = self.add(aten._to_copy.default, value, dtype=dtype)
        return result

    def drop(self) -> None:
        """Take back every call made."""
        for node in reversed(self.made):
            self.gm.graph.erase_node(node)
            if node.op == "get_attr":
                delattr(self.gm, str(node.target))
        self.made.clear()

    def _make(self, target: Any, args: Any, kwargs: Any) -> Node:
        with self.gm.graph.inserting_before(self.node):
            node = self.gm.graph.call_function(target, args, kwargs)
        meta.inherit(node, self.node)
        self.made.append(node)  # before its type is known: a failure must not leave it behind
        node.meta["val"] = meta.compute(self.gm, node)
        return node

    def _plain(self, arg: Any) -> Any:
        """An argument as a node takes it."""
        if isinstance(arg, Value):
            return arg.node
        return self._size(arg) if isinstance(arg, torch.SymInt) else arg

    def _size(self, size: torch.SymInt) -> Any:
        """A node for a dynamic size: the size of a value that the converter can see."""
        want = _torch.expression(size)
        if isinstance(want, int):
            return want
        seen: list[Node] = [*self.made]
        map_arg((self.node.args, self.node.kwargs), seen.append)
        for node in seen:
            value = node.meta["val"]
            if isinstance(value, torch.SymInt) and _torch.expression(value) == want:
                return node
            for dim, length in enumerate(value.shape if isinstance(value, Tensor) else ()):
                if _torch.expression(length) == want:
                    return self._make(aten.sym_size.int, (node, dim), {})
        raise BadValue("net.add", size, "a size of one of the values at hand")


def _range(value: Any) -> range:
    return range(len(value))


def _device(value: Any) -> torch.device | None:
    leaves = _torch.flatten(value)[0]
    return next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), None)
