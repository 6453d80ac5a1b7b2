"""Fusions that real models ask for, as patterns. `Config(patterns=[graft.fusions.rms_norm])`.

`ALL` has every one by name. Those that were measured to win are on by default (`DEFAULT`) unless
`Config(fusions=False)`. Each keeps the program's results, up to rounding; `softmax_dropout` alone
changes them on purpose. docs/patterns.md says what each is worth. Give one a kernel of your own
with `rms_norm.using(lambda m: my_kernel(m.x, m.weight, m.eps))`.
"""

from collections.abc import Callable
from typing import Any

import torch

from torchgraft.errors import NoMatch
from torchgraft.passes.fusions.attention import (
    attention,
    attention_upcast,
    qkv,
    qkv_bias,
    rotary,
    softmax_dropout,
)
from torchgraft.passes.fusions.mlp import gelu_fast, gelu_tanh, swiglu
from torchgraft.passes.fusions.norm import residual_norm, rms_norm
from torchgraft.passes.fusions.weights import conv_bn, dequantize_matmul, patches
from torchgraft.passes.pattern.define import Pattern
from torchgraft.passes.pattern.rewrite import Match

aten = torch.ops.aten

ALL = {
    fusion.name: fusion
    for fusion in (
        residual_norm,
        rms_norm,
        rotary,
        swiglu,
        qkv,
        qkv_bias,
        gelu_tanh,
        gelu_fast,
        attention,
        attention_upcast,
        dequantize_matmul,
        conv_bn,
        patches,
        softmax_dropout,
    )
}
"""Every fusion by name, in the order to run them in."""


def _unmasked(m: Match) -> Any:
    if m.mask is not None:
        raise NoMatch("a row that the mask hides as a whole would be 0 instead of NaN")
    return _replaced(attention)(m)


def _replaced(fusion: Pattern) -> Callable[[Match], Any]:
    assert fusion.replacement is not None
    return fusion.replacement


DEFAULT: dict[Pattern, tuple[Any, ...]] = {  # twins: who asks for one hears of its misses, too
    rotary.using(_replaced(rotary)): ("cpu", aten.neg.default, aten.cat.default, aten.slice.Tensor),
    attention.using(_unmasked): ("cpu", aten._softmax.default, aten.bmm.default),
    patches.using(_replaced(patches)): ("cuda", aten.convolution.default),
}
"""The fusions that are on by default: the device that each was measured on, and operators that a
graph must have for it."""

__all__ = [*ALL, "ALL", "DEFAULT"]
