"""`backend="hccl"` of torch.distributed: gloo or NCCL, whichever the device that stands for the NPU
has. Between simulated devices it is gloo on copies in host memory."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from torchgraft import _torch
from torchgraft.compat import device

NAME = "hccl"
_COLLECTIVES = (
    "allreduce_",
    "allreduce_coalesced_",
    "broadcast_",
    "reduce_",
    "allgather_",
    "_allgather_base_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "gather_",
    "scatter_",
    "alltoall_",
    "alltoall_base_",
    "send",
    "recv_",
    "recv_any_source_",
    "barrier",
)


@functools.cache
def register() -> None:
    """Let torch.distributed know the name. Once in a process is enough."""
    if not distributed.is_available() or hasattr(distributed.Backend, NAME.upper()):
        return
    kind = device.kind()
    where = ["cpu", "npu"] if kind == "npu" else [kind]
    distributed.Backend.register_backend(NAME, _group, devices=where)
    if kind == "npu":
        with warnings.catch_warnings():  # torch warns that its own kernels are replaced
            warnings.simplefilter("ignore", UserWarning)
            _replace()


_KEPT: list[Any] = []


def _replace() -> None:
    make: Any = torch.library.Library  # untyped in torch
    library = make("c10d", "IMPL")
    _KEPT.append(library)
    for name in _COLLECTIVES:
        if (op := getattr(torch.ops.c10d, name, None)) is not None:
            library.impl(name, _on_copies(op.default), "PrivateUse1", allow_override=True)


def _group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    known: Any = distributed.distributed_c10d  # untyped in torch
    if device.kind() == "cuda":
        return known.ProcessGroupNCCL(store, rank, size)
    return known.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _on_copies(op: Any) -> Callable[..., Any]:
    """A collective on the tensors' copies in host memory; when it is over they are copied back."""

    def run(*args: Any) -> Any:
        leaves, tree = _torch.flatten(args)
        copies = [x.cpu() if isinstance(x, Tensor) else x for x in leaves]
        result = op(*_torch.unflatten(copies, tree))
        for one in _torch.flatten(result)[0]:
            if not isinstance(one, Tensor):
                one.wait()
        own = {}
        for mine, copy in zip(leaves, copies, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(copy)
                own[copy.data_ptr()] = mine
        return _torch.map_leaves(
            lambda x: own.get(x.data_ptr(), x) if isinstance(x, Tensor) else x, result
        )

    return run
