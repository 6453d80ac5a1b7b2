"""Torch-AIE off the NPU."""

from torch_aie import _compile_spec, _enums, npu
from torchgraft.compat.aie import names
from torchgraft.compat.aie.names import *  # noqa: F403

__all__ = [*names.__all__, "_compile_spec", "_enums", "npu"]

names.activate()
