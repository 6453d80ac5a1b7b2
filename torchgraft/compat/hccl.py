"""`backend="hccl"` of torch.distributed: gloo or NCCL, whichever the device that stands for the NPU
has."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

from torch import distributed

from torchgraft.compat import device
from torchgraft.errors import NotOnThisDevice

NAME = "hccl"


@functools.cache
def register() -> None:
    """Let torch.distributed know the name. Once in a process is enough."""
    if not distributed.is_available() or hasattr(distributed.Backend, NAME.upper()):
        return
    distributed.Backend.register_backend(NAME, _group, devices=[device.kind()])


def _group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    known: Any = distributed.distributed_c10d  # untyped in torch
    if device.kind() == "cuda":
        return known.ProcessGroupNCCL(store, rank, size)
    if device.kind() == "npu":
        raise NotOnThisDevice(
            "backend='hccl' between simulated devices", "Run it with --device cpu: hccl is gloo."
        )
    return known.ProcessGroupGloo(store, rank, size, timeout=timeout)
