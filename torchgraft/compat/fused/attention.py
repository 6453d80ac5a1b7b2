"""Attention: the layouts, masks and lengths of the NPU's operators over one small core."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchgraft.compat.fused.table import reference, refuse, wide

ALL = 2147483647
"""As many tokens as there are: no band."""
_PLAIN = "Use torch.nn.functional.scaled_dot_product_attention."
_MASK = "Pass it as a mask to torch.nn.functional.scaled_dot_product_attention."


def _attend(
    query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the largest score and the sum of exponentials of each row, of tensors
    [..., heads, tokens, size]. Rows that see nothing are zero."""
    if key.shape[-2] == 0:
        nothing = wide(query).new_zeros(*query.shape[:-1], 1)
        return nothing.to(query.dtype).repeat_interleave(value.shape[-1], -1), nothing, nothing
    shared = query.shape[-3] // key.shape[-3]
    if shared > 1:  # several heads of queries have one of keys
        key, value = (x.repeat_interleave(shared, -3) for x in (key, value))
    scores = wide(query) @ wide(key).transpose(-1, -2) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top == float("-inf"), 0.0, top).detach()
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    out = (weights / torch.where(total == 0, 1.0, total)) @ wide(value)
    return out.to(query.dtype), top, total


def _split(x: Tensor, heads: int) -> Tensor:
    return x.reshape(*x.shape[:-1], heads, -1)


_TO_BNSD: dict[str, Callable[..., Tensor]] = {
    "BSH": lambda x, heads: _split(x, heads).transpose(1, 2),
    "SBH": lambda x, heads: _split(x, heads).permute(1, 2, 0, 3),
    "BSND": lambda x, heads: x.transpose(1, 2),
    "BNSD": lambda x, heads: x,
}
_FROM_BNSD: dict[str, Callable[[Tensor], Tensor]] = {
    "BSH": lambda x: x.transpose(1, 2).flatten(2),
    "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
    "BSND": lambda x: x.transpose(1, 2),
    "BNSD": lambda x: x,
}


def _layout(name: str, layout: str, known: Sequence[str]) -> None:
    if layout not in known:
        raise ValueError(f"{name}: input_layout is {layout!r}; here it is one of {list(known)}")


def _hidden(
    name: str, mask: Tensor | None, mode: int, rows: int, columns: int, band: tuple[int, int]
) -> Tensor | None:
    """What of the scores is not seen, by a mode of sparsity. A mode without a mask sees all.

    In modes 0 and 4 a token sees so many before it and behind it: the `band`.
    """
    if mask is None:
        return None
    if mode == 1 or (mode == 0 and band == (ALL, ALL)):
        return mask[..., :rows, :columns].bool()
    if mode not in (0, 2, 3, 4) or (mode == 4 and rows != columns):
        refuse(name, "Use sparse_mode 0 with a whole mask.", sparse_mode=mode)
    row = torch.arange(rows, device=mask.device).unsqueeze(1)
    ahead = torch.arange(columns, device=mask.device) - row
    if mode in (2, 3):
        return ahead > (columns - rows if mode == 3 else 0)
    outside = (ahead > band[1]) | (ahead < -band[0])
    return outside if mode == 4 else outside | mask[..., :rows, :columns].bool()


