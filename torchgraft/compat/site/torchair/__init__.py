"""TorchAir off the NPU."""

from typing import Any

from torchair import configs, core, ge, inference, ops, scope
from torchgraft.compat import backends, paths, refused
from torchgraft.compat.air.backend import get_compiler, get_npu_backend
from torchgraft.compat.air.config import CompilerConfig
from torchgraft.compat.air.convert import register_fx_node_ge_converter
from torchgraft.compat.air.export import (
    dynamo_export,
    patch_for_hcom,
    use_internal_format_weight,
)
from torchgraft.compat.air.log import logger
from torchgraft.compat.air.patterns import register_replacement

__all__ = [
    "CompilerConfig",
    "configs",
    "core",
    "dynamo_export",
    "ge",
    "get_compiler",
    "get_npu_backend",
    "inference",
    "logger",
    "ops",
    "patch_for_hcom",
    "register_fx_node_ge_converter",
    "register_replacement",
    "scope",
    "use_internal_format_weight",
]

backends.register()
paths.activate(__name__)


def __getattr__(name: str) -> Any:
    return refused.refuse("torchair", name)
