"""Attention: its projections, its rotary embedding, and the thing itself."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torchgraft.errors import NoMatch
from torchgraft.passes.pattern.define import pattern
from torchgraft.passes.pattern.rewrite import Match

_HEADS = {"q": "[b, h, s, d]", "k": "[b, h, t, d]", "v": "[b, h, t, e]", "mask": "[b, 1, s, t]"}


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, divide: bool) -> Tensor:
    scores = torch.matmul(q, k.transpose(-2, -1))
    scores = scores / scale if divide else scores * scale
    return scores if mask is None else scores + mask


@pattern(register=False, types=_HEADS)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    divide: bool,
) -> Tensor:
    """Scaled scores, an optional mask, softmax, values."""
    return torch.matmul(torch.softmax(_scores(q, k, mask, scale, divide), -1), v)


@pattern(register=False, types=_HEADS)
def attention_upcast(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, divide: bool
) -> Tensor:
    """The same with the softmax in float32, for half precision."""
    weights = torch.softmax(_scores(q, k, mask, scale, divide), -1, dtype=torch.float32)
    return torch.matmul(weights.to(q.dtype), v)


@attention_upcast.replace
def _(m: Match) -> Tensor:
    if m.q.dtype == torch.float64:
        raise NoMatch("the pattern rounds float64 to float32, SDPA does not", m.node("softmax"))
    return _sdpa(m)


@attention.replace
def _sdpa(m: Match) -> Tensor:
    mask = m.mask
    if mask is not None and mask.dtype != m.q.dtype:
        raise NoMatch(f"the mask is {mask.dtype}, the queries are {m.q.dtype}", m.node("add"))
    scale = 1 / m.scale if m.divide else m.scale
    return F.scaled_dot_product_attention(m.q, m.k, m.v, attn_mask=mask, scale=scale)


@pattern(register=False, types={"x": "[b, h, s, d]", "cos": "[b, 1, s, d]", "sin": "[b, 1, s, d]"})
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by `rotate_half`, as Llama and GPT-NeoX have it."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


@rotary.replace
def _(m: Match) -> Tensor:
    """Half by half, so that nothing is turned in memory."""
    half = m.x.shape[-1] // 2
    one, two = m.x[..., :half], m.x[..., half:]
    cos1, cos2 = m.cos[..., :half], m.cos[..., half:]
    sin1, sin2 = m.sin[..., :half], m.sin[..., half:]
    return torch.cat((one * cos1 - two * sin1, two * cos2 + one * sin2), dim=-1)


_X = ("[b, s, h]", "[n, h]")
_WEIGHTS = {"wq": "[q, h]", "wk": "[k, h]", "wv": "[v, h]"}


@pattern(register=False, types=[{"x": x, **_WEIGHTS} for x in _X])
def qkv(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three projections of one input."""
    return F.linear(x, wq), F.linear(x, wk), F.linear(x, wv)


@qkv.replace
def _(m: Match) -> tuple[Tensor, ...]:
    _known(m, "wq", "wk", "wv")
    return _parts(m, F.linear(m.x, torch.cat((m.wq, m.wk, m.wv))))


@pattern(
    register=False,
    types=[{"x": x, **_WEIGHTS, "bq": "[q]", "bk": "[k]", "bv": "[v]"} for x in _X],
)
def qkv_bias(
    x: Tensor, wq: Tensor, bq: Tensor, wk: Tensor, bk: Tensor, wv: Tensor, bv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Three projections of one input, each with a bias."""
    return F.linear(x, wq, bq), F.linear(x, wk, bk), F.linear(x, wv, bv)


@qkv_bias.replace
def _(m: Match) -> tuple[Tensor, ...]:
    _known(m, "wq", "wk", "wv", "bq", "bk", "bv")
    weight, bias = torch.cat((m.wq, m.wk, m.wv)), torch.cat((m.bq, m.bk, m.bv))
    return _parts(m, F.linear(m.x, weight, bias))


def _parts(m: Match, together: Tensor) -> tuple[Tensor, ...]:
    return torch.split(together, [w.shape[0] for w in (m.wq, m.wk, m.wv)], -1)


def _known(m: Match, *names: str) -> None:
    for name in names:
        if not m.is_constant(name):
            raise NoMatch(f"{name!r} is not frozen, so merging would copy it at each call")


@pattern(register=False)
def softmax_dropout(x: Tensor, dim: int, p: float) -> Tensor:
    """Dropout on attention weights, left on by mistake."""
    return F.dropout(torch.softmax(x, dim), p, True)


@softmax_dropout.replace
def _(m: Match) -> Tensor:
    """No dropout: what `model.eval()` would have given."""
    return torch.softmax(m.x, m.dim)
