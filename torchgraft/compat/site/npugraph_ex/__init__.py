"""npugraph_ex off the NPU."""

from torchgraft.compat import backends
from torchgraft.compat.air.backend import compile_fx, get_compiler
from torchgraft.compat.air.backend import npugraph_ex_door as get_npu_backend
from torchgraft.compat.air.config import NpuGraphExConfig as CompilerConfig
from torchgraft.compat.air.patterns import register_replacement

__all__ = [
    "CompilerConfig",
    "compile_fx",
    "get_compiler",
    "get_npu_backend",
    "register_replacement",
]

backends.register()
