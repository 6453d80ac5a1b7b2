"""Stacked values are joined as rows: the same answers, and only where the cut falls between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import torchgraft as graft
from torchgraft import _torch
from torchgraft.codegen import stacks

aten = torch.ops.aten
Model = Callable[[Tensor, Tensor], Tensor]


def rows_of(model: Model, x: Tensor, y: Tensor) -> list[tuple[int, ...]]:
    """The sizes of what is joined, after the pass."""
    gm = make_fx(model, tracing_mode="fake")(x, y)
    for node in gm.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    gm.meta["fake_mode"] = _torch.fake_mode_of(values)
    before = [node.meta["val"] for node in next(iter(reversed(gm.graph.nodes))).all_input_nodes]
    stacks.as_rows(gm)
    after = [node.meta["val"] for node in next(iter(reversed(gm.graph.nodes))).all_input_nodes]
    assert [(v.shape, v.stride()) for v in before] == [(v.shape, v.stride()) for v in after]
    torch.testing.assert_close(gm(x, y), model(x, y), rtol=0, atol=0)
    [cat] = gm.graph.find_nodes(op="call_function", target=aten.cat.default)
    return [tuple(node.meta["val"].shape) for node in cat.args[0]]


def join(*size: int, dim: int = 1) -> Model:
    return lambda x, y: torch.cat([x, y], dim).reshape(size) + 1


def test_rows_are_joined() -> None:
    x, y = torch.randn(2, 4), torch.randn(2, 12)
    assert rows_of(join(2, 4, 4), x, y) == [(2, 1, 4), (2, 3, 4)]
    assert rows_of(join(2, 8, 2), x, y) == [(2, 2, 2), (2, 6, 2)]
    assert rows_of(join(8, 2, 4, dim=0), x, torch.randn(14, 4)) == [(1, 2, 4), (7, 2, 4)]
    three = torch.randn(2, 4, 3)
    assert rows_of(join(2, 4, 2, 3), three, three) == [(2, 2, 2, 3)] * 2


def test_the_rest_stays() -> None:
    x, y = torch.randn(2, 4), torch.randn(2, 12)
    assert rows_of(join(2, 2, 8), x, y) == [(2, 4), (2, 12)]  # a cut within
    assert rows_of(join(4, 8), x, y) == [(2, 4), (2, 12)]
    assert rows_of(join(1, 2, 16), x, y) == [(2, 4), (2, 12)]
    assert rows_of(join(2, 3, 4), x[:0].flatten(), y) == [(0,), (2, 12)]
    used = rows_of(lambda x, y: (z := torch.cat([x, y], 1)).reshape(2, 4, 4) + z.sum(), x, y)
    assert used == [(2, 4), (2, 12)]


@pytest.mark.parametrize("last", [False, True])
def test_a_stack_is_compiled_right(last: bool) -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        stacked = torch.stack([x.sin(), *y.unbind(1)], 1)
        return stacked if last else stacked @ stacked.transpose(1, 2)

    x, y = torch.randn(3, 16), torch.randn(3, 5, 16)
    compiled = graft.compile(model, (x, y))
    torch.testing.assert_close(compiled(x, y), model(x, y), rtol=1e-5, atol=1e-5)
    assert compiled(x, y).stride() == model(x, y).stride()
