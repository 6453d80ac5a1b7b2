"""A mixture of experts: who computes which row, and the rows on their way there and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchgraft.compat.fused.quant import npu_dynamic_quant
from torchgraft.compat.fused.table import reference, refuse, wide


def _places(weights: Tensor) -> Tensor:
    """For each row and choice, its number when choices are counted one after the other."""
    rows, k = weights.shape[:-1].numel(), weights.shape[-1]
    counted = torch.arange(rows * k, dtype=torch.int32, device=weights.device)
    return counted.reshape(k, rows).t().reshape(weights.shape).contiguous()


def _unless(finished: Tensor | None, experts: Tensor, count: int) -> Tensor:
    """The experts, or `count`, which is none of them, in rows that are finished."""
    if finished is not None:
        experts = torch.where(finished.unsqueeze(-1), count, experts)
    return experts.int()


@reference(
    "npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) "
    "-> (Tensor, Tensor, Tensor)"
)
def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of the k best experts of each row, those experts, and the row each pair has
    when pairs are counted expert by expert."""
    best, experts = functional.softmax(wide(x), -1).topk(k, -1)
    return best.to(x.dtype), _unless(finished, experts, x.shape[-1]), _places(best)


@reference(
    "npu_moe_gating_top_k_softmax_v2(Tensor x, *, int k=1, Tensor? finished=None, int renorm=0, "
    "bool output_softmax=False) -> (Tensor, Tensor, Tensor)"
)
def npu_moe_gating_top_k_softmax_v2(
    x: Tensor,
    *,
    k: int = 1,
    finished: Tensor | None = None,
    renorm: int = 0,
    output_softmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of the k best experts, those experts, and where asked for the weights of all.
    With `renorm` the weights of the best add up to one."""
    every = functional.softmax(wide(x), -1)
    if renorm:
        best, experts = wide(x).topk(k, -1)
        best = functional.softmax(best, -1)
    else:
        best, experts = every.topk(k, -1)
    shown = every.float() if output_softmax and not renorm else x.new_empty(0, dtype=torch.float32)
    return best.to(x.dtype), _unless(finished, experts, x.shape[-1]), shown


@reference(
    "npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, int k_group=1, "
    "int group_count=1, int group_select_mode=0, int renorm=0, int norm_type=0, "
    "bool out_flag=False, float routed_scaling_factor=1.0, float eps=1e-20) "
    "-> (Tensor, Tensor, Tensor)",
    by_name=True,
)
def npu_moe_gating_top_k(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of the k best experts of each row, those experts, and the weights of all.

    Groups of experts compete first, by their best or by the sum of their best two. A bias has a say
    in who is chosen and none in the weights.
    """
    scores = torch.sigmoid(wide(a.x)) if a.norm_type else functional.softmax(wide(a.x), -1)
    rated = scores if a.bias is None else scores + wide(a.bias)
    if a.group_count > 1:
        groups = rated.reshape(rated.shape[0], a.group_count, -1)
        best = groups.topk(2, -1)[0].sum(-1) if a.group_select_mode else groups.amax(-1)
        winners = _best(best, a.k_group)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, winners, True)
        rated = groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).reshape(rated.shape)
    experts = _best(rated, a.k)
    weights = scores.gather(-1, experts)
    if a.norm_type or a.renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + a.eps)
    return (weights * a.routed_scaling_factor).to(a.x.dtype), experts.int(), scores.float()


def _best(values: Tensor, count: int) -> Tensor:
    """The places of the largest values; of equal ones the first."""
    return values.sort(dim=-1, descending=True, stable=True)[1][..., :count]


