"""C++ extensions with kernels for `PrivateUse1`: torch's own, with the headers of the NPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils import cpp_extension

from torchgraft.op.plugin.native import INCLUDE

__all__ = ["PYTORCH_NPU_INSTALL_PATH", "NpuExtension", "include_paths"]

PYTORCH_NPU_INSTALL_PATH = str(Path(__file__).parents[1])


def include_paths() -> list[str]:
    """Where `pytorch_npu_helper.hpp`, `op_plugin/...` and `torch_npu/csrc/...` are."""
    return [str(Path(PYTORCH_NPU_INSTALL_PATH, "include")), str(INCLUDE)]


def NpuExtension(name: str, sources: list[str], *args: Any, **kwargs: Any) -> Any:
    """A `setuptools.Extension`, as `torch.utils.cpp_extension.CppExtension` makes one.

    It is built by `BuildExtension`. Kernels asked for by EXEC_NPU_CMD are found when it runs, so
    nothing but torch is linked.
    """
    paths = [*kwargs.pop("include_dirs", []), *include_paths()]
    make: Any = cpp_extension.CppExtension  # untyped in torch
    return make(name, sources, *args, include_dirs=paths, **kwargs)
