"""torch.compile's own side: what it keeps, marks and finds by name. torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def mark_static(tensor: Tensor, dim: int) -> None:
    """Let torch.compile take each size of a dim for a fixed one."""
    import torch._dynamo

    torch._dynamo.mark_static(tensor, dim)


def allow_recompiles(count: int) -> None:
    """Let torch.compile keep at least this many programs of one function."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, count)


def register_backend(name: str, compiler: Callable[..., Any]) -> None:
    """Let `torch.compile(backend=name)` find a compiler; one of that name stays."""
    from torch._dynamo.backends import registry

    if name not in registry._COMPILER_FNS:
        registry.register_backend(compiler, name=name)
