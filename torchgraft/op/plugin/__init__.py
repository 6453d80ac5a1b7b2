"""Operators of op-plugin projects off an NPU: `build` keeps them in a folder, `load` declares them.

The folder holds copies of the YAML files and the prototypes, the libraries made of C++ kernels,
and a manifest in JSON with the hash of each. Nothing in it is a pickle.
"""

from collections.abc import Callable
from typing import Any

from torchgraft.op.plugin.store import FOLDER, Built, Loaded, build, load
from torchgraft.op.plugin.wire import NPU

__all__ = ["FOLDER", "Built", "Loaded", "build", "functions", "load"]


def functions() -> dict[str, Callable[..., Any]]:
    """The operators loaded so far that are Python functions in torch_npu, by name (`npu_x`)."""
    return NPU.functions()
