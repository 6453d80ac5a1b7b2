"""The operators `torchgraft::send` and `torchgraft::recv`: torch has none that wait."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torchgraft._torch import groups


@torch.library.custom_op("torchgraft::send", mutates_args=())
def send(tensor: Tensor, peer: int, tag: int, group_name: str) -> Tensor:
    """Give a tensor to a rank of the group, and wait until it is on its way."""
    dist.send(tensor.contiguous(), group=groups.group_of(group_name), tag=tag, group_dst=peer)
    return tensor.new_empty(0)


@send.register_fake
def _(tensor: Tensor, peer: int, tag: int, group_name: str) -> Tensor:
    return tensor.new_empty(0)


@torch.library.custom_op("torchgraft::recv", mutates_args=())
def recv(like: Tensor, peer: int, tag: int, group_name: str) -> Tensor:
    """A tensor like this one from a rank of the group."""
    made = torch.empty_like(like, memory_format=torch.contiguous_format)
    dist.recv(made, group=groups.group_of(group_name), tag=tag, group_src=peer)
    return made


@recv.register_fake
def _(like: Tensor, peer: int, tag: int, group_name: str) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


for _op in (torch.ops.torchgraft.send, torch.ops.torchgraft.recv):
    groups.keep_calls(_op)