def _varied(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Sequence[int], Sequence[int]],
    hidden: Callable[[int, int], Tensor | None],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention within each of several sequences that lie one after another, [tokens, heads, size].

    `ends` are where they end; zeros at the end are sequences that are left out.
    """
    found, begin = [], (0, 0)
    for end in zip(*ends, strict=True):
        if end[0] < begin[0] or end[1] < begin[1]:
            break
        (q, k), (q_end, k_end) = begin, end
        here, keys, values = query[q:q_end], key[k:k_end], value[k:k_end]
        here, keys, values = (x.transpose(0, 1) for x in (here, keys, values))
        found.append(_attend(here, keys, values, hidden(q_end - q, k_end - k), scale))
        begin = end
    rest = query.shape[0] - begin[0]
    joined = [torch.cat([one[i].transpose(0, 1) for one in found]) for i in range(3)]
    if rest:
        joined = [torch.cat([x, x.new_zeros(rest, *x.shape[1:])]) for x in joined]
    return joined[0], joined[1], joined[2]


@reference(
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, "
    "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., "
    "float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, "
    "int inner_precise=0, int[]? prefix=None, int[]? actual_seq_qlen=None, "
    "int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
    "bool sync=False) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
    by_name=True,
)
def npu_fusion_attention(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Attention, with the largest score and the sum of exponentials of each row, eight times as the
    NPU gives them. Nothing is dropped out: the last three results are zero."""
    name, layout, band = "npu_fusion_attention", a.input_layout, (a.pre_tockens, a.next_tockens)
    _layout(name, layout, ["BSH", "SBH", "BSND", "BNSD", "TND"])
    refuse(name, _MASK, pse=a.pse, padding_mask=a.padding_mask, prefix=a.prefix)
    dropped = a.keep_prob if a.keep_prob != 1 else None
    refuse(name, "Use scaled_dot_product_attention(dropout_p=...).", keep_prob=dropped)

    def hidden(rows: int, columns: int) -> Tensor | None:
        return _hidden(name, a.atten_mask, a.sparse_mode, rows, columns, band)

    if layout == "TND":
        if a.actual_seq_qlen is None or a.actual_seq_kvlen is None:
            raise ValueError(f"{name}: TND needs actual_seq_qlen and actual_seq_kvlen")
        ends = (a.actual_seq_qlen, a.actual_seq_kvlen)
        out, top, total = _varied(a.query, a.key, a.value, ends, hidden, a.scale)
    else:
        q = _TO_BNSD[layout](a.query, a.head_num)
        heads = a.key.shape[-1] // q.shape[-1]  # where the layout does not say
        k, v = (_TO_BNSD[layout](x, heads) for x in (a.key, a.value))
        out, top, total = _attend(q, k, v, hidden(q.shape[2], k.shape[2]), a.scale)
        out = _FROM_BNSD[layout](out)
    eight = [x.detach().float().repeat(*([1] * (x.ndim - 1)), 8) for x in (top, total)]
    return out.contiguous(), eight[0], eight[1], a.query.new_empty(0), 0, 0, 0


def _paged(cache: Tensor, table: Tensor, heads: int) -> Tensor:
    """The sequences of a cache of blocks, as [batch, heads, tokens, size]."""
    blocks = cache[table.long()]  # [batch, blocks, ...]
    if cache.ndim == 3:  # [blocks, slots, heads * size]
        blocks = _split(blocks, heads)
    else:  # [blocks, heads, slots, size]
        blocks = blocks.transpose(2, 3)
    return blocks.flatten(1, 2).transpose(1, 2)


def _lengths(given: Sequence[int] | None, batch: int) -> list[int] | None:
    if given is None:
        return None
    return list(given) * batch if len(given) == 1 else list(given)[:batch]


