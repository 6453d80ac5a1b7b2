"""Products expert by expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchgraft import _torch
from torchgraft.compat.fused.quant import npu_dynamic_quant
from torchgraft.compat.fused.table import reference, refuse, wide

_LISTS = "".join(
    f"Tensor[]? {name}=None, "
    for name in ("bias", "scale", "offset", "antiquant_scale", "antiquant_offset")
)
_ACTIVATION = "".join(
    f"Tensor[]? {name}=None, "
    for name in ("activation_input", "activation_quant_scale", "activation_quant_offset")
)
_ITEMS = (
    "int? split_item=0, int? group_type=None, int? group_list_type=0, int? act_type=0, "
    "int[]? tuning_config=None, ScalarType? output_dtype=None) -> Tensor[]"
)


def _schema(name: str, groups: str) -> str:
    return (
        f"{name}(Tensor[] x, Tensor[] weight, *, {_LISTS}Tensor[]? per_token_scale=None, "
        f"{groups}? group_list=None, {_ACTIVATION}{_ITEMS}"
    )


def npu_grouped_matmul(a: Any) -> list[Tensor]:
    """Each `x` times its weight, or the rows of one `x`, group by group, times theirs; as a list,
    or from `split_item` 2 on as one tensor. Rows of no group are zeros."""
    _check(a)
    whole = (a.split_item or 0) >= 2
    if a.group_list is None:
        tokens = a.per_token_scale or [None] * len(a.x)
        found = [_product(a, i, x, tokens[i]) for i, x in enumerate(a.x)]
        return [torch.cat(found)] if whole else found
    [x], count = a.x, _count(a.weight)
    scales = a.per_token_scale[0] if a.per_token_scale else None

    def one(i: int, start: int | None = None, end: int | None = None) -> Tensor:
        return _product(a, i, x[start:end], None if scales is None else scales[start:end])

    given = a.group_list
    if isinstance(given, Tensor):
        ends = given.long().cumsum(0) if a.group_list_type else given.long()
        if not _readable(ends):
            refuse("npu_grouped_matmul", "Use 2 in a graph.", split_item=not whole)
            return [_masked(x, ends, count, one)]
        bounds = [0, *ends.tolist()]
    else:
        bounds = [0, *given]
    found = [one(i, bounds[i], bounds[i + 1]) for i in range(count)]
    if not whole:
        return found
    rest = x.shape[0] - bounds[-1]
    return [torch.cat([*found, found[0].new_zeros(rest, found[0].shape[1])])]


reference(_schema("npu_grouped_matmul", "Tensor"), by_name=True)(npu_grouped_matmul)
reference(_schema("npu_grouped_matmul.List", "int[]"), by_name=True)(npu_grouped_matmul)


def _check(a: Any) -> None:
    name = "npu_grouped_matmul"
    refuse(name, "Apply the activation to the result.", act_type=a.act_type or None)
    refuse(name, "Multiply each group's columns by itself.", group_type=a.group_type == 2 or None)
    refuse(name, "Add up or count the groups.", group_list_type=a.group_list_type == 2 or None)
    refuse(
        name,
        "Quantize the result afterwards.",
        offset=a.offset,
        activation_input=a.activation_input,
        activation_quant_scale=a.activation_quant_scale,
        activation_quant_offset=a.activation_quant_offset,
    )
    packed = a.scale and not a.scale[0].dtype.is_floating_point
    refuse(name, "Pass the scale as floats, not packed for the device.", scale=packed or None)
    four_bits = a.weight[0].dtype == torch.int32
    refuse(name, "Use weights of int8.", weight=four_bits or None)
    if a.x[0].dtype == torch.int8 and a.output_dtype in (None, torch.int8):
        refuse(name, "Ask for float16, bfloat16 or int32.", output_dtype=True)
    if a.group_list is not None and len(a.x) != 1:
        raise ValueError(f"{name}: group_list divides one x, and {len(a.x)} are given")
    if a.group_list is None and len(a.x) != len(a.weight):
        raise ValueError(f"{name}: {len(a.x)} x for {len(a.weight)} weights, and no group_list")


def _readable(ends: Tensor) -> bool:
    """Whether the host may read them now: not in a trace, nor while a graph is captured."""
    device = getattr(torch, "npu", None)
    return _torch.has_values(ends) and not (device and device.is_current_stream_capturing())


def _count(weight: list[Tensor]) -> int:
    return weight[0].shape[0] if len(weight) == 1 and weight[0].dim() == 3 else len(weight)


def _masked(x: Tensor, ends: Tensor, count: int, one: Callable[[int], Tensor]) -> Tensor:
    """The same where the ends are not known: all rows times all weights, and each row's own."""
    rows = torch.arange(x.shape[0], device=x.device)
    group = torch.searchsorted(ends, rows, right=True).unsqueeze(-1)
    y = torch.zeros_like(first := one(0))
    for i in range(count):
        y = torch.where(group == i, first if i == 0 else one(i), y)
    return y


