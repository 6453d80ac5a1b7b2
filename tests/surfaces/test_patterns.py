"""One pattern, written once, fires whichever front end the program came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES as CASES_OF_MODELS
from models import Cnn, Mlp
from torch import Tensor, nn
from torch.nn import functional as F

import torchgraft as graft
from torchgraft.passes import fusions

FRONT_ENDS = ["module", "traced", "scripted", "exported", "torch.compile"]
Run = tuple[Callable[..., Any], graft.Report]


def through(front: str, model: nn.Module, args: tuple[Tensor, ...], **fields: Any) -> Run:
    """The model through a front end, in eager mode, and what was done to it."""
    config = graft.Config(mode="eager", **fields)
    if front == "torch.compile":
        with torch.no_grad():
            run = torch.compile(model, backend=graft.backend(config))
            run(*(arg.clone() for arg in args))
        return run, graft.reports()[-1]
    program: Any = model
    if front == "traced":
        program = torch.jit.trace(model, tuple(arg.clone() for arg in args))
    elif front == "scripted":
        program = torch.jit.script(model)
    elif front == "exported":
        program = torch.export.export(model, args)
    compiled = graft.compile(program, args, config=config)
    return compiled, compiled.report


# --- The quantise rewrite of the torch_aie documents: mul, add, round and clamp become one op ---


@torch.library.custom_op("test_patterns::quantize", mutates_args=())
def quantize_op(x: Tensor, scale: float, offset: float) -> Tensor:
    return (x * scale + offset).round().clamp(-128, 127).to(torch.int8)


@quantize_op.register_fake
def _(x: Tensor, scale: float, offset: float) -> Tensor:
    return torch.empty_like(x, dtype=torch.int8)


class Quantise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 8.8 + 1.1
        return torch.clamp(torch.round_(x), -128, 127)


IR = """
    graph(%0 : Tensor, %1 : Tensor, %2 : Tensor, %3 : int, %x : int, %y : int):
        %4 : Tensor = aten::mul(%0, %1)
        %5 : Tensor = aten::add(%4, %2, %3)
        %6 : Tensor = aten::round(%5)
        %7 : Tensor = aten::clamp(%6, %x, %y)
        return (%7)"""


def from_python() -> None:
    @graft.pattern
    def quantize(x: Tensor, scale: float, offset: float, lo: int, hi: int) -> Tensor:
        return torch.clamp(torch.round(x * scale + offset), lo, hi)

    @quantize.replace(changes_type=True)
    def _(m: graft.Match) -> Any:
        if (m.lo, m.hi) != (-128, 127):
            raise graft.NoMatch(f"range {m.lo}..{m.hi} is not int8", m.node("clamp"))
        return torch.ops.test_patterns.quantize(m.x, m.scale, m.offset)


def from_text() -> None:
    quantize = graft.pattern(IR, name="quantize")

    @quantize.replace(changes_type=True)
    def _(m: graft.Match) -> Any:
        if (m.x, m.y) != (-128, 127):
            raise graft.NoMatch(f"range {m.x}..{m.y} is not int8", m.node("clamp"))
        return torch.ops.test_patterns.quantize(m["0"], m["1"], m["2"] * m["3"])


@pytest.mark.parametrize("front", FRONT_ENDS)
@pytest.mark.parametrize("written", [from_python, from_text])
def test_quantise(front: str, written: Callable[[], None]) -> None:
    written()
    x = torch.randint(1, 10, (5, 5)).float()
    run, report = through(front, Quantise(), (x,))
    assert report.matches["quantize"] == 1
    assert [node.op for node in report.nodes] == ["test_patterns.quantize.default"]
    y = torch.randint(1, 10, (5, 5)).float()
    torch.testing.assert_close(run(y.clone()), Quantise()(y.clone()).to(torch.int8))


@pytest.mark.parametrize("front", FRONT_ENDS)
def test_quantise_refuses_another_range(front: str) -> None:
    from_python()

    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.clamp(torch.round(x * 8.8 + 1.1), -8, 7)

    run, report = through(front, Narrow(), (torch.ones(3),))
    assert report.matches["quantize"] == 0
    assert "range -8..7 is not int8" in str(report)
    torch.testing.assert_close(run(torch.ones(3)), Narrow()(torch.ones(3)))


# --- Patterns that decompose: matmul, linear, convolution, norm, dropout ---


class RmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


class Scores(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * 0.5, -1), v)


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.softmax(x, -1), 0.5, True)


CASES: dict[str, tuple[str, Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "rms_norm": ("rms_norm", RmsNorm, [(2, 3, 8)]),
    "attention": ("attention", Scores, [(2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 6)]),
    "conv_bn": ("conv_bn", Cnn, [(2, 3, 8, 8)]),
    "softmax_dropout": ("softmax_dropout", Dropped, [(3, 4)]),
}


@pytest.mark.parametrize("front", FRONT_ENDS)
@pytest.mark.parametrize("case", CASES)
def test_fusions(front: str, case: str) -> None:
    name, make, shapes = CASES[case]
    model, args = make().eval(), tuple(torch.randn(shape) for shape in shapes)
    run, report = through(front, model, args, patterns=[fusions.ALL[name]])
    assert report.matches == {name: 1}, str(report)
    with torch.no_grad():
        expected = torch.softmax(args[0], -1) if case == "softmax_dropout" else model(*args)
        torch.testing.assert_close(run(*args), expected)


@pytest.mark.parametrize("front", FRONT_ENDS)
def test_a_projection(front: str) -> None:
    @graft.pattern(types=[{"x": "[b, h]", "w": "[o, h]", "b": "[o]"}])
    def projected(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w, b))

    @projected.replace
    def _(m: graft.Match) -> Tensor:
        return F.gelu(torch.matmul(m.x, m.w.t()) + m.b)

    model, x = Mlp(), torch.randn(3, 8)
    run, report = through(front, model, (x,))
    assert report.matches == {"projected": 1}, str(report)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))


@pytest.mark.parametrize("front", FRONT_ENDS)
def test_attention_inside_a_model(front: str) -> None:
    model, args = CASES_OF_MODELS["attention"]()
    run, report = through(front, model, args, patterns=[fusions.attention])
    assert report.matches == {"attention": 1}, str(report)
    with torch.no_grad():
        torch.testing.assert_close(run(*args), model(*args))


def test_training_counts_forward_and_backward() -> None:
    @graft.pattern
    def scaled(x: Tensor, n: float) -> Tensor:
        return torch.sin(x) * n

    @scaled.replace
    def _(m: graft.Match) -> Tensor:
        return m.n * torch.cos(m.x - torch.pi / 2)

    x = torch.randn(4, requires_grad=True)
    run = torch.compile(lambda x: (x.sin() * 3).sum(), backend="torchgraft", mode="eager")
    run(x).backward()
    torch.testing.assert_close(x.grad, 3 * x.detach().cos())
    assert [report.matches["scaled"] for report in graft.reports()[-2:]] == [1, 0]