def _infer(
    name: str, a: Any, layouts: Sequence[str], lengths: tuple[Any, Any], scale: float
) -> tuple[Tensor, Tensor]:
    """Attention for inference, and the log of the sum of exponentials of each row.

    `a` has the arguments of one of the operators: some have no blocks, some no mode.
    """
    _layout(name, a.input_layout, layouts)
    refuse(name, _PLAIN, **{key: x for key, x in vars(a).items() if key in _NOT_HERE})
    given, _, result = a.input_layout.partition("_")
    heads = a.num_key_value_heads or a.num_heads
    table, mask, mode = getattr(a, "block_table", None), a.atten_mask, getattr(a, "sparse_mode", 0)
    if given == "TND":
        return _infer_varied(name, a, lengths, table, heads, scale)
    q = _TO_BNSD[given](a.query, a.num_heads)
    to_bnsd = (
        partial(_TO_BNSD[given], heads=heads)
        if table is None
        else partial(_paged, table=table, heads=heads)
    )
    k, v = to_bnsd(a.key), to_bnsd(a.value)
    batch, rows, columns = q.shape[0], q.shape[2], k.shape[2]
    of_q, of_kv = (_lengths(one, batch) for one in lengths)
    if mask is not None and rows > 1 and mode > 2 and of_kv and set(of_kv) != {columns}:
        refuse(name, "Use layout TND, or sparse_mode 0 with a whole mask.", sparse_mode=mode)
    if rows == 1:  # a single token sees all, but for what a mask of its own hides
        mode = 1
        own = mask is not None and mask.numel() in (columns, batch * columns)
        mask = mask.reshape(-1, 1, 1, columns) if own else None
    elif mask is not None and mask.ndim == 3:
        mask = mask.unsqueeze(1)
    band = (getattr(a, "pre_tokens", ALL), getattr(a, "next_tokens", ALL))
    hidden = _hidden(name, mask, mode, rows, columns, band)
    if of_kv is not None:
        beyond = ~_within(of_kv, columns, q.device)[:, None, None, :]
        hidden = beyond if hidden is None else hidden | beyond
    out, top, total = _attend(q, k, v, hidden, scale)
    if of_q is not None:
        out = out * _within(of_q, rows, q.device)[:, None, :, None].to(out.dtype)
    return _FROM_BNSD[result or given](out).contiguous(), (top + total.log()).float()


def _within(lengths: Sequence[int], size: int, device: torch.device) -> Tensor:
    """[batch, size]: which places are within each length."""
    return torch.arange(size, device=device) < torch.tensor(lengths, device=device)[:, None]


