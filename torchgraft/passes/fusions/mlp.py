"""Activations of feed-forward layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from torchgraft.errors import NoMatch
from torchgraft.passes.pattern.define import pattern
from torchgraft.passes.pattern.rewrite import Match


@pattern(
    register=False,
    types=[{"x": x, "gate": "[m, h]", "up": "[m, h]"} for x in ("[b, s, h]", "[n, h]")],
)
def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """A gated feed-forward layer's first half: two projections of one input."""
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


@swiglu.replace
def _(m: Match) -> Tensor:
    """One projection."""
    for name in ("gate", "up"):
        if not m.is_constant(name):
            raise NoMatch(f"{name!r} is not frozen, so merging would copy it at each call")
    gate, up = F.linear(m.x, torch.cat((m.gate, m.up))).chunk(2, -1)
    return F.silu(gate) * up


@pattern(register=False)
def gelu_tanh(x: Tensor, root: float, cubic: float) -> Tensor:
    """GELU by tanh, as GPT-2 writes it out."""
    return 0.5 * x * (1.0 + torch.tanh(root * (x + cubic * torch.pow(x, 3.0))))


@pattern(register=False)
def gelu_fast(x: Tensor, root: float, cubic: float) -> Tensor:
    """The same with the cube written as products."""
    return 0.5 * x * (1.0 + torch.tanh(x * root * (1.0 + cubic * x * x)))


@gelu_tanh.replace
@gelu_fast.replace
def _gelu(m: Match) -> Tensor:
    allowed = torch.finfo(m.x.dtype).eps
    if abs(m.root - math.sqrt(2 / math.pi)) > allowed or abs(m.cubic - 0.044715) > allowed:
        raise NoMatch(f"{m.root} and {m.cubic} are not GELU's constants", m.node("tanh"))
    return F.gelu(m.x, approximate="tanh")
