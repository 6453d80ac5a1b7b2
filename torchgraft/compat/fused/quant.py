"""Quantized products."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgraft.compat.fused.table import reference, refuse, wide


@reference(
    "npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, "
    "ScalarType? dst_type=None) -> (Tensor, Tensor)"
)
def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Each row in int8, its largest value as 127, and the scale that gives it back."""
    refuse("npu_dynamic_quant", "Quantize each group by itself.", group_index=group_index)
    other = None if dst_type in (None, torch.int8) else dst_type
    refuse("npu_dynamic_quant", "Use torch.int8.", dst_type=other)
    x = input.float() if smooth_scales is None else input.float() * smooth_scales.float()
    scale = x.abs().amax(-1) / 127
    safe = torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
    return torch.round(x / safe).clamp(-128, 127).to(torch.int8), scale


_STORED = {
    torch.qint8: torch.int8,
    torch.int8: torch.int8,
    torch.quint8: torch.uint8,
    torch.uint8: torch.uint8,
    torch.qint32: torch.int32,
    torch.int32: torch.int32,
}


@reference(
    "npu_quantize(Tensor self, Tensor scales, Tensor? zero_points, ScalarType dtype, int axis=1, "
    "bool div_mode=True) -> Tensor"
)
def npu_quantize(
    self: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: torch.dtype,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    """round(x / scale + zero point), or times the scale, as whole numbers of one axis' scales."""
    stored = _STORED.get(dtype)
    refuse("npu_quantize", "Use torch.qint8 or torch.quint8.", dtype=dtype if not stored else None)
    assert stored is not None
    shape = [1] * self.dim()
    if scales.numel() > 1:
        shape[axis] = -1
    x, by = self.float(), scales.float().reshape(shape)
    y = x / by if div_mode else x * by
    y = y if zero_points is None else y + zero_points.float().reshape(shape)
    limits = torch.iinfo(stored)
    return y.round().clamp(limits.min, limits.max).to(stored)


@reference(
    "npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, "
    "Tensor? pertoken_scale=None, Tensor? bias=None, ScalarType? output_dtype=None) -> Tensor"
)
def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """The exact product of int8 matrices, plus an int32 bias, times scales of columns and rows."""
    name = "npu_quant_matmul"
    packed = scale if not scale.dtype.is_floating_point else None
    refuse(name, "Pass the scale as floats, not packed for the device.", scale=packed)
    four_bits = x2 if x2.dtype != torch.int8 else None
    refuse(name, "Use weights of int8.", x2=four_bits)
    refuse(name, "Ask for a floating output_dtype, and quantize that.", offset=offset)
    if output_dtype in (None, torch.int8):
        refuse(name, "Ask for float16, bfloat16 or int32.", output_dtype=output_dtype or torch.int8)
    # Products of int8 are exact in float64 below 2**53, and fast there on every device.
    total = (x1.double() @ x2.double()).to(torch.int32)
    whole = bias is not None and not bias.dtype.is_floating_point
    if bias is not None and whole:
        total = total + bias
    if output_dtype == torch.int32:
        return total
    y = total.float() * scale.float()
    if pertoken_scale is not None:
        y = y * pertoken_scale.float().unsqueeze(-1)
    if bias is not None and not whole:
        y = y + bias.float()
    return y.to(output_dtype)


@reference(
    "npu_weight_quant_batchmatmul(Tensor x, Tensor weight, Tensor antiquant_scale, "
    "Tensor? antiquant_offset=None, Tensor? quant_scale=None, Tensor? quant_offset=None, "
    "Tensor? bias=None, int antiquant_group_size=0) -> Tensor"
)
def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
) -> Tensor:
    """`x` times weights that are kept in int8: (weight + offset) * scale."""
    name = "npu_weight_quant_batchmatmul"
    groups = antiquant_group_size or None
    refuse(name, "Quantize the result afterwards.", quant_scale=quant_scale)
    refuse(name, "Quantize the result afterwards.", quant_offset=quant_offset)
    refuse(name, "Use one scale for each column.", antiquant_group_size=groups)
    refuse(name, "Use weights of int8.", weight=weight if weight.dtype != torch.int8 else None)
    kept = weight.to(antiquant_scale.dtype)
    if antiquant_offset is not None:
        kept = kept + antiquant_offset
    y = wide(x) @ (wide(kept) * wide(antiquant_scale))
    return (y if bias is None else y + wide(bias)).to(x.dtype)
