"""`Config(precision=...)` and `Config(decompositions=...)`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torchgraft as graft
from torchgraft.errors import BadValue, UnknownName

aten = torch.ops.aten


def compiled(fn: Any, *inputs: Tensor, **fields: Any) -> graft.Compiled:
    return graft.compile(fn, inputs, mode="eager", **fields)


def dtypes(program: graft.Compiled) -> dict[str, torch.dtype]:
    return {
        str(node.target): node.meta["val"].dtype
        for node in program.graph.nodes
        if isinstance(node.meta.get("val"), Tensor)
    }


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.linear(x), -1)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_everything_is_computed_in_the_type(name: str) -> None:
    model, x, dtype = Net().eval(), torch.randn(3, 8), getattr(torch, name)
    program = compiled(model, x, precision=name)
    found = dtypes(program)
    assert found["aten.addmm.default"] == found["aten._softmax.default"] == dtype
    expected = Net.forward(model.to(dtype), x.to(dtype)).float()
    assert program(x).dtype == torch.float32
    torch.testing.assert_close(program(x), expected, rtol=0, atol=0)


def test_mixed_keeps_what_is_sensitive() -> None:
    model, x = Net().eval(), torch.randn(3, 8)
    program = compiled(model, x, precision="mixed-float16")
    found = dtypes(program)
    assert found["aten.addmm.default"] == torch.float16
    assert found["aten._softmax.default"] == torch.float32
    torch.testing.assert_close(program(x), model(x), rtol=1e-2, atol=1e-3)


def test_a_type_that_the_program_names_is_its_own_in_mixed_only() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.to(torch.float32) * torch.full((2,), 3.0) + 2048

    x = torch.full((2,), 1.5, dtype=torch.float16)
    assert compiled(fn, x, precision="float16")(x).dtype == torch.float32
    assert (compiled(fn, x, precision="float16")(x) == (x * 3 + 2048).float()).all()
    assert (compiled(fn, x)(x) == 2052.5).all()


def test_doubles_become_floats() -> None:
    def fn(x: Tensor) -> Tensor:
        return (x + 1e-9) - 1

    x = torch.ones(2, dtype=torch.float64)
    program = compiled(fn, x, precision="float32")
    assert (program(x) == 0).all()
    assert program(x).dtype == torch.float64


def test_integers_masks_and_written_inputs_keep_their_type() -> None:
    def fn(x: Tensor, index: Tensor) -> Tensor:
        x.mul_(2)
        return torch.where(index > 1, x[index], 0.0)

    x, index = torch.arange(4.0), torch.tensor([0, 3])
    expected, changed = fn(mine := x.clone(), index), mine
    program = compiled(fn, x, index, precision="float16")
    assert torch.equal(program(x, index), expected)
    assert torch.equal(x, changed)


def test_a_custom_operator_gets_what_it_was_traced_with() -> None:
    seen: list[torch.dtype] = []

    @graft.op("precision_test::twice")
    def twice(x: Tensor) -> Tensor:
        return x * 2

    @twice.kernel("cpu")
    def _(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return x * 2

    x = torch.randn(3)
    compiled(lambda x: torch.ops.precision_test.twice(x + 1) + 1, x, precision="float16")(x)
    assert set(seen) == {torch.float32}


def test_a_dynamic_program() -> None:
    program = graft.compile(
        Net().eval(),
        (graft.Input(min_shape=(1, 8), max_shape=(64, 8)),),
        mode="eager",
        precision="float16",
    )
    assert program(torch.randn(5, 8)).shape == (5, 4)


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_a_dynamic_size_stays_one_where_torch_takes_an_operator_apart_in_cpp(name: str) -> None:
    """A size that was looked at as a number became the largest one, and was one of a tensor that
    it was compared with."""

    def fn(x: Tensor) -> Tensor:
        y = torch.nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")
        b, c, h, w = y.shape
        return y.view(b, c, h * w) + torch.arange(h, device=y.device).sum()

    low, high = (1, 2, 3, 3), (8, 2, 6, 6)
    given = graft.Input(min_shape=low, max_shape=high)
    made = graft.compile(fn, (given,), mode="eager", precision=name)
    for shape in (low, (5, 2, 4, 6), high):
        x = torch.randint(0, 9, shape).float()
        assert torch.equal(made(x), fn(x))


@pytest.mark.parametrize("name", ["float32", "float16", "mixed-float16"])
def test_a_size_that_depends_on_data_keeps_its_name(name: str) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        kept = x * 2
        return kept[y > 0.5] + 1, torch.repeat_interleave(kept, (y > 0.5).long(), dim=0)

    x, y = torch.arange(12.0).view(4, 3), torch.tensor([0.0, 1.0, 0.25, 0.75])
    for made, expected in zip(compiled(fn, x, y, precision=name)(x, y), fn(x, y), strict=True):
        assert torch.equal(made, expected)


def test_decompositions_take_the_place_of_torchs_own() -> None:
    def silu(x: Tensor) -> Tensor:
        return x * 2

    fields = {"decompositions": {aten.silu.default: silu}}
    x = torch.ones(1)
    assert compiled(torch.nn.SiLU(), x, **fields)(x) == 2
    backend = graft.backend(graft.Config(mode="eager", **fields))
    assert torch.compile(torch.nn.SiLU(), backend=backend)(x) == 2


def test_mistakes_are_named() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'float16'"):
        graft.Config(precision="flaot16")
    with pytest.raises(BadValue, match=r"Config.decompositions: expected operators to functions"):
        graft.Config(decompositions=[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["float16", "mixed-float16", None])
def test_a_rewrite_that_gives_integers_means_it(name: str | None) -> None:
    @graft.pattern(register=False)
    def quantize(x: Tensor, scale: float) -> Tensor:
        return torch.clamp(torch.round(x * scale), -128, 127)

    @quantize.replace(changes_type=True)
    def _(m: Any) -> Tensor:
        return torch.clamp(torch.round(m.x * m.scale), -128, 127).to(torch.int8)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.clamp(torch.round(x * 4.0), -128, 127), x + 1

    x = torch.tensor([1.0, -2.5, 100.0])
    whole, other = compiled(fn, x, precision=name, patterns=(quantize,))(x)
    assert (whole.dtype, whole.tolist()) == (torch.int8, [4, -10, 127])
    assert other.dtype == torch.float32  # what nothing has changed keeps its type


def test_a_size_that_data_tells_keeps_its_name() -> None:
    def fn(boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keep = scores > 0.5
        kept, best = boxes[keep], torch.masked_select(scores, keep)
        return kept * 2, best, kept[torch.argsort(best)][:3]

    boxes, scores = torch.rand(9, 4), torch.arange(9) / 8
    program = compiled(fn, boxes, scores, precision="float16")
    for given in (scores, scores.flip(0), scores * 0):
        for made, wanted in zip(program(boxes, given), fn(boxes, given), strict=True):
            torch.testing.assert_close(made, wanted, atol=2e-3, rtol=2e-3)
