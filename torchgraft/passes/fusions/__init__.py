"""Fusions that real models ask for, as patterns. `Config(patterns=[graft.fusions.rms_norm])`.

None of them is registered; `ALL` has every one by name. Each keeps the program's results, up to
rounding; `softmax_dropout` alone changes them on purpose. docs/patterns.md says what each is worth.
Give one a kernel of your own with `rms_norm.using(lambda m: my_kernel(m.x, m.weight, m.eps))`.
"""

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
from torchgraft.passes.fusions.weights import conv_bn, dequantize_matmul

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
        softmax_dropout,
    )
}
"""Every fusion by name, in the order to run them in."""

__all__ = [*ALL, "ALL"]
