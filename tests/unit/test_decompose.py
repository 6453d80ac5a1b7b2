"""Decomposition for the generator: right values, and each node a value of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule

import torchgraft as graft
from torchgraft import _torch
from torchgraft.fx.decompose import decompose
from torchgraft.fx import meta


def graph_of(fn: object, *args: Tensor) -> GraphModule:
    return graft.compile(fn, args, mode="eager").graph.gm


def three_norms(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.nn.functional.layer_norm(x, [6]) + y.softmax(-1)
    return torch.nn.functional.layer_norm(y, [6]) + torch.nn.functional.gelu(x) * x.var(0)


def test_equal_calls_are_traced_once_and_give_the_same_results() -> None:
    args = (torch.randn(4, 6), torch.randn(4, 6))
    gm = graph_of(three_norms, *args)
    before = len(gm.graph.nodes)
    parts = decompose(gm, meta.inputs_of(gm), _torch.inductor_decompositions())
    assert len(parts.graph.nodes) > before
    targets = {n.target for n in parts.graph.nodes}
    assert torch.ops.aten.native_layer_norm.default not in targets
    parts.recompile()
    torch.testing.assert_close(parts(*args)[0], three_norms(*args))


def test_no_two_nodes_share_the_memory_of_a_value() -> None:
    """Inductor reads aliasing off the fake tensors: shared ones made a frozen ResNet wrong."""
    gm = graph_of(three_norms, torch.randn(4, 6), torch.randn(4, 6))
    parts = decompose(gm, meta.inputs_of(gm), _torch.inductor_decompositions())
    values = [
        n.meta["val"]
        for n in parts.graph.nodes
        if n.op == "call_function"
        and isinstance(n.meta.get("val"), Tensor)
        and hasattr(n.target, "_schema")
        and not any(r.alias_info for r in n.target._schema.returns)
    ]
    assert len(values) > 20
    assert len({value.untyped_storage()._cdata for value in values}) == len(values)


def test_symbolic_sizes_survive() -> None:
    spec = graft.Input(min_shape=(2, 6), max_shape=(9, 6))
    gm = graft.compile(lambda x: three_norms(x, x), (spec,), mode="eager").graph.gm
    parts = decompose(gm, meta.inputs_of(gm), _torch.inductor_decompositions())
    parts.recompile()
    for rows in (2, 5):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(parts(x)[0], three_norms(x, x))
