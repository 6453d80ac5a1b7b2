"""What can be done to weights before the program runs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torchgraft.errors import NoMatch
from torchgraft.passes.pattern.define import pattern
from torchgraft.passes.pattern.rewrite import Match

_NORM = dict.fromkeys(("bias", "gamma", "beta", "mean", "var"), "[o]")


@pattern(
    register=False,
    types=[
        {"x": "[n, o, h, w]", "weight": "[o, 1, 1, 1]", **_NORM},
        {"x": "[n, c, h, w]", "weight": "[o, c, 1, 1]", **_NORM},
    ],
)
def conv_bn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    gamma: Tensor,
    beta: Tensor,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    eps: float,
) -> Tensor:
    """A convolution and the batch norm behind it, not training."""
    groups = x.shape[1] // weight.shape[1]
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return F.batch_norm(y, mean, var, gamma, beta, False, momentum, eps)


@conv_bn.replace
def _(m: Match) -> Tensor:
    """The norm is linear: it goes into the weights, and is folded where they are frozen."""
    scale = m.gamma * torch.rsqrt(m.var + m.eps)
    shift = m.beta - m.mean * scale
    bias = shift if m.bias is None else shift + m.bias * scale
    weight = m.weight * scale.reshape(-1, 1, 1, 1)
    groups = m.x.shape[1] // m.weight.shape[1]
    return F.conv2d(m.x, weight, bias, m.stride, m.padding, m.dilation, groups)


@pattern(register=False, types={"x": "[n, c, h, w]", "weight": "[o, c, 2, 2]", "bias": "[o]"})
def patches(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int]) -> Tensor:
    """A convolution; one whose windows do not overlap, as vision transformers begin with."""
    return F.conv2d(x, weight, bias, stride)


@patches.replace
def _(m: Match) -> Tensor:
    """A product: each window is a row."""
    (n, c, h, w), (o, _, high, wide) = m.x.shape, m.weight.shape
    if list(m.stride) != [high, wide] or high * wide == 1 or h % high or w % wide:
        raise NoMatch(f"windows of {high} by {wide}, a step of {m.stride}", m.node("convolution"))
    windows = m.x.reshape(n, c, h // high, high, w // wide, wide).permute(0, 2, 4, 1, 3, 5)
    rows = F.linear(windows.reshape(-1, c * high * wide), m.weight.reshape(o, -1), m.bias)
    return rows.reshape(n, h // high, w // wide, o).permute(0, 3, 1, 2).contiguous()


@pattern(
    register=False,
    types=[{"x": x, "weight": "i8[n, k]", "scale": "[n, 1]"} for x in ("[b, s, k]", "[m, k]")],
)
def dequantize_matmul(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A projection whose int8 weights are scaled, row by row, before they are used."""
    return F.linear(x, weight.to(x.dtype) * scale)


@dequantize_matmul.replace
def _(m: Match) -> Tensor:
    """The result is scaled instead: as many products as there are results, not weights."""
    scale: Tensor = m.scale.reshape(-1)
    return F.linear(m.x, m.weight.to(m.x.dtype)) * scale