def _product(a: Any, i: int, x: Tensor, tokens: Tensor | None) -> Tensor:
    """Rows times the weight of one group."""

    def own(values: list[Tensor] | None, dims: int) -> Tensor | None:
        if not values:
            return None
        return values[i] if len(values) > 1 or values[0].dim() < dims else values[0][i]

    weight = own(a.weight, 3)
    assert weight is not None
    bias, scale = own(a.bias, 2), own(a.scale, 2)
    dtype = a.output_dtype or x.dtype
    if x.dtype == torch.int8:
        # Products of int8 are exact in float64 below 2**53, and fast there on every device.
        total = (x.double() @ weight.double()).to(torch.int32)
        total = total if bias is None else total + bias.to(torch.int32)
        if dtype == torch.int32:
            return total
        y = total.float() if scale is None else total.float() * scale.float()
        return (y if tokens is None else y * tokens.float().unsqueeze(-1)).to(dtype)
    if (kept := own(a.antiquant_scale, 2)) is not None:
        offset = own(a.antiquant_offset, 2)
        weight = weight.to(kept.dtype)
        weight = (weight if offset is None else weight + offset) * kept
    y = wide(x) @ wide(weight)
    return (y if bias is None else y + wide(bias)).to(dtype)


@reference(
    "npu_dequant_swiglu_quant(Tensor x, *, Tensor? weight_scale=None, "
    "Tensor? activation_scale=None, Tensor? bias=None, Tensor? quant_scale=None, "
    "Tensor? quant_offset=None, Tensor? group_index=None, bool activate_left=False, "
    "int quant_mode=0) -> (Tensor, Tensor)",
    by_name=True,
)
def npu_dequant_swiglu_quant(a: Any) -> tuple[Tensor, Tensor]:
    """swiglu of int32 sums as the floats they stand for, in int8 again, and its scale."""
    name = "npu_dequant_swiglu_quant"
    refuse(name, "Use 1, a scale for each row.", quant_mode=a.quant_mode != 1 or None)
    refuse(name, "Leave it out.", quant_offset=a.quant_offset, bias=a.bias)
    group = torch.zeros(a.x.shape[0], dtype=torch.int64, device=a.x.device)
    if a.group_index is not None:
        rows = torch.arange(a.x.shape[0], device=a.x.device)
        group = torch.searchsorted(a.group_index.long().cumsum(0), rows, right=True)

    def own(values: Tensor) -> Tensor:
        table = values.reshape(-1, values.shape[-1])
        return table[group.clamp(max=table.shape[0] - 1)].float()

    y = a.x.float()
    y = y if a.weight_scale is None else y * own(a.weight_scale)
    y = y if a.activation_scale is None else y * a.activation_scale.float().reshape(-1, 1)
    left, right = y.chunk(2, -1)
    y = functional.silu(left) * right if a.activate_left else functional.silu(right) * left
    return npu_dynamic_quant(y if a.quant_scale is None else y * own(a.quant_scale))
