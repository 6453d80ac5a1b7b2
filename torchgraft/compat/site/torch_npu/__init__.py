"""`torch_npu` off the NPU: the device `npu`, its operators and its extensions.

Importing it gives the process `torch.npu` and loads the operators that `torchgraft op-plugin` has
kept in `.torchgraft`, in the folder that the program was started in.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from torchgraft.compat import backends, device, fused, hccl, refused
from torchgraft.op import plugin

device.activate()
backends.register()
hccl.register()
npu: Any = torch.npu  # type: ignore[attr-defined]
sys.modules[f"{__name__}.npu"] = npu
sys.modules[f"{__name__}.npu.amp"] = npu.amp

from torch_npu import optim, profiler, utils  # noqa: E402  (they need the device)

__all__ = ["npu", "optim", "profiler", "utils"]
__version__ = torch.__version__.split("+")[0]

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


def __getattr__(name: str) -> Any:
    """`torch_npu.npu_x` is the operator `npu::npu_x`: a fused one, or one's own."""
    if name.startswith("__"):
        raise AttributeError(f"module 'torch_npu' has no attribute {name!r}")
    if hasattr(torch.ops.npu, name):
        return getattr(torch.ops.npu, name)
    if not name.startswith(("npu_", "_npu_")):
        raise AttributeError(f"module 'torch_npu' has no attribute {name!r}")
    own = f"Declare it: @graft.op('npu::{name}'), or torchgraft op-plugin on its YAML file."
    raise refused.missing(f"torch_npu.{name}", refused.FUSED.get(name, own))
