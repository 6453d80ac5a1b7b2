"""RMSNorm, alone and after a residual sum."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from torchgraft.errors import NoMatch
from torchgraft.passes.pattern.define import pattern
from torchgraft.passes.pattern.rewrite import Match

aten = torch.ops.aten

_TYPES = [{"x": "[b, s, h]", "weight": "[h]"}]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


@pattern(register=False, types=_TYPES)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm as models write it out."""
    return _rms_norm(x, weight, eps)


@rms_norm.replace(nodes=True)
def _(m: Match) -> Any:
    return _fused(m, m.x, m.weight, m.eps)


@pattern(register=False, types=[{**_TYPES[0], "y": "[b, s, h]"}])
def residual_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of a residual sum; the sum goes on beside it."""
    total = x + y
    return _rms_norm(total, weight, eps), total


@residual_norm.replace(nodes=True)
def _(m: Match) -> Any:
    total = m.graph.call(aten.add.Tensor, m.x, m.y)
    return _fused(m, total, m.weight, m.eps), total


def _fused(m: Match, x: Any, weight: Any, eps: float) -> Any:
    """One call of torch's own fused operator, which the dialect would take apart again."""
    if x.meta["val"].dtype == torch.float64:
        raise NoMatch("the pattern rounds float64 to float32, the fused operator does not")
    size = x.meta["val"].shape[-1]
    both = m.graph.call(aten._fused_rms_norm.default, x, [size], weight, eps)
    return m.graph.call(operator.getitem, both, 0)
