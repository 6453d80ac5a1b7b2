"""Products with constant weights on CPU by the loop for convolutions, where that beats Inductor's:
large ones, and those whose columns do not fill vectors."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchgraft._torch import direct as code
from torchgraft.codegen import direct, own
from torchgraft.fx import meta
from torchgraft.fx.cost import flops_of
from torchgraft.fx.dialect import is_held

aten = torch.ops.aten

LEAST = 1e8
"""Operations from which it is at least as fast as what Inductor generates, though nothing that
follows is part of it: BERT 207.0 to 204.4 ms, against those from 3e8 on alone."""
FEWEST, MOST = 32, 256
"""Rows: 1.11 times as fast as oneDNN with 40, 1.06 with 128, 1.02 with 256, a tie with 512; fewer
than 40 were not measured."""


def as_code(gm: GraphModule, mode: Any) -> bool:
    """Replace such products; whether there are any. `mode` is the fake mode of the graph's
    values."""
    if not own.is_ahead("amd"):  # on Intel's, MKL is: ViT-S 85.3 ms with it, 97.7 without
        return False
    found = [
        *gm.graph.find_nodes(op="call_function", target=aten.addmm.default),
        *gm.graph.find_nodes(op="call_function", target=aten.mm.default),
    ]
    chosen = [node for node in found if _fits(node)]
    gm.meta["fake_mode"] = mode
    for node in chosen:
        _replace(gm, node)
    return bool(chosen)


def _fits(node: Node) -> bool:
    bias, data, weight = _parts(node)
    x, out = data.meta["val"], node.meta["val"]
    if not (
        out.device.type == "cpu"
        and out.dtype == torch.float32
        and not node.kwargs
        and all(isinstance(size, int) for size in (*x.shape, *out.shape))
        and is_held(weight)
        and (bias is None or list(bias.meta["val"].shape) == [out.shape[1]])
    ):
        return False
    rows, columns = out.shape
    if columns % code.LANES == 0:
        return FEWEST <= rows <= MOST and flops_of(node) >= LEAST
    return rows >= min(code.ROWS) and x.numel() > 0 and direct.fills(columns)


def _parts(node: Node) -> tuple[Any, Any, Any]:
    """What is added, and the factors."""
    args: Any = node.args
    return (None, *args) if node.target is aten.mm.default else args


def _replace(gm: GraphModule, node: Node) -> None:
    """By a convolution: the rows are pixels of one line."""
    bias, data, weight = _parts(node)
    (rows, inner), columns = data.meta["val"].shape, node.meta["val"].shape[1]
    call = functools.partial(meta.call, gm, node)
    with gm.graph.inserting_before(node):
        line = call(aten.reshape.default, data, [1, 1, rows, inner])
        line = call(aten.permute.default, line, [0, 3, 1, 2])
        kernel = call(aten.permute.default, weight, [1, 0])
        kernel = call(aten.reshape.default, kernel, [columns, inner, 1, 1])
        held = direct.packed(call, kernel)
        how = [1, 1], [1, 1], [0, 0], [1, 1], 1, ""
        size, stride = [1, columns, 1, rows], [rows * columns, 1, rows * columns, columns]
        made = call(direct.direct(), line, held, bias, None, *how, size, stride)
        made = call(aten.permute.default, made, [0, 2, 3, 1])
        made = call(aten.reshape.default, made, [rows, columns])
    node.replace_all_uses_with(made)
    gm.graph.erase_node(node)
