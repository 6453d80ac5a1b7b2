"""The backends that `torch.compile` knows by a string."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchgraft._torch import dynamo
from torchgraft.compat.aie.compile import mindie_backend
from torchgraft.compat.air.backend import npu_backend, npugraph_ex_backend

BACKENDS: dict[str, Callable[..., Any]] = {
    "npu": npu_backend,
    "npugraph_ex": npugraph_ex_backend,
    "npugraphs": npugraph_ex_backend,
    "mindie": mindie_backend,
}


def register() -> None:
    """Make them known; once is enough."""
    for name, backend in BACKENDS.items():
        dynamo.register_backend(name, backend)
