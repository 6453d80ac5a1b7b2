"""Branches of one shape become one: same results, fewer calls, and not where it may not be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchgraft as graft

aten = torch.ops.aten


def merged(model: nn.Module, *args: Tensor, **fields: object) -> graft.Compiled:
    compiled = graft.compile(model, args, verify="each", **fields)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), model(*args), rtol=1e-4, atol=1e-5)
    return compiled


def count(compiled: graft.Compiled, *ops: object) -> int:
    return sum(len(compiled.graph.all(op)) for op in ops)


class Towers(nn.Module):
    """Four towers of two layers over one input; an activation with a weight of its own."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.one = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.two = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self.scale = nn.ParameterList(torch.randn(8) for _ in range(4))
        self.stacked = stacked

    def forward(self, x: Tensor) -> Tensor:
        made = [
            two(torch.relu(one(x)) * scale)
            for one, two, scale in zip(self.one, self.two, self.scale, strict=True)
        ]
        return torch.stack(made, 1).softmax(1) if self.stacked else sum(made[1:], made[0].tanh())


@pytest.mark.parametrize("stacked", [True, False])
def test_towers_are_one_tower_with_a_dimension_more(stacked: bool) -> None:
    compiled = merged(Towers(stacked), torch.randn(3, 8))
    assert count(compiled, aten.mm, aten.addmm) == 1  # the first layer, four times as wide
    assert count(compiled, aten.bmm) == 1
    assert count(compiled, aten.relu) == 1
    assert count(compiled, aten.cat) == 0


class Tables(nn.Module):
    """Tables of different length, looked up by the columns of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 4) for rows in (5, 7, 3))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return torch.stack([x, *(t(ids[:, i]) for i, t in enumerate(self.tables))], 1)


def test_tables_are_one_table() -> None:
    ids = torch.tensor([[4, 6, 2], [0, 0, 0]])
    compiled = merged(Tables(), ids, torch.randn(2, 4))
    assert count(compiled, aten.embedding) == 1
    for wrong in (torch.tensor([[5, 0, 0], [0, 0, 0]]), torch.tensor([[0, -1, 0], [0, 0, 0]])):
        with pytest.raises((IndexError, RuntimeError)):  # not the neighbour's row
            compiled(wrong, torch.randn(2, 4))


def test_weights_that_are_not_frozen_stay_apart() -> None:
    compiled = merged(Towers(True), torch.randn(3, 8), freeze=False)
    assert count(compiled, aten.bmm) == 0


def test_it_can_be_switched_off() -> None:
    compiled = merged(Towers(True), torch.randn(3, 8), merge_branches=False)
    assert count(compiled, aten.mm, aten.addmm) == 8


def test_one_branch_that_reads_another_is_not_merged_with_it() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).relu()) + self.one(x)

    assert count(merged(Chain(), torch.randn(2, 8)), aten.bmm) == 0


def test_branches_on_streams_stay_on_them() -> None:
    class Streams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with graft.stream("side"):
                left = self.one(x)
            return left + self.two(x)

    compiled = merged(Streams(), torch.randn(2, 8))
    assert count(compiled, aten.addmm) == 2
    assert {step.stream for step in compiled.plan.launches} == {"main", "side"}
