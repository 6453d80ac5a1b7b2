"""`torch_npu` off the NPU: the device `npu`, its operators and its extensions.

Importing it gives the process `torch.npu` and loads the operators that `torchgraft op-plugin` has
kept in `.torchgraft`, in the folder that the program was started in.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchgraft.compat import backends, device, fused, hccl, paths, refused
from torchgraft.op import plugin

device.activate()
backends.register()
hccl.register()
npu: Any = torch.npu  # type: ignore[attr-defined]
sys.modules[f"{__name__}.npu"] = npu
sys.modules[f"{__name__}.npu.amp"] = npu.amp

from torch_npu import contrib, distributed, optim, profiler, testing, utils, version  # noqa: E402
from torch_npu.version import __version__  # noqa: E402

__all__ = [
    "__version__",
    "contrib",
    "distributed",
    "npu",
    "optim",
    "profiler",
    "testing",
    "utils",
    "version",
]
paths.activate(__name__)

if Path(plugin.FOLDER).is_dir():
    plugin.load()
fused.declare()


def get_npu_format(tensor: torch.Tensor) -> int:
    """The number of the plain format; there is no other one here."""
    return 2


def npu_format_cast(tensor: torch.Tensor, acl_format: int, **kwargs: Any) -> torch.Tensor:
    """The tensor as it is: private formats change where bytes lie, not what they are."""
    from torchgraft.compat.notes import without_effect

    without_effect("torch_npu.", {"npu_format_cast": "tensors have one format off the NPU"})
    return tensor


_npu_format_cast = npu_format_cast


def npu_format_cast_(tensor: torch.Tensor, acl_format: Any) -> torch.Tensor:
    """The tensor as it is, or with the values of another."""
    if isinstance(acl_format, torch.Tensor):
        return tensor.copy_(acl_format)
    return npu_format_cast(tensor, acl_format)


def empty_with_format(
    size: Sequence[int], *, acl_format: int = 2, keep_format: bool = False, **kwargs: Any
) -> torch.Tensor:
    """`torch.empty`, on the device."""
    made: torch.Tensor = torch.empty(size, **{"device": "npu", **kwargs})
    return npu_format_cast(made, acl_format) if acl_format != get_npu_format(made) else made


unsafe_empty_with_format = empty_with_format


def copy_memory_(
    tensor: torch.Tensor, src: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """`tensor.copy_(src)`."""
    return tensor.copy_(src, non_blocking)


def get_storage_size(tensor: torch.Tensor) -> int:
    """How many elements the memory of a tensor has."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def __getattr__(name: str) -> Any:
    """`torch_npu.npu_x` is the operator `npu::npu_x`: a fused one, or one's own."""
    if name.startswith("__"):
        raise AttributeError(f"module 'torch_npu' has no attribute {name!r}")
    if hasattr(torch.ops.npu, name):
        return getattr(torch.ops.npu, name)
    if not name.startswith(("npu_", "_npu_")):
        return refused.refuse(__name__, name)
    own = f"Declare it: @graft.op('npu::{name}'), or torchgraft op-plugin on its YAML file."
    raise refused.missing(f"torch_npu.{name}", refused.FUSED.get(name, own))
