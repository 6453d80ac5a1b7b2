"""`torch.npu` where CUDA stands for the NPU: `torch.cuda`, to which a device may be named `npu:0`
(`device.Mapped` sees to that), and graphs that are captured as on every other device."""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.compat import common
from torchgraft.compat.common import *  # noqa: F403
from torchgraft.compat.graphs import *  # noqa: F403


def get_device_name(device: Any = None) -> str:
    return f"{torch.cuda.get_device_name(device)} in place of an NPU"


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and hasattr(torch.cuda, name):
        return getattr(torch.cuda, name)
    return common.attribute(name, [*globals(), *dir(torch.cuda)])
