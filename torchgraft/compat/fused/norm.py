"""Normalisations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from torchgraft.compat.fused.table import reference, wide


def _rms(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """`x` over its root mean square, times `gamma`, and one over that root."""
    dims = list(range(-gamma.ndim, 0))
    rstd = torch.rsqrt(wide(x).square().mean(dims, keepdim=True) + epsilon)
    return (wide(x) * rstd * wide(gamma)).to(x.dtype), rstd


@reference("npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)")
def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return _rms(self, gamma, epsilon)


@reference("npu_gemma_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)")
def npu_gemma_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return _rms(self, 1 + wide(gamma), epsilon)


@reference(
    "npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) "
    "-> (Tensor, Tensor, Tensor)"
)
def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Also returns the sum, which is the next residual."""
    x = x1 + x2
    y, rstd = _rms(x, gamma, epsilon)
    return y, rstd, x


@reference(
    "npu_deep_norm(Tensor x, Tensor gx, Tensor beta, Tensor gamma, float alpha=0.3, "
    "float epsilon=1e-06) -> (Tensor, Tensor, Tensor)"
)
def npu_deep_norm(
    x: Tensor,
    gx: Tensor,
    beta: Tensor,
    gamma: Tensor,
    alpha: float = 0.3,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, one over the deviation, and LayerNorm(alpha * x + gx)."""
    total, dims = alpha * wide(x) + wide(gx), list(range(-gamma.ndim, 0))
    mean = total.mean(dims, keepdim=True)
    rstd = torch.rsqrt((total - mean).square().mean(dims, keepdim=True) + epsilon)
    return mean, rstd, ((total - mean) * rstd * wide(gamma) + wide(beta)).to(x.dtype)


@reference(
    "npu_layer_norm_eval(Tensor input, int[] normalized_shape, Tensor? weight=None, "
    "Tensor? bias=None, float eps=1e-05) -> Tensor"
)
def npu_layer_norm_eval(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return functional.layer_norm(input, normalized_shape, weight, bias, eps)


@reference(
    "npu_group_norm_silu(Tensor input, Tensor? weight, Tensor? bias, int group, float eps=1e-05) "
    "-> (Tensor, Tensor, Tensor)"
)
def npu_group_norm_silu(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """silu(GroupNorm), with the mean and one over the deviation of each group."""
    groups = wide(input).reshape(input.shape[0], group, -1)
    mean = groups.mean(-1)
    rstd = torch.rsqrt(groups.var(-1, correction=0) + eps)
    normal = functional.group_norm(
        wide(input),
        group,
        None if weight is None else wide(weight),
        None if bias is None else wide(bias),
        eps,
    )
    y = functional.silu(normal).to(input.dtype)
    return y, mean.to(input.dtype), rstd.to(input.dtype)
