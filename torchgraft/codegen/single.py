"""One row on CUDA, as in a decoding step: products, attention and a cache's slot as plain loops.

A library's kernels are made for many rows: one row keeps few multiprocessors busy, and nothing
fuses with it. As sums, the generator writes them itself, in one kernel with what follows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft._torch import generator
from torchgraft.fx import meta, returned

aten = torch.ops.aten

MANY = 1 << 25
"""Weights up to which a product is generated. A library reads more of them somewhat faster: 77 MB
in 30 µs on an H200, generated code in 35."""


def as_loops(gm: GraphModule, mode: Any, device: str = "cuda") -> None:
    """Replace what has one row, sizes known, in place. `mode` is the fake mode of its values."""
    gm.meta["fake_mode"] = mode
    for node in list(gm.graph.nodes):
        write = _WAYS.get(node.target)
        if write is None or not _is_plain(node, device):
            continue
        with gm.graph.inserting_before(node):
            made = write(_Writer(gm, node), *node.args, **node.kwargs)
        if made is not None and returned.strides(made.meta["val"]) == _strides(node):
            gone = [*(user for user in node.users if user.target is operator.getitem), node]
            for one in gone:
                one.replace_all_uses_with(made)
                gm.graph.erase_node(one)
    gm.recompile()


def _strides(node: Node) -> Any:
    value = node.meta["val"]
    return returned.strides(value if isinstance(value, Tensor) else value[0])


def _is_plain(node: Node, device: str) -> bool:
    """Whether the sizes of all that a call reads are known, it lies on the device, and nobody reads
    more of several results than the first."""
    values = [one.meta.get("val") for one in node.all_input_nodes]
    return all(
        isinstance(value, Tensor)
        and value.device.type == device
        and all(isinstance(size, int) for size in value.shape)
        for value in values
    ) and all(user.args[1] == 0 for user in node.users if user.target is operator.getitem)


class _Writer:
    """Writes calls in place of a node."""

    def __init__(self, gm: GraphModule, node: Node) -> None:
        self.gm, self.node = gm, node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return meta.call(self.gm, self.node, target, *args, **kwargs)

    def wide(self, value: Node) -> Node:
        """A value in the type that sums are computed in."""
        narrow = value.meta["val"].dtype in (torch.float16, torch.bfloat16)
        return self(aten._to_copy.default, value, dtype=torch.float32) if narrow else value

    def result(self, value: Node, like: Node, shape: list[int]) -> Node:
        dtype = like.meta["val"].dtype
        if value.meta["val"].dtype != dtype:
            value = self(aten._to_copy.default, value, dtype=dtype)
        return self(aten.reshape.default, value, shape)

    def held(self, value: Node) -> Node:
        """A value that is computed once, not again for each number that it is multiplied with."""
        return self(generator.laid_out(), value, list(value.meta["val"].stride()))


def _product(write: _Writer, *args: Node, **kwargs: Any) -> Node | None:
    """`mm`, `addmm` and `bmm` of one row, if the weights of each sum lie side by side, or can be
    laid so at compile time."""
    *bias, data, weight = args
    x, w = data.meta["val"], weight.meta["val"]
    if x.shape[-2] != 1 or kwargs or not x.dtype.is_floating_point:
        return None
    if not 0 < w.numel() <= MANY:
        return None
    apart = w.stride(-2) != 1
    if apart and "weight" not in weight.meta:  # which is laid out when it is frozen
        return None
    turned = [*range(w.ndim - 2), w.ndim - 1, w.ndim - 2]
    rows = write(aten.permute.default, weight, turned)
    if apart:
        rows = write(aten.clone.default, rows, memory_format=torch.contiguous_format)
    # Weights become wide where they are multiplied: a cast of its own would be folded, and twice as
    # many bytes be read.
    parts = write(aten.mul.Tensor, rows, write.wide(write.held(data)))
    total = write(aten.sum.dim_IntList, parts, [-1])
    if bias:
        total = write(aten.add.Tensor, total, bias[0])
    return write.held(write.result(total, data, [*x.shape[:-1], w.shape[-1]]))


def _attention(
    write: _Writer, q: Node, k: Node, v: Node, bias: Node | None, scale: float | None
) -> Node | None:
    """softmax(q k + bias) v of one query a head, in float32."""
    query, keys, values = (node.meta["val"] for node in (q, k, v))
    if query.shape[-2] != 1 or query.shape[:-2] != keys.shape[:-2] or 0 in keys.shape:
        return None
    width = query.shape[-1]
    parts = write(aten.mul.Tensor, write.wide(write.held(q)), write.wide(k))
    scores = write(aten.sum.dim_IntList, parts, [-1])
    scores = write(aten.mul.Tensor, scores, 1 / math.sqrt(width) if scale is None else scale)
    if bias is None:
        shares = write(aten._softmax.default, scores, -1, False)
    else:
        scores = write(aten.add.Tensor, scores, write(aten.squeeze.dim, write.wide(bias), -2))
        shares = write(aten._safe_softmax.default, scores, -1)  # zeros where all is hidden
    parts = write(aten.mul.Tensor, write(aten.unsqueeze.default, shares, -1), write.wide(v))
    total = write(aten.sum.dim_IntList, parts, [-2])
    return write.result(total, q, [*query.shape[:-1], values.shape[-1]])


def _attends(*names: str) -> Callable[..., Node | None]:
    """Attention whose arguments behind the values are these."""

    def write(writer: _Writer, q: Node, k: Node, v: Node, *args: Any, **kwargs: Any) -> Node | None:
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("dropout_p") or given.get("is_causal"):
            return None
        return _attention(writer, q, k, v, given.get("attn_bias"), given.get("scale"))

    return write


def _slot(
    write: _Writer, old: Node, indices: Any, new: Node, accumulate: bool = False
) -> Node | None:
    """`index_put` at one place of one dimension: each element is the old or the new one, which
    fuses with what reads it where a scatter does not."""
    named = [dim for dim, index in enumerate(indices) if index is not None]
    before, after = old.meta["val"], new.meta["val"]
    if accumulate or len(named) != 1 or after.ndim != before.ndim:
        return None
    [dim] = named
    index = indices[dim]
    where = index.meta["val"]
    if where.dtype != torch.int64 or where.shape != (1,) or after.shape[dim] != 1:
        return None
    places = write(aten.arange.start_step, 0, before.shape[dim], device=before.device)
    at = write(aten.index.Tensor, places, [index])  # counts from the end, and checks
    shape = [-1 if i == dim else 1 for i in range(before.ndim)]
    hit = write(aten.reshape.default, write(aten.eq.Tensor, places, at), shape)
    return write(aten.where.self, hit, new, old)


_WAYS: dict[Any, Callable[..., Node | None]] = {
    aten.mm.default: _product,
    aten.addmm.default: _product,
    aten.bmm.default: _product,
    aten.index_put.default: _slot,
    aten._scaled_dot_product_efficient_attention.default: _attends(
        "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"
    ),
    aten._scaled_dot_product_flash_attention.default: _attends("dropout_p", "is_causal"),
    aten._scaled_dot_product_cudnn_attention.default: _attends(
        "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"
    ),
}
