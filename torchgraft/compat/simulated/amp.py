"""`torch.npu.amp`: torch's own mixed precision, for the device `npu` or what stands for it."""

from __future__ import annotations

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
    """`torch.amp.GradScaler("npu", ...)`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(kind(), *args, **kwargs)