@reference(
    "npu_moe_init_routing(Tensor x, Tensor row_idx, Tensor expert_idx, int active_num=99) "
    "-> (Tensor, Tensor, Tensor)"
)
def npu_moe_init_routing(
    x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int = 99
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows expert by expert, where each pair of row and choice went, and the experts."""
    rows, k = expert_idx.shape
    experts, order = expert_idx.flatten().sort(stable=True)
    pairs = row_idx.flatten()[order].long()
    count = min(rows, active_num) * k
    return x[pairs[:count] % rows], _inverse(pairs), experts


def _inverse(order: Tensor) -> Tensor:
    """Where each of a permutation's numbers stands."""
    counted = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
    return torch.empty_like(counted).scatter(0, order, counted)


@reference(
    "npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, "
    "Tensor? offset=None, int active_num=-1, int expert_capacity=-1, int expert_num=-1, "
    "int drop_pad_mode=0, int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, "
    "int quant_mode=-1, int[2] active_expert_range=[], int row_idx_type=0) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    by_name=True,
)
def npu_moe_init_routing_v2(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows expert by expert, where each pair went, how many each expert has, and scales.

    Pairs of experts outside of the active range come last, as zeros. In mode 1 each expert has
    `expert_capacity` slots, and what does not fit is left out.
    """
    name = "npu_moe_init_routing_v2"
    refuse(name, "Use -1, or 1 for int8.", quant_mode=a.quant_mode not in (-1, 1) or None)
    refuse(name, "Leave it out.", offset=a.offset)
    first, last = a.active_expert_range or (0, a.expert_num)
    if not 0 <= first < last:
        raise ValueError(f"{name}: experts {first} to {last} are none; pass expert_num")
    chosen = a.expert_idx.flatten().long()
    key = torch.where((chosen >= first) & (chosen < last), chosen, last)
    experts, order = key.sort(stable=True)
    valid = experts < last
    tally = torch.zeros(last - first + 1, dtype=torch.int64, device=key.device)
    tally = tally.scatter_add(0, key - first, torch.ones_like(key))[:-1]
    rows, scales = _gathered(a, order // a.expert_idx.shape[1], experts - first)
    rows, scales = rows * valid.unsqueeze(-1), scales * valid
    places = _inverse(order)
    if a.drop_pad_mode:
        slots = (
            experts * a.expert_capacity
            + places[order]
            - (tally.cumsum(0) - tally)[(experts - first).clamp(max=last - first - 1)]
        )
        fits = valid & (slots < (experts + 1) * a.expert_capacity)
        total = a.expert_num * a.expert_capacity
        slots = torch.where(fits, slots, total)
        rows = rows.new_zeros(total + 1, rows.shape[1]).index_copy(0, slots, rows)[:-1]
        rows = rows.reshape(a.expert_num, a.expert_capacity, -1)
        scales = scales.new_zeros(total + 1).index_copy(0, slots, scales)[:-1]
        went = torch.where(fits, slots, -1).int()
        places = torch.empty_like(places).scatter(0, order, went)
    else:
        count = min(a.active_num, order.numel()) if a.active_num > 0 else order.numel()
        rows, scales = rows[:count], scales[:count]
        places = order.int() if a.row_idx_type else places.masked_fill(key == last, -1)
    return rows, places, _counted(a, tally, first), scales


def _gathered(a: Any, source: Tensor, expert: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in a new order with their scales; in int8 where that is asked for."""
    rows = a.x[source]
    if a.quant_mode == -1:
        empty = torch.zeros(source.numel(), dtype=torch.float32, device=rows.device)
        return rows, empty if a.scale is None else a.scale[source]
    smooth = a.scale
    if smooth is not None and smooth.shape[0] > 1:
        smooth = smooth[expert.clamp(max=smooth.shape[0] - 1)]
    return npu_dynamic_quant(rows, smooth_scales=smooth)


def _counted(a: Any, tally: Tensor, first: int) -> Tensor:
    """How many rows each expert has: added up, each for itself, or of those that have any."""
    if not a.expert_tokens_num_flag:
        return tally.new_zeros(())
    if a.expert_tokens_num_type < 2:
        return tally if a.expert_tokens_num_type else tally.cumsum(0)
    some = tally > 0
    places = torch.where(some, some.cumsum(0) - 1, a.expert_num)
    names = torch.arange(first, first + tally.numel(), device=tally.device)
    pairs = torch.stack((names, tally), 1)
    return tally.new_zeros(a.expert_num + 1, 2).index_copy(0, places, pairs)[:-1]


@reference(
    "npu_moe_compute_expert_tokens(Tensor sorted_expert_for_source_row, int num_expert) -> Tensor"
)
def npu_moe_compute_expert_tokens(sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    """For each expert, the row after its last one."""
    experts = sorted_expert_for_source_row
    each = torch.arange(num_expert, dtype=experts.dtype, device=experts.device)
    return torch.searchsorted(experts, each, right=True).to(experts.dtype)


@reference(
    "npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, "
    "Tensor? bias, Tensor? scales, Tensor expanded_src_to_dst_row, "
    "Tensor? export_for_source_row, int? drop_pad_mode=0) -> Tensor"
)
def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
) -> Tensor:
    """For each row the sum of what its experts made of it, weighted, and of what skipped them.
    Choices are counted one after the other in modes 0 and 1, rows in 2 and 3."""
    made = expanded_permuted_rows.flatten(0, -2)
    k = 1 if scales is None else scales.shape[1]
    places = expanded_src_to_dst_row.long()
    places = places.reshape(-1, k) if (drop_pad_mode or 0) >= 2 else places.reshape(k, -1).t()
    taken = wide(made)[places.clamp(min=0)] * (places >= 0).unsqueeze(-1)
    if bias is not None:
        if export_for_source_row is None:
            raise ValueError("npu_moe_finalize_routing: a bias needs export_for_source_row")
        taken = taken + wide(bias)[export_for_source_row.long()]
    if scales is not None:
        taken = taken * wide(scales).unsqueeze(-1)
    out = taken.sum(1)
    for skip in (skip1, skip2):
        out = out if skip is None else out + wide(skip)
    return out.to(made.dtype)


@reference(
    "npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, "
    "bool padded_mode=False) -> (Tensor, Tensor)"
)
def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """The rows expert by expert, and where each pair of row and choice went."""
    refuse("npu_moe_token_permute", "Pad afterwards.", padded_mode=padded_mode)
    k = indices.shape[1] if indices.dim() > 1 else 1
    order = indices.flatten().sort(stable=True)[1]
    kept = order[:num_out_tokens] if num_out_tokens else order
    return tokens[kept // k], _inverse(order)


@reference(
    "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
    "bool padded_mode=False, int[]? restore_shape=None) -> Tensor"
)
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    """For each row the weighted sum of what its experts made of it; of what was left out, none."""
    refuse("npu_moe_token_unpermute", "Cut the padding off first.", padded_mode=padded_mode)
    k = 1 if probs is None else probs.shape[1]
    places, count = sorted_indices.long(), permuted_tokens.shape[0]
    there = (places < count).unsqueeze(-1)
    taken = wide(permuted_tokens)[places.clamp(max=count - 1)] * there
    taken = taken.reshape(-1, k, permuted_tokens.shape[-1])
    if probs is not None:
        taken = taken * wide(probs).unsqueeze(-1)
    return taken.sum(1).to(permuted_tokens.dtype)


@reference(
    "npu_moe_re_routing(Tensor tokens, Tensor expert_token_num_per_rank, *, "
    "Tensor? per_token_scales=None, int expert_token_num_type=1, int idx_type=0) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
def npu_moe_re_routing(
    tokens: Tensor,
    expert_token_num_per_rank: Tensor,
    *,
    per_token_scales: Tensor | None = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows that lie rank by rank, expert by expert: the same rows, scales, where each came from,
    and the count of each expert."""
    name, counts = "npu_moe_re_routing", expert_token_num_per_rank
    refuse(name, "Add the counts up.", expert_token_num_type=expert_token_num_type != 1 or None)
    refuse(name, "Invert the index.", idx_type=idx_type or None)
    ranks, experts = counts.shape
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    part = torch.searchsorted(counts.flatten().long().cumsum(0), rows, right=True)
    order = (part % experts * ranks + part // experts).sort(stable=True)[1]
    empty = torch.zeros(tokens.shape[0], dtype=torch.float32, device=tokens.device)
    scales = empty if per_token_scales is None else per_token_scales[order]
    return tokens[order], scales, order.int(), counts.sum(0).to(counts.dtype)
