"""What is computed of weights is computed again, bit for bit, in no more copies than need be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter

from torchgraft.fx.prepare import Prepare

aten = torch.ops.aten


def prepared(weight: Tensor, *calls: tuple[Any, ...]) -> tuple[list[Any], Tensor, Tensor]:
    """The operators that make of a weight what the calls make of it, and what both give."""
    graph, prepare = Graph(), Prepare()
    node = graph.get_attr("weight")
    for target, *args in calls:
        node = graph.call_function(target, (node, *args))
    graph.output(node)
    root = nn.Module()
    root.register_buffer("weight", weight)
    gm = GraphModule(root, graph)
    made = gm()
    prepare.weight("weight", weight)
    prepare.folded(gm, node, made)
    prepare.value(made)
    [value] = prepare.values
    prepare.graph.output(value)
    prepare.graph.eliminate_dead_code()
    done = [n.target for n in prepare.graph.nodes if n.op == "call_function"]
    return done, Interpreter(GraphModule(nn.Module(), prepare.graph)).run(weight), made


REORDER: Any = torch.ops.mkldnn._reorder_linear_weight


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("transposed", [False, True])
def test_packing_and_unpacking_is_left_out(transposed: bool) -> None:
    weight = torch.randn(48, 32)
    done, again, made = prepared(
        weight.t() if transposed else weight,
        (REORDER.default, 8),
        (aten._to_dense.default,),
        (aten.transpose.int, 0, 1),
        (aten.constant_pad_nd.default, [0, 0], 0.0),
    )
    assert torch.equal(again, made)
    assert again.stride() == made.stride()
    assert done == [aten.contiguous.default, aten.transpose.int]


@pytest.mark.parametrize(
    "calls",
    [
        ((aten.constant_pad_nd.default, [0, 3], 0.0),),
        ((aten.slice.Tensor, 1, 0, 5), (aten.constant_pad_nd.default, [0, 0], 0.0)),
        ((aten.to_sparse.default,), (aten._to_dense.default,)),
    ],
)
def test_what_makes_another_tensor_stays(calls: tuple[Any, ...]) -> None:
    done, again, made = prepared(torch.randn(4, 8).relu(), *calls)
    assert torch.equal(again, made)
    assert again.stride() == made.stride()
    assert done == [target for target, *_ in calls]
