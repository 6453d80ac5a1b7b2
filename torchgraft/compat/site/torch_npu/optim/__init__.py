"""Optimizers that an NPU runs as one kernel: torch's own here, which compute the same."""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.compat import refused

__all__ = [
    "NpuFusedAdadelta",
    "NpuFusedAdam",
    "NpuFusedAdamW",
    "NpuFusedRMSprop",
    "NpuFusedSGD",
]


class _Fused:
    """What these add to torch's optimizers."""

    param_groups: list[dict[str, Any]]

    def clip_grad_norm_fused_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; gives the norm before."""
        every = [x for group in self.param_groups for x in group["params"]]
        return torch.nn.utils.clip_grad_norm_(every, max_norm, norm_type)


class NpuFusedAdam(_Fused, torch.optim.Adam):
    """`torch.optim.Adam`."""


class NpuFusedAdamW(_Fused, torch.optim.AdamW):
    """`torch.optim.AdamW`."""


class NpuFusedSGD(_Fused, torch.optim.SGD):
    """`torch.optim.SGD`."""


class NpuFusedAdadelta(_Fused, torch.optim.Adadelta):
    """`torch.optim.Adadelta`."""


class NpuFusedRMSprop(_Fused, torch.optim.RMSprop):
    """`torch.optim.RMSprop`."""


def __getattr__(name: str) -> Any:
    return refused.refuse("torch_npu.optim", name)
