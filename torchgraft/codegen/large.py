"""Large products with constant weights on CPU, by generated code where that beats a library.

Inductor's own loses to oneDNN there, and both to a plainer loop (docs/performance.md).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft._torch import products as code
from torchgraft.codegen import own
from torchgraft.fx import meta
from torchgraft.fx.cost import flops_of
from torchgraft.fx.dialect import is_view

aten = torch.ops.aten

LEAST = 1e8
"""Operations from which it is at least as fast as what Inductor generates, though nothing that
follows is part of it: BERT 207.0 to 204.4 ms, against those from 3e8 on alone."""
FEWEST, MOST = 32, 256
"""Rows: 1.11 times as fast as oneDNN with 40, 1.06 with 128, 1.02 with 256, a tie with 512; fewer
than 40 were not measured."""


def as_code(gm: GraphModule, mode: Any) -> bool:
    """Replace large products with constant weights; whether there are any. `mode` is the fake mode
    of the graph's values."""
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
    return (
        out.device.type == "cpu"
        and out.dtype == torch.float32
        and not node.kwargs
        and all(isinstance(size, int) for size in (*x.shape, *out.shape))
        and FEWEST <= out.shape[0] <= MOST
        and out.shape[1] % code.PANEL == 0
        and flops_of(node) >= LEAST
        and _is_held(weight)
        and (bias is None or list(bias.meta["val"].shape) == [out.shape[1]])
    )


def _parts(node: Node) -> tuple[Any, Any, Any]:
    """What is added, and the factors."""
    args: Any = node.args
    return (None, *args) if node.target is aten.mm.default else args


def _is_held(node: Node) -> bool:
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op == "get_attr"


def _replace(gm: GraphModule, node: Node) -> None:
    bias, data, weight = _parts(node)
    inner, columns = weight.meta["val"].shape
    call = functools.partial(meta.call, gm, node)
    with gm.graph.inserting_before(node):
        panels = call(aten.reshape.default, weight, [inner, columns // code.PANEL, code.PANEL])
        panels = call(aten.permute.default, panels, [1, 0, 2])
        packed = call(aten.clone.default, panels, memory_format=torch.contiguous_format)
        made = call(product(), data, packed, bias)
    node.replace_all_uses_with(made)
    gm.graph.erase_node(node)


@functools.cache
def product() -> Any:
    """The operator that stands for it in a graph: x times the columns of all panels, and bias."""
    op = own.declared("product(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _plain)
    code.generate_for(op)
    return op


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    made = x @ weight.permute(1, 0, 2).flatten(1)
    return made if bias is None else made + bias