def _infer_varied(
    name: str, a: Any, lengths: tuple[Any, Any], table: Tensor | None, heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    of_q, of_kv = lengths
    if of_q is None or of_kv is None:
        raise ValueError(f"{name}: TND needs actual_seq_lengths and actual_seq_lengths_kv")

    def hidden(rows: int, columns: int) -> Tensor | None:
        band = (a.pre_tokens, a.next_tokens)
        return _hidden(name, a.atten_mask, a.sparse_mode, rows, columns, band)

    key, value = a.key, a.value
    if table is not None:  # lengths of keys are each sequence's own, and the blocks have them
        pages = [_paged(x, table, heads).transpose(1, 2) for x in (key, value)]
        key, value = (torch.cat([x[i, :n] for i, n in enumerate(of_kv)]) for x in pages)
        of_kv = list(itertools.accumulate(of_kv))
    out, top, total = _varied(a.query, key, value, (of_q, of_kv), hidden, scale)
    return out, (top + total.log()).float()


_NOT_HERE = {
    "dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2", "quant_offset2",
    "deq_scale1", "deq_scale2", "antiquant_scale", "antiquant_offset", "key_antiquant_scale",
    "key_antiquant_offset", "value_antiquant_scale", "value_antiquant_offset",
    "query_padding_size", "kv_padding_size", "key_shared_prefix", "value_shared_prefix",
    "query_rope", "key_rope", "key_rope_antiquant_scale", "pse_shift", "padding_mask",
}  # fmt: skip
"""Arguments of the operators for inference that are refused."""


@reference(
    "npu_prompt_flash_attention(Tensor query, Tensor key, Tensor value, *, "
    "Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? pse_shift=None, "
    "int[]? actual_seq_lengths=None, Tensor? deq_scale1=None, Tensor? quant_scale1=None, "
    "Tensor? deq_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, "
    "int num_heads=1, float scale_value=1.0, int pre_tokens=2147473647, int next_tokens=0, "
    'str input_layout="BSH", int num_key_value_heads=0, int[]? actual_seq_lengths_kv=None, '
    "int sparse_mode=0) -> Tensor",
    by_name=True,
)
def npu_prompt_flash_attention(a: Any) -> Tensor:
    """Attention of a whole prompt."""
    lengths = (a.actual_seq_lengths, a.actual_seq_lengths_kv)
    layouts = ["BSH", "BSND", "BNSD", "BNSD_BSND"]
    return _infer("npu_prompt_flash_attention", a, layouts, lengths, a.scale_value)[0]


@reference(
    "npu_incre_flash_attention(Tensor query, Tensor key, Tensor value, *, "
    "Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? pse_shift=None, "
    "SymInt[]? actual_seq_lengths=None, Tensor? antiquant_scale=None, "
    "Tensor? antiquant_offset=None, Tensor? block_table=None, Tensor? dequant_scale1=None, "
    "Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, "
    "Tensor? quant_offset2=None, Tensor? kv_padding_size=None, int num_heads=1, "
    'float scale_value=1.0, str input_layout="BSH", int num_key_value_heads=0, '
    "int block_size=0, int inner_precise=1) -> Tensor",
    by_name=True,
)
def npu_incre_flash_attention(a: Any) -> Tensor:
    """Attention of one new token over a cache; lengths are those of the cache."""
    lengths, layouts = (None, a.actual_seq_lengths), ["BSH", "BSND", "BNSD"]
    return _infer("npu_incre_flash_attention", a, layouts, lengths, a.scale_value)[0]


_SCORE = (
    "npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, "
    "Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, "
    "SymInt[]? actual_seq_lengths_kv=None, Tensor? dequant_scale1=None, "
    "Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, "
    "Tensor? quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, "
    "Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None, "
    "Tensor? value_antiquant_scale=None, Tensor? value_antiquant_offset=None, "
    "Tensor? block_table=None, Tensor? query_padding_size=None, Tensor? kv_padding_size=None, "
    "Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, "
    "SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None, "
    "Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0, "
    'int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout="BSH", '
    "int num_key_value_heads=0, int sparse_mode=0, int inner_precise=0, int block_size=0, "
    "int antiquant_mode=0, bool softmax_lse_flag=False, int key_antiquant_mode=0, "
    "int value_antiquant_mode=0) -> (Tensor, Tensor)"
)


@reference(_SCORE, by_name=True)
def npu_fused_infer_attention_score(a: Any) -> tuple[Tensor, Tensor]:
    """Attention of a prompt or of a new token, over tensors or a cache of blocks; the second result
    is the log of the sum of exponentials of each row where it is asked for, else one zero."""
    lengths = (a.actual_seq_lengths, a.actual_seq_lengths_kv)
    layouts = ["BSH", "BSND", "BNSD", "BNSD_BSND", "TND"]
    out, lse = _infer("npu_fused_infer_attention_score", a, layouts, lengths, a.scale)
    return out, lse if a.softmax_lse_flag else a.query.new_zeros(1, dtype=torch.float32)


@reference(
    _SCORE.replace("score(", "score.out(").replace(
        ") -> (Tensor, Tensor)", ", Tensor? workspace=None, Tensor(a!)[] out) -> ()"
    ),
    by_name=True,
)
def npu_fused_infer_attention_score_out(a: Any) -> None:
    """Likewise, into two tensors; a workspace is not needed."""
    given = {name: value for name, value in vars(a).items() if name not in ("workspace", "out")}
    results = torch.ops.npu.npu_fused_infer_attention_score(**given)
    for held, result in zip(a.out, results, strict=True):
        held.copy_(result)


@reference(
    _SCORE.replace("npu_", "_npu_", 1)
    .replace("score(", "score_get_max_workspace(")
    .replace("(Tensor, Tensor)", "Tensor"),
    by_name=True,
)
def npu_fused_infer_attention_score_get_max_workspace(a: Any) -> Tensor:
    """An empty tensor."""
    return a.query.new_empty(0)  # type: ignore[no-any-return]
