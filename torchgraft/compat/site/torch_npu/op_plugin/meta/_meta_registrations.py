"""`m`, the library that Meta kernels of `npu::` operators are registered in."""

from __future__ import annotations

from typing import Any

import torch

from torchgraft import _torch

__all__ = ["m"]


class Metas(torch.library.Library):
    """Meta kernels. One that a script brings is before one that torchgraft has made."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **kwargs: Any) -> Any:
        name = op_name if isinstance(op_name, str) else str(op_name)
        name = name.removeprefix("npu::").removeprefix("npu.").removesuffix(".default")
        _torch.drop_fake(f"npu::{name}")
        parent: Any = super()
        return parent.impl(op_name, fn, dispatch_key, **(kwargs | {"allow_override": True}))


_make: Any = Metas
m = _make("npu", "IMPL", "Meta")
