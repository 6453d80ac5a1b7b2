"""One model, every front end: the same operators, the same results."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from models import CASES
from torch import Tensor, nn

import torchgraft as graft

FRONT_ENDS = ["module", "exported", "pt2", "traced", "scripted", "loaded", "torch.compile", "fx"]


def through(front: str, model: nn.Module, args: tuple[Tensor, ...], tmp: pathlib.Path) -> Any:
    """(callable, report) of a model through one front end, in eager mode, without built-ins' luck
    of folding: weights are not frozen, so that torch.compile's graph is comparable."""
    config = graft.Config(mode="eager", freeze=False)
    if front == "torch.compile":
        with torch.no_grad():
            run = torch.compile(model, backend=graft.backend(config))
            run(*(arg.clone() for arg in args))
        return run, graft.reports()[-1]
    program: Any = model
    if front == "exported":
        program = torch.export.export(model, args)
    elif front == "pt2":
        program = tmp / "m.pt2"
        torch.export.save(torch.export.export(model, args), program)
    elif front == "traced":
        program = torch.jit.trace(model, tuple(arg.clone() for arg in args))
    elif front == "scripted":
        program = torch.jit.script(model)
    elif front == "loaded":
        program = tmp / "m.pt"
        torch.jit.save(torch.jit.trace(model, tuple(arg.clone() for arg in args)), program)
    elif front == "fx":
        program = torch.fx.symbolic_trace(model)
    compiled = graft.compile(program, args, config=config)
    return compiled, compiled.report


@pytest.mark.parametrize("case", CASES)
def test_every_front_end_gives_the_same_operators(case: str, tmp_path: pathlib.Path) -> None:
    model, args = CASES[case]()
    with torch.no_grad():
        expected = model(*(arg.clone() for arg in args))
    ops: dict[str, list[str]] = {}
    for front in FRONT_ENDS:
        run, report = through(front, model, args, tmp_path)
        ops[front] = [node.op for node in report.nodes]
        with torch.no_grad():
            torch.testing.assert_close(run(*(arg.clone() for arg in args)), expected)
    for front in FRONT_ENDS:
        assert ops[front] == ops["module"], front


def test_the_dialect_is_the_one_that_torch_compile_shows(tmp_path: pathlib.Path) -> None:
    model, args = CASES["cnn"]()
    _, report = through("traced", model, args, tmp_path)
    names = {node.op for node in report.nodes}
    assert "aten.convolution.default" in names
    assert not names & {"aten._convolution.default", "aten.mul.Scalar", "aten.t.default"}
    _, report = through("traced", *CASES["quantise"](), tmp_path)
    assert [node.op for node in report.nodes] == [
        "aten.mul.Tensor",
        "aten.add.Tensor",
        "aten.round.default",
        "aten.clamp.default",
    ]
