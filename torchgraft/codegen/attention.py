"""Attention on CPU by generated code, where that beats torch's own kernel.

The kernel of torch calls MKL for each head and a few rows, which on a processor that is not Intel's
reaches half of what its registers could do (docs/performance.md).
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft._torch import attention
from torchgraft.codegen import own

aten = torch.ops.aten

LANES = 16
MOST_KEYS = 4096
"""With so many it was 1.2 times as fast as torch's kernel; more was not measured."""


def as_code(gm: GraphModule) -> bool:
    """Let code be generated for attention; whether there is any. `gm` is one that Inductor's
    decompositions have been through."""
    if not own.is_ahead("amd", "intel"):
        return False
    found = gm.graph.find_nodes(
        op="call_function", target=aten._scaled_dot_product_flash_attention_for_cpu.default
    )
    chosen = [node for node in found if _fits(node, *node.args, **node.kwargs)]
    for node in chosen:
        _replace(node, *node.args, **node.kwargs)
    return bool(chosen)


def _fits(
    node: Node,
    q: Node,
    k: Node,
    v: Node,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: Node | None = None,
    scale: float | None = None,
) -> bool:
    if not all(user.target is operator.getitem and user.args[1] == 0 for user in node.users):
        return False  # a gradient wants more than the result
    if dropout or (scale is not None and scale <= 0) or not _is_mask(attn_mask, k):
        return False
    queries, keys, values = (n.meta["val"] for n in (q, k, v))
    sizes = [*queries.shape, *keys.shape, *values.shape]
    return (
        queries.dtype == torch.float32
        and queries.ndim == 4
        and all(isinstance(size, int) and size > 0 for size in sizes)
        and queries.shape[:2] == keys.shape[:2] == values.shape[:2]
        and queries.shape[2] >= attention.ROWS
        and keys.shape[2] == values.shape[2] <= MOST_KEYS
        and queries.shape[3] % LANES == values.shape[3] % LANES == 0
        and queries.shape[0] * queries.shape[1] >= torch.get_num_threads()
    )


def _is_mask(mask: Node | None, k: Node) -> bool:
    """Whether a mask, if there is one, adds a number for each key."""
    if mask is None:
        return True
    value = mask.meta["val"]
    return (
        value.dtype == torch.float32
        and value.ndim == 4
        and all(isinstance(size, int) for size in value.shape)
        and value.shape[3] == k.meta["val"].shape[2]
    )


def _replace(
    node: Node,
    q: Node,
    k: Node,
    v: Node,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: Node | None = None,
    scale: float | None = None,
) -> None:
    graph = node.graph
    factor = q.meta["val"].shape[-1] ** -0.5 if scale is None else float(scale)
    with graph.inserting_before(node):
        made = graph.call_function(attend(), (q, k, v, attn_mask, causal, factor))
    made.meta |= node.meta
    made.meta["val"] = node.meta["val"][0]
    for user in list(node.users):
        user.replace_all_uses_with(made)
        graph.erase_node(user)
    graph.erase_node(node)


@functools.cache
def attend() -> Any:
    """The operator that stands for it in a graph."""
    schema = (
        "attend(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale) -> Tensor"
    )
    op = own.declared(schema, _plain)
    attention.generate_for(op)
    return op


def _plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    result: Tensor = flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)[0]
    return result
