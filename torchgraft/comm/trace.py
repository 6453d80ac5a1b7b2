"""`torch.distributed.broadcast`, `send` and `recv` for torch.compile and export.

torch turns its other collectives into functional ones while it traces; these it would leave to
Python. Importing this registers them, with `torch.compiler`'s own way to say what a function means
in a graph; it imports Dynamo.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torchgraft.comm.peer  # noqa: F401 (declares the operators)


class Done:
    """What `async_op=True` gives: in a graph, the value is there when it is read."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _peer(rank: int | None, group: Any, group_rank: int | None) -> int:
    found = group_rank if group_rank is not None else dist.get_group_rank(group, rank)  # type: ignore[arg-type]
    for one in range(dist.get_world_size(group)):  # Dynamo may keep a number open; this one is not
        if one == found:
            return one
    return found


def _broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Done | None:
    group = dist.group.WORLD if group is None else group
    root = _peer(src, group, group_src)
    made = torch.ops._c10d_functional.broadcast(tensor, root, group.group_name)
    tensor.copy_(torch.ops._c10d_functional.wait_tensor(made))
    return Done() if async_op else None


def _send(
    tensor: Tensor,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    group = dist.group.WORLD if group is None else group
    torch.ops.torchgraft.send(tensor, _peer(dst, group, group_dst), tag, group.group_name)


def _recv(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    group = dist.group.WORLD if group is None else group
    peer = _peer(src, group, group_src)
    tensor.copy_(torch.ops.torchgraft.recv(tensor, peer, tag, group.group_name))
    return dist.get_global_rank(group, peer)


for _function, _meaning in ((dist.broadcast, _broadcast), (dist.send, _send), (dist.recv, _recv)):
    torch.compiler.substitute_in_graph(_function, skip_signature_check=True)(_meaning)
