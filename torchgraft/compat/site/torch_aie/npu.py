from typing import Any

import torch


def __getattr__(name: str) -> Any:
    return getattr(torch.npu, name)  # type: ignore[attr-defined]
