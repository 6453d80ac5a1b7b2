"""Golden text: what a reader sees of a graph, a plan and a report."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import torchgraft as graft


def model(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y).relu() + torch.cat([x, y]).sum()


def test_graph_and_plan() -> None:
    compiled = graft.compile(model, (torch.ones(2, 2), torch.ones(2, 2)), mode="eager")
    line = model.__code__.co_firstlineno + 1
    here = f"  # {__file__}:{line}"
    assert str(compiled.graph).splitlines() == [
        "x: f32[2, 2] = placeholder x",
        "y: f32[2, 2] = placeholder y",
        f"mm: f32[2, 2] = aten.mm.default(x, y){here}",
        f"relu: f32[2, 2] = aten.relu.default(mm){here}",
        f"cat: f32[4, 2] = aten.cat.default([x, y]){here}",
        f"sum_1: f32[] = aten.sum.default(cat){here}",
        f"add: f32[2, 2] = aten.add.Tensor(relu, sum_1){here}",
        "return (add,)",
    ]
    assert str(compiled.plan).splitlines() == [
        "def plan(b0, b1):",
        "    b2 = launch('main', 'aten.mm.default', b0, b1)",
        "    b3 = launch('main', 'aten.relu.default', b2)",
        "    free('main', b2)",
        "    b4 = launch('main', 'aten.cat.default', [b0, b1])",
        "    free('main', b0)",
        "    free('main', b1)",
        "    b5 = launch('main', 'aten.sum.default', b4)",
        "    free('main', b4)",
        "    b6 = launch('main', 'aten.add.Tensor', b3, b5)",
        "    free('main', b3)",
        "    free('main', b5)",
        "    return (b6,)",
    ]


def test_report() -> None:
    compiled = graft.compile(model, (torch.ones(2, 2), torch.ones(2, 2)), mode="eager")
    lines = [re.sub(r"\d\.\d{3} s", "T s", line) for line in str(compiled.report).splitlines()]
    assert lines == [
        "model (export, mode eager, cpu): 5 nodes, 0 compiled in 0 regions, 5 on ATen",
        "  passes: T s",
        "  code: T s",
        "  1 x aten.mm.default: mode 'eager'",
        "  1 x aten.relu.default: mode 'eager'",
        "  1 x aten.cat.default: mode 'eager'",
        "  1 x aten.sum.default: mode 'eager'",
        "  1 x aten.add.Tensor: mode 'eager'",
    ]
    text = compiled.explain()
    assert all(part in text for part in ("inputs:\n  x: float32[2, 2] on cpu", "graph:", "plan:"))


@pytest.mark.slow
def test_one_region_is_one_launch() -> None:
    compiled = graft.compile(model, (torch.ones(2, 2), torch.ones(2, 2)))
    assert str(compiled.plan) == (
        "def plan(b0, b1):\n"
        "    b2, = launch('main', 'region0', b0, b1)\n"
        "    free('main', b0)\n"
        "    free('main', b1)\n"
        "    return (b2,)"
    )
    report = compiled.report
    assert (report.coverage, report.regions, report.fallbacks) == (1.0, ["region0"], [])
