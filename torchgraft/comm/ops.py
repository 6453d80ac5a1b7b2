"""Which calls of a graph talk to other ranks. The group is the last argument of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from torchgraft import _torch

_NAMESPACES = ("_c10d_functional", "_dtensor", "torchgraft")
ONE_SIDED = ("send", "recv")
"""What one rank does, another one answers."""
_ASYNC = ("isend", "irecv", "batch_p2p_ops")
"""torch's own, which write to memory that the graph does not know of: they stay where they are."""


def is_collective(node: Node) -> bool:
    """Whether a call starts something that other ranks take part in."""
    if node.op != "call_function" or not _torch.is_op(node.target) or is_wait(node):
        return False
    target: Any = node.target
    arguments = target._schema.arguments
    named = bool(arguments) and arguments[-1].name == "group_name"
    known = target.namespace in _NAMESPACES and kind_of(node) not in _ASYNC
    return named and known and not target._schema.is_mutable


def is_wait(node: Node) -> bool:
    """Whether a call only waits for the value of another."""
    return node.op == "call_function" and str(node.target) == "_c10d_functional.wait_tensor.default"


def kind_of(node: Node) -> str:
    """`all_reduce`, `all_gather_into_tensor`, …: the operator's name."""
    return str(node.target).split(".")[1]


def collectives(nodes: Any) -> Iterator[Node]:
    """Those of some nodes that are collectives, in order."""
    return (node for node in nodes if is_collective(node))
