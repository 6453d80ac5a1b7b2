"""torch.compile's own side: what it keeps, marks and finds by name. torch 2.11 to 2.13."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.fx import GraphModule


def mark_static(tensor: Tensor, dim: int) -> None:
    """Let torch.compile take each size of a dim for a fixed one."""
    import torch._dynamo

    torch._dynamo.mark_static(tensor, dim)


def allow_recompiles(count: int) -> None:
    """For a backend: let the function that it is called for be compiled this many times more than
    torch.compile would.

    The limit is that function's own, as `torch.compile(recompile_limit=...)` sets it; a backend is
    not given it, so it is found among its callers. torch < 2.13 has one limit for the process.
    """
    from torch._dynamo import config, convert_frame

    code = convert_frame.ConvertFrameAssert.__call__.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    holder: Any = frame.f_locals["self"] if frame is not None else None
    if not hasattr(holder, "_recompile_limit"):
        config.recompile_limit = max(config.recompile_limit, count)
    elif holder._recompile_limit is None:
        holder._recompile_limit = config.recompile_limit + count


def real_inputs(gm: GraphModule) -> list[Tensor]:
    """For a backend: the tensors that a graph was traced with, which its example inputs are only
    like. Those that are gone are left out."""
    found = (node.meta.get("grapharg") for node in gm.graph.find_nodes(op="placeholder"))
    held = [getattr(one, "example", None) for one in found]
    return [one for one in held if isinstance(one, Tensor)]


def register_backend(name: str, compiler: Callable[..., Any]) -> None:
    """Let `torch.compile(backend=name)` find a compiler; one of that name stays."""
    from torch._dynamo.backends import registry

    if name not in registry._COMPILER_FNS:
        registry.register_backend(compiler, name=name)
