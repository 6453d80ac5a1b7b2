"""What extensions are built with, and files."""

from __future__ import annotations

import os
from typing import IO, Any

import torch

from torch_npu.utils import cpp_extension
from torchgraft.compat import refused

__all__ = ["cpp_extension", "load", "save", "save_async"]
load, save = torch.load, torch.save


def save_async(
    obj: object, f: str | os.PathLike[str] | IO[bytes], *args: Any, model: Any = None, **kwargs: Any
) -> None:
    """`torch.save`; the file is there when this returns."""
    torch.save(obj, f, *args, **kwargs)


def __getattr__(name: str) -> Any:
    return refused.refuse("torch_npu.utils", name)
