"""What torch_npu adds to torch.distributed."""

from __future__ import annotations

from typing import Any

from torch import distributed

from torchgraft.compat import refused

__all__ = ["is_available", "is_hccl_available"]


def is_available() -> bool:
    return distributed.is_available()


def is_hccl_available() -> bool:
    """Whether `backend="hccl"` is known; it is gloo or NCCL here."""
    return distributed.is_available()


def __getattr__(name: str) -> Any:
    return refused.refuse("torch_npu.distributed", name)
