"""`torch.npu.amp`: torch's own mixed precision, for the device `npu` or what stands for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchgraft.compat.device import kind


class autocast(torch.amp.autocast):
    """`torch.autocast("npu", ...)`."""

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> None:
        super().__init__(kind(), dtype, enabled, cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler("npu", ...)`. One that is not `dynamic` keeps its scale."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        dynamic: bool = True,
        enabled: bool = True,
    ) -> None:
        super().__init__(
            kind(), init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._dynamic = dynamic

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        fixed = self.get_scale() if not self._dynamic and self.is_enabled() else None
        super().update(fixed if new_scale is None else new_scale)


def custom_fwd(fwd: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """`torch.amp.custom_fwd(device_type="npu")`."""
    return torch.amp.custom_fwd(fwd, device_type=kind(), **kwargs)


def custom_bwd(bwd: Callable[..., Any]) -> Any:
    """`torch.amp.custom_bwd(device_type="npu")`."""
    return torch.amp.custom_bwd(bwd, device_type=kind())


def amp_definitely_not_available() -> bool:
    return False
