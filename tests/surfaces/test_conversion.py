"""Converters from every front end: the prefix sum of the Ascend sample, in Python."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from fronts import through
from torch import Tensor, nn

import torchgraft as graft


@torch.library.custom_op("graft_tests::prefix_sum", mutates_args=())
def prefix_sum(x: Tensor, axis: int) -> Tensor:
    return torch.cumsum(x, axis)


@prefix_sum.register_fake
def _(x: Tensor, axis: int) -> Tensor:
    return torch.empty_like(x)


class Model(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cumsum(x * 2, -1) + 1


FRONT_ENDS = ["module", "exported", "traced", "loaded", "scripted", "torch.compile"]


def cumsum(net: graft.Net, x: graft.Value, dim: int, *, dtype: Any = None) -> Any:
    if dtype is not None:
        raise graft.Declined(f"dtype {dtype}")
    return net.add("graft_tests::prefix_sum", x, axis=dim % x.ndim)


@pytest.mark.parametrize("front", FRONT_ENDS)
def test_a_converter_written_once_fires_from_each_front_end(
    front: str, tmp_path: pathlib.Path
) -> None:
    schema = "aten::cumsum(Tensor self, int dim, *, int? dtype=None) -> (Tensor)"
    graft.converter(schema)(cumsum)
    model, x = Model(), torch.randn(5, 5)
    run = through(front, model, x, graft.Config(verify="each"), tmp_path)
    report = graft.reports()[-1]
    assert [node.op for node in report.nodes] == [
        "aten.mul.Tensor",
        "graft_tests.prefix_sum.default",
        "aten.add.Tensor",
    ]
    assert [(c.converter, c.reason) for c in report.conversions] == [("cumsum", None)]
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))


@pytest.mark.slow
def test_a_converted_program_trains_behind_torch_compile() -> None:
    @graft.converter(torch.ops.aten.sin.default)
    def sin(net: graft.Net, x: graft.Value) -> Any:
        return net.add("aten::cos", net.add("aten::sub", x, torch.pi / 2))

    x = torch.randn(4, 4, requires_grad=True)
    run = torch.compile(lambda x: (x.sin() * x).sum(), backend="torchgraft")
    run(x).backward()
    torch.testing.assert_close(x.grad, x.detach().sin() + x.detach() * x.detach().cos())
