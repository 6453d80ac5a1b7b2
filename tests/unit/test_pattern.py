"""Patterns: what binds, what refuses, what a replacement may give, what is said about a miss."""

from __future__ import annotations

import operator
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torchgraft as graft
from torchgraft.errors import (
    BadPass,
    BadPattern,
    BadReplacement,
    BadValue,
    NeverFired,
    PassFailed,
    PassOrder,
    PatternChanged,
    UnknownName,
)
from torchgraft.passes.pipeline import passes_for

aten = torch.ops.aten
X = torch.randn(4, 6)


def compiled(fn: Any, *args: Any, **fields: Any) -> graft.Compiled:
    return graft.compile(fn, args or (X,), mode="eager", **fields)


def ops(program: graft.Compiled) -> list[str]:
    return [node.op.removeprefix("aten.") for node in program.report.nodes]


@pytest.fixture
def quantize() -> Any:
    """The pattern of the documents; it counts, and keeps what it bound."""

    @graft.pattern
    def quantize(x: Tensor, scale: float, offset: float, lo: int, hi: int) -> Tensor:
        return torch.clamp(torch.round(x * scale + offset), lo, hi)

    @quantize.replace
    def _(m: graft.Match) -> Tensor:
        if (m.lo, m.hi) != (-128, 127):
            raise graft.NoMatch(f"range {m.lo}..{m.hi} is not int8", m.node("clamp"))
        return torch.fake_quantize_per_tensor_affine(m.x, 1 / m.scale, int(m.offset), m.lo, m.hi)

    return quantize


def step(x: Tensor, scale: float = 8.8, offset: float = 1.0, hi: int = 127) -> Tensor:
    return torch.clamp(torch.round(x * scale + offset), -128, hi)


class Steps(torch.nn.Module):
    """One match, one that is refused, one that is not it."""

    def forward(self, x: Tensor) -> Tensor:
        other = torch.clamp(torch.floor(x * 2 + 1), -128, 127)
        return step(x) + step(x, 3.0, 2.0, hi=9) + other


# --- What binds ---


def test_scalars_bind_by_name_and_are_never_burned_in(quantize: Any) -> None:
    seen = []

    @quantize.replace
    def _(m: graft.Match) -> Tensor:
        seen.append((m.scale, m.offset, m.lo, m.hi, tuple(m.x.shape), m.x.dtype))
        return m.x * 0

    run = compiled(lambda x: step(x) + step(x, 0.5, 3) + step(x.double(), 2, 0.25, 7))
    assert run.report.matches == {"quantize": 3}
    assert seen == [
        (8.8, 1.0, -128, 127, (4, 6), torch.float32),
        (0.5, 3, -128, 127, (4, 6), torch.float32),
        (2, 0.25, -128, 7, (4, 6), torch.float64),
    ]
    assert run(X).eq(0).all()


def test_literals_match_literally_whatever_their_type() -> None:
    @graft.pattern
    def cube(x: Tensor, n: float) -> Tensor:
        return torch.pow(x, 3.0) * n

    assert compiled(lambda x: x**3 * 2).report.matches["cube"] == 1
    assert compiled(lambda x: x**2 * 2).report.matches["cube"] == 0


def test_an_argument_used_twice_must_be_the_same_value() -> None:
    @graft.pattern
    def twice(x: Tensor, y: Tensor, n: float) -> Tensor:
        return torch.sin(x) * n + torch.cos(x) * n + y

    assert compiled(lambda x: x.sin() * 2 + x.cos() * 2 + x).report.matches["twice"] == 1
    run = compiled(lambda x: x.sin() * 2 + x.cos() * 3 + x)
    assert run.report.matches["twice"] == 0
    assert "'n' is 2 elsewhere" in str(run.report) or "'n' is 3 elsewhere" in str(run.report)
    assert compiled(lambda x: x.sin() * 2 + (x + 1).cos() * 2).report.matches["twice"] == 0


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x.relu() + y.sigmoid() * y,
        lambda x, y: y.sigmoid() * y + x.relu(),
        lambda x, y: y * y.sigmoid() + x.relu(),
    ],
)
def test_commutative_operators_match_both_ways(fn: Any) -> None:
    @graft.pattern
    def both(a: Tensor, b: Tensor) -> Tensor:
        return torch.relu(a) + torch.sigmoid(b) * b

    run = compiled(fn, X, X + 1)
    assert run.report.matches["both"] == 1


def test_subtraction_does_not_commute() -> None:
    @graft.pattern
    def less(a: Tensor, b: Tensor) -> Tensor:
        return torch.relu(a) - torch.sigmoid(b)

    assert compiled(lambda x: x.sigmoid() - x.relu()).report.matches["less"] == 0
    assert compiled(lambda x: x.relu() - x.sigmoid()).report.matches["less"] == 1


def test_none_bools_and_lists_bind() -> None:
    bound: list[Any] = []

    @graft.pattern
    def joined(xs: list[Tensor], limit: float | None, exact: bool) -> Tensor:
        y = torch.cat(xs)
        y = y if limit is None else torch.clamp(y, max=limit)
        return F.gelu(y, approximate="none" if exact else "tanh")

    @joined.replace
    def _(m: graft.Match) -> Tensor:
        bound.append((len(m.xs), m.limit, m.exact))
        return torch.cat(m.xs) * 0

    compiled(lambda x: F.gelu(torch.cat([x, x, x]).clamp(max=3.5)))
    compiled(lambda x: F.gelu(torch.cat([x, x]), approximate="tanh"))
    assert bound == [(3, 3.5, True), (2, None, False)]


def test_a_list_of_dimensions_binds() -> None:
    bound = []

    @graft.pattern
    def turned(x: Tensor, dims: list[int]) -> Tensor:
        return torch.relu(x.permute(dims))

    @turned.replace
    def _(m: graft.Match) -> Tensor:
        bound.append(list(m.dims))
        return torch.relu(m.x).permute(m.dims)

    def fn(x: Tensor, y: Tensor) -> Any:
        swapped = x.transpose(-1, -2).relu()  # the same operator in the dialect
        return x.permute(0, 2, 1, 3).relu(), y.t().relu(), swapped, y.sin().relu()

    values = torch.randn(2, 3, 4, 5), torch.randn(3, 4)
    program = compiled(fn, *values)
    assert program.report.matches["turned"] == 3
    assert sorted(bound) == [[0, 1, 3, 2], [0, 2, 1, 3], [1, 0]]
    assert list(map(torch.equal, program(*values), fn(*values))) == [True] * 4
    assert turned.check().fired > 0


def test_a_list_of_dimensions_need_not_name_all() -> None:
    @graft.pattern
    def log_sum(x: Tensor, dims: list[int]) -> Tensor:
        return torch.exp(x).sum(dims).log()

    @log_sum.replace
    def _(m: graft.Match) -> Tensor:
        return torch.logsumexp(m.x, m.dims)

    x = torch.randn(2, 3, 4).double()
    for dims in ((-1,), (0, 2), (2, 0, 1)):
        program = compiled(lambda x, dims=dims: x.exp().sum(dims).log(), x)
        assert program.report.matches["log_sum"] == 1
        torch.testing.assert_close(program(x), torch.logsumexp(x, dims))
    kept = compiled(lambda x: x.exp().sum((1,), keepdim=True).log(), x)
    assert kept.report.matches["log_sum"] == 0


def test_a_tensor_or_a_number() -> None:
    bound = []

    @graft.pattern
    def scaled(x: Tensor, by: Tensor | float) -> Tensor:
        return torch.relu(x * by)

    @scaled.replace
    def _(m: graft.Match) -> Tensor:
        bound.append(m.by if isinstance(m.by, float) else "tensor")
        return torch.relu(m.x) * m.by

    compiled(lambda x: (x * 2.5).relu())
    compiled(lambda x, y: (x * y).relu(), X, X)
    assert bound == [2.5, "tensor"]


def test_dimensions_bind_and_count_from_either_end() -> None:
    @graft.pattern
    def spread(x: Tensor, dim: int) -> Tensor:
        return torch.softmax(x, dim).mean(-1)

    assert compiled(lambda x: x.softmax(0).mean(1)).report.matches["spread"] == 1
    assert compiled(lambda x: x.softmax(-1).mean(0)).report.matches["spread"] == 0


@pytest.mark.parametrize("shape", [(6,), (1, 6), (3, 1, 6), (2, 2, 2, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_pattern_fits_every_shape_and_dtype(shape: Any, dtype: Any) -> None:
    @graft.pattern
    def norm(x: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    def model(x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(1e-5 + (y**2).mean(-1, keepdim=True))).to(x.dtype)

    x = torch.randn(shape).to(dtype)
    assert compiled(model, x).report.matches["norm"] == 1


def test_a_dynamic_shape_matches_and_stays_dynamic() -> None:
    @graft.pattern(types={"x": "[b, s, h]", "w": "[o, h]"})
    def project(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(F.linear(x, w))

    @project.replace
    def _(m: graft.Match) -> Tensor:
        return torch.clamp(torch.matmul(m.x, m.w.t()), min=0)

    layer = torch.nn.Linear(6, 5, bias=False)
    spec = graft.Input(min_shape=(2, 3, 6), max_shape=(9, 3, 6))
    run = graft.compile(lambda x: F.linear(x, layer.weight).relu(), (spec,), mode="eager")
    assert run.report.matches["project"] == 1
    for rows in (2, 5, 9):
        x = torch.randn(rows, 3, 6)
        torch.testing.assert_close(run(x), layer(x).relu())


def test_in_place_forms_are_the_same_operators(quantize: Any) -> None:
    run = compiled(lambda x: (x * 2).add_(1).round_().clamp_(-128, 127))
    assert run.report.matches["quantize"] == 1


def test_a_pattern_may_hold_a_tensor() -> None:
    @graft.pattern(types={"x": "[3]"})
    def shifted(x: Tensor) -> Tensor:
        return torch.relu(x + torch.tensor([1.0, 2.0, 3.0]))

    x = torch.randn(3)
    assert compiled(lambda x: (x + torch.tensor([1.0, 2.0, 3.0])).relu(), x).report.matches == {
        "shifted": 1
    }
    assert compiled(lambda x: (x + torch.tensor([1.0, 2.0, 4.0])).relu(), x).report.matches == {
        "shifted": 0
    }


# --- Several outputs ---


def test_several_outputs_and_operands_that_come_late() -> None:
    @graft.pattern
    def pair(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(x + a), torch.sigmoid(x * b)

    @pair.replace
    def _(m: graft.Match) -> tuple[Tensor, Tensor]:
        return (m.x + m.a).clamp(min=0), 1 / (1 + torch.exp(-(m.x * m.b)))

    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = (x + y).relu().cos()  # used before `b` exists
        late = y.sin()
        return first, (x * late).sigmoid() + first

    run = compiled(model, X, X + 1)
    assert run.report.matches["pair"] == 1
    torch.testing.assert_close(run(X, X + 1), model(X, X + 1))


def test_an_input_that_needs_the_result_refuses() -> None:
    @graft.pattern
    def pair(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(x), torch.sigmoid(x) * b

    run = compiled(lambda x: x.sigmoid() * x.relu().cos())
    assert run.report.matches["pair"] == 0
    assert "needs its own result" in str(run.report)


# --- What refuses ---


def test_another_user_refuses_and_the_report_names_it(quantize: Any) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2 + 1
        return y.round().clamp(-128, 127), y.sin()

    run = compiled(model)
    assert run.report.matches["quantize"] == 0
    text = str(run.report)
    assert re.search(r"no match; nearest: 4 of 4 ops; `add`.* has another user: `sin`", text)


def test_a_returned_value_is_another_user(quantize: Any) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2 + 1
        return y, y.round().clamp(-128, 127)

    assert "the program returns it" in str(compiled(model).report)


def test_a_shared_cast_or_view_does_not_refuse() -> None:
    @graft.pattern
    def wide(x: Tensor) -> Tensor:
        return torch.relu(x.double() * 2)

    run = compiled(lambda x: (x.double() * 2).relu() + x.double().cos())
    assert run.report.matches["wide"] == 1


def test_nodes_on_different_streams_refuse(quantize: Any) -> None:
    def label(on: dict[str, str]) -> Any:
        @graft.fx_pass(stage="pre", register=False)
        def place(graph: graft.Graph) -> None:
            for node in graph.nodes:
                node.meta["stream"] = on.get(str(node.target), "main")

        return place

    run = compiled(step, pre_passes=[label({"aten.mul.Tensor": "side"})])
    assert "different streams: 'main', 'side'" in str(run.report)
    run = compiled(step, pre_passes=[label({})])
    assert run.report.matches["quantize"] == 1
    assert {node.meta.get("stream") for node in run.graph.nodes} == {"main"}


def test_a_replacement_refuses_with_a_reason(quantize: Any) -> None:
    run = compiled(lambda x: step(x, hi=100))
    assert run.report.matches["quantize"] == 0
    assert "range -128..100 is not int8 (`clamp`" in str(run.report)


# --- What a replacement gives ---


def test_the_wrong_number_of_outputs(quantize: Any) -> None:
    quantize.replace(lambda m: (m.x, m.x))
    with pytest.raises(BadReplacement, match="the replacement must be 1 value, got 2") as caught:
        compiled(Steps())
    assert "test_pattern.py" in caught.value.where


def test_the_wrong_dtype_or_shape(quantize: Any) -> None:
    quantize.replace(lambda m: m.x.to(torch.int8))
    with pytest.raises(BadReplacement, match=r"must be f32\[4, 6\], got i8\[4, 6\]"):
        compiled(step)
    quantize.replace(lambda m: m.x[0])
    with pytest.raises(BadReplacement, match=r"must be f32\[4, 6\], got f32\[6\]"):
        compiled(step)
    quantize.replace(lambda m: 3)
    with pytest.raises(BadReplacement, match="must be a tensor, got 3"):
        compiled(step)


def test_another_type_can_be_meant(quantize: Any) -> None:
    quantize.replace(lambda m: (m.x * m.scale).to(torch.int8), changes_type=True)
    run = compiled(lambda x: step(x) + 1)
    assert run(X).dtype == torch.int8
    assert run.graph.one(aten.add).meta["val"].dtype == torch.int8


def test_a_replacement_of_nodes(quantize: Any) -> None:
    @quantize.replace(nodes=True)
    def _(m: graft.Match) -> Any:
        assert m.x is m.node("x")
        return m.graph.call(aten.relu.default, m.x)

    run = compiled(step)
    assert ops(run) == ["relu.default"]
    torch.testing.assert_close(run(X), X.relu())


def test_a_replacement_made_with_a_net(quantize: Any) -> None:
    @quantize.replace(nodes=True)
    def _(m: graft.Match) -> Any:
        scaled = m.net.add("aten::mul", m.x, m.scale)
        return m.net.add("aten::clamp", m.net.cast(scaled, torch.float64), m.lo, m.hi)

    with pytest.raises(BadReplacement, match=r"must be f32\[4, 6\], got f64\[4, 6\]"):
        compiled(step)

    @quantize.replace(nodes=True)
    def _(m: graft.Match) -> Any:
        whole = m.net.add("aten::round", m.net.add("aten::mul", m.x, m.net.constant(m.scale)))
        assert (whole.dtype, whole.shape) == (torch.float32, X.shape)
        return m.net.add("aten::clamp", whole, m.lo, m.hi)

    run = compiled(lambda x: step(x, offset=0.0), verify="each")
    assert ops(run) == ["mul.Tensor", "round.default", "clamp.default"]
    torch.testing.assert_close(run(X), step(X, offset=0.0))
    assert graft.explain_match(quantize, step, (X,)).matched


@pytest.mark.filterwarnings("ignore:torchgraft")
@pytest.mark.parametrize("kind", ["torch code", "net", "graph"])
def test_a_replacement_takes_over_the_marks_of_the_match(quantize: Any, kind: str) -> None:
    makes = {
        "torch code": lambda m: torch.relu(m.x),
        "net": lambda m: m.net.add("aten::relu", m.x),
        "graph": lambda m: m.graph.call(aten.relu.default, m.x),
    }
    quantize.replace(makes[kind], nodes=kind != "torch code")

    @graft.fx_pass(stage="pre", register=False)
    def place(graph: graft.Graph) -> None:
        for node in graph.nodes:
            node.meta["stream"] = "side"

    def model(x: Tensor) -> Tensor:
        with graft.fallback():
            return step(x)

    run = graft.compile(model, (X,), pre_passes=[place], torch_executed_ops=["aten::sin"])
    [node] = run.graph.nodes
    assert node.meta["stream"] == "side"
    assert [n.kind for n in run.report.nodes] == ["forced block"]


def test_an_input_may_be_the_result() -> None:
    @graft.pattern
    def again(x: Tensor) -> Tensor:
        return torch.neg(torch.neg(x))

    again.replace(lambda m: m.x)
    run = compiled(lambda x: x.neg().neg().relu())
    assert ops(run) == ["relu.default"]


def test_what_a_replacement_makes_of_weights_is_folded() -> None:
    @graft.pattern
    def scaled(x: Tensor, w: Tensor, n: float) -> Tensor:
        return torch.relu(x * w) * n

    scaled.replace(lambda m: torch.relu(m.x * (m.w * m.n)))
    weight = torch.nn.Parameter(torch.rand(6))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x * self.weight) * 3

    run = compiled(Model())
    assert ops(run) == ["mul.Tensor", "relu.default"]
    torch.testing.assert_close(run(X), Model()(X))


def test_constants_in_a_replacement(quantize: Any) -> None:
    quantize.replace(lambda m: m.x + torch.arange(6.0) + torch.tensor([1.0] * 6))
    run = compiled(lambda x: step(x) + step(x, 2))
    torch.testing.assert_close(run(X), 2 * (X + torch.arange(6.0) + 1))


def test_a_replacement_that_raises_names_the_pattern(quantize: Any) -> None:
    quantize.replace(lambda m: m.y)
    with pytest.raises(UnknownName, match=r"unknown argument 'y'.*Known: 'hi', 'lo', 'offset'"):
        compiled(step)

    @quantize.replace
    def _(m: graft.Match) -> Tensor:
        raise ZeroDivisionError("oh")

    with pytest.raises(PassFailed, match=r"pass 'quantize' .*ZeroDivisionError: oh"):
        compiled(step)


def test_nodes_by_operator(quantize: Any) -> None:
    @quantize.replace
    def _(m: graft.Match) -> Tensor:
        assert m.node("clamp").target is aten.clamp.default
        assert m.node("x").op == "placeholder"
        assert [n.target for n in m.nodes].count(aten.mul.Tensor) == 1
        with pytest.raises(UnknownName, match="unknown node 'relu'"):
            m.node("relu")
        return m.x * 1.5

    assert compiled(step).report.matches["quantize"] == 1


def test_a_pattern_without_a_replacement_only_counts() -> None:
    @graft.pattern
    def sums(a: Tensor, b: Tensor) -> Tensor:
        return a + b

    run = compiled(lambda x: (x + x) * (x + 1.0) + x)
    assert run.report.matches == {"sums": 2}
    assert ops(run).count("add.Tensor") == 3


# --- Order and scope ---


def names(config: graft.Config) -> list[str]:
    return [spec.name for spec in passes_for(config)]


def make(name: str, **options: Any) -> Any:
    @graft.pattern(name=name, **options)
    def any_relu(x: Tensor) -> Tensor:
        return torch.relu(x)

    return any_relu


def test_patterns_run_on_a_clean_graph_before_weights_are_folded() -> None:
    make("one")
    order = names(graft.Config())
    assert order.index("common_subexpressions") < order.index("one") < order.index("fold_constants")


def test_patterns_are_ordered_by_name_among_patterns_and_passes() -> None:
    make("late", after="early")
    make("early")
    make("first", before=["early", "late"])
    make("last", stage="post")

    @graft.fx_pass(stage="post", before="last")
    def between(graph: graft.Graph) -> None: ...

    order = [n for n in names(graft.Config()) if n in ("late", "early", "first", "last", "between")]
    assert order == ["first", "early", "late", "between", "last"]
    make("impossible", before="between", stage="post", after="last")
    with pytest.raises(PassOrder):
        names(graft.Config())


def test_names_are_checked() -> None:
    make("one")
    with pytest.raises(BadPass, match=r"the name is taken by the one at .*test_pattern"):
        make("one")
    with pytest.raises(UnknownName, match="unknown stage 'built-in'"):
        make("two", stage="built-in")
    make("three", after="oen")
    with pytest.raises(UnknownName, match="Did you mean 'one'"):
        names(graft.Config())


def test_a_registry_holds_patterns_and_a_compile_can_bring_its_own() -> None:
    with graft.Registry() as registry:
        make("inside")
    alone = make("alone", register=False)
    assert len(registry) == 1
    assert compiled(lambda x: x.relu()).report.matches == {}
    assert compiled(lambda x: x.relu(), patterns=[alone]).report.matches == {"alone": 1}
    assert compiled(lambda x: x.relu(), registry=registry).report.matches == {"inside": 1}
    registry.unregister("inside")
    assert compiled(lambda x: x.relu(), registry=registry).report.matches == {}
    with pytest.raises(BadValue, match=r"patterns, as graft.pattern makes them"):
        compiled(lambda x: x.relu(), patterns=[torch.relu])


def test_the_first_pattern_wins() -> None:
    make("general")

    @graft.pattern(before="general")
    def special(x: Tensor) -> Tensor:
        return torch.relu(torch.sin(x))

    special.replace(lambda m: m.x.cos())
    run = compiled(lambda x: x.sin().relu() + x.relu())
    assert run.report.matches == {"special": 1, "general": 1}


def test_another_kernel_for_a_known_pattern(quantize: Any) -> None:
    other = quantize.using(lambda m: m.x.relu(), name="mine")
    run = compiled(step, patterns=[other], registry=graft.Registry())
    assert ops(run) == ["relu.default"]
    assert quantize.replacement is not other.replacement


# --- Explaining ---


def test_explain_match_says_what_matched_and_how_far_it_got(quantize: Any) -> None:
    found = graft.explain_match(quantize, Steps(), (X,))
    assert found.matched
    assert len(found.hits) == 1
    assert "test_pattern.py" in found.hits[0]
    assert [miss.matched for miss in found.misses] == sorted(
        (miss.matched for miss in found.misses), reverse=True
    )
    assert (found.misses[0].matched, found.misses[0].total) == (4, 4)
    text = str(found)
    assert "1 match\n" in text
    assert "range -128..9 is not int8" in text
    assert re.search(r"1 of 4 ops; `floor` at .*test_pattern.py:\d+ stands where", text)


def test_explain_match_finds_a_part_without_its_end(quantize: Any) -> None:
    found = graft.explain_match(quantize, lambda x: torch.round(x * 2 + 1).relu(), (X,))
    assert not found.matched
    assert found.misses[0].matched == 3
    assert "no other `clamp` uses `round`" in str(found)
    found = graft.explain_match(quantize, lambda x: x.relu(), (X,))
    assert "0 of 4 ops; the graph has no `" in str(found)
    with pytest.raises(BadValue, match="explain_match"):
        graft.explain_match(torch.relu, torch.relu, (X,))  # type: ignore[arg-type]


# --- Ranks ---


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 2, 3, 4)])
def test_data_weight_and_bias_need_no_types(shape: tuple[int, ...], bias: bool) -> None:
    @graft.pattern
    def linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.relu(torch.nn.functional.linear(x, weight, bias))

    model = torch.nn.Sequential(torch.nn.Linear(4, 5, bias=bias), torch.nn.ReLU())
    assert compiled(model, torch.randn(shape)).report.matches == {"linear_relu": 1}


# --- IR text ---

IR = """graph(%0 : Tensor, %1 : Tensor, %2 : Tensor, %3 : int, %x : int, %y : int):
  %4 : Tensor = aten::mul(%0, %1)
  %5 : Tensor = aten::add(%4, %2, %3)
  %6 : Tensor = aten::round(%5)
  %7 : Tensor = aten::clamp(%6, %x, %y)
  return (%7)"""


def test_ir_text_binds_numbers_where_it_says_tensor() -> None:
    bound = []
    quantise = graft.pattern(IR, name="quantise")

    @quantise.replace
    def _(m: graft.Match) -> Tensor:
        bound.append((m["1"], m["2"], m["3"], m.x, m.y))
        return m["0"] * 0

    assert compiled(step).report.matches == {"quantise": 1}
    assert bound == [(8.8, 1.0, 1, -128, 127)]
    compiled(lambda x, s, b: torch.add(x * s, b, alpha=2).round().clamp(0, 9), X, X, X)
    assert bound[1][2:] == (2, 0, 9)
    assert isinstance(bound[1][0], Tensor)


def test_ir_text_has_constants_lists_and_several_results() -> None:
    graft.pattern(
        """
        graph(%x : Tensor, %w : Tensor):
            %one : int = prim::Constant[value=1]()
            %zero : int = prim::Constant[value=0]()
            %dims : int[] = prim::ListConstruct(%one, %zero)
            %y : Tensor = aten::permute(%x, %dims)
            %a : Tensor = aten::relu(%y)
            %b : Tensor = aten::mul(%a, %w)
            return (%a, %b)
        """,
        name="turned",
    )
    run = compiled(lambda x, w: (x.t().relu() * w, x.t().relu()), X, X.t())
    assert run.report.matches == {"turned": 1}


def test_ir_text_may_write_in_place() -> None:
    graft.pattern(
        """
        graph(%x : Tensor, %y : Tensor, %by : int):
            %a : Tensor = aten::mul(%x, %y)
            %b : Tensor = aten::add_(%a, %y, %by)
            return (%b)
        """,
        name="written",
    )
    run = compiled(lambda x, y: (x * y).add_(y, alpha=2), X, X)
    assert run.report.matches == {"written": 1}


@pytest.mark.parametrize(
    ("text", "line", "column", "why"),
    [
        ("graph(%0 : Tensor):\n  %1 : Tensr = aten::relu(%0)\n  return (%1)", 2, 8, "type"),
        ("graph(%0 : Tensor):\n  %1 : Tensor = aten::relu(%0\n  return (%1)", 3, 3, r"expected \)"),
        ("graph(%0 : Tensor):\n  %1 : Tensor = aten::relu(%2)\n  return (%1)", 2, 28, "variable"),
        (
            "graph(%0 : Tensor):\n  %1 : Tensor = aten::rellu(%0)\n  return (%1)",
            2,
            17,
            "(?s)no operator aten::rellu.*'aten::relu",
        ),
        (
            "graph(%0 : Tensor):\n  %1 : Tensor = aten::mul(%0)\n  return (%1)",
            2,
            17,
            r"(?s)no aten::mul takes \(Tensor\).*aten::mul.Tensor\(Tensor self, Tensor other\)",
        ),
        (  # which is relu.out, if it is anything
            "graph(%0 : Tensor):\n  %1 : Tensor = aten::relu(%0, %0)\n  return (%1)",
            2,
            17,
            r"takes \(Tensor, Tensor\)\nThere are:\n  aten::relu\(Tensor self\) -> Tensor$",
        ),
        ("", 1, 1, "expected"),
        ("graph(%0 : Device):\n  return (%0)", 0, 0, "%0 is Device"),
    ],
)
def test_ir_text_that_is_wrong_says_where(text: str, line: int, column: int, why: str) -> None:
    with pytest.raises(BadPattern, match=why) as caught:
        graft.pattern(text, name="wrong")
    assert (caught.value.line, caught.value.column) == (line, column)


# --- Patterns that could never match ---


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (lambda x, n: x * (1 / n), "argument 'n' cannot be bound"),
        (lambda x, n: x + 1, "argument 'n' cannot be bound"),
        (lambda x, n: x, "argument 'x' cannot be bound"),
        (lambda x, n: torch.relu(x, n), "cannot be traced: TypeError"),
        (lambda x, n: torch.ops.aten.nothing(x, n), "cannot be traced: AttributeError"),
    ],
)
def test_a_pattern_that_cannot_match_is_told_at_registration(body: Any, why: str) -> None:
    def wrong(x: Tensor, n: float) -> Tensor:
        result: Tensor = body(x, n)
        return result

    with pytest.raises(BadPattern, match=why):
        graft.pattern(wrong)


def test_arguments_need_types() -> None:
    with pytest.raises(BadPattern, match="argument 'x' has no type"):
        graft.pattern(lambda x: x.relu(), name="bare")

    def texts(x: str) -> Tensor:
        return torch.ones(1)

    with pytest.raises(BadPattern, match="argument 'x' is str"):
        graft.pattern(texts)

    def some(*x: Tensor) -> Tensor:
        return x[0]

    with pytest.raises(BadPattern, match="not a plain argument"):
        graft.pattern(some)

    def fine(x: Tensor) -> Tensor:
        return x.relu()

    with pytest.raises(BadPattern, match="no tensor is named 'y'"):
        graft.pattern(fine, types={"y": "[a]"})
    with pytest.raises(BadPattern, match=r"'f31\[a\]' for 'x' is no type"):
        graft.pattern(fine, types={"x": "f31[a]"})
    with pytest.raises(BadPattern, match=r"cannot be called with a graft.Match"):
        make("one").replace(lambda: None)


# --- check ---


def test_check_compares_pattern_and_replacement(quantize: Any) -> None:
    quantize.replace(lambda m: torch.clamp(torch.round(m.offset + m.scale * m.x), m.lo, m.hi))
    result = quantize.check()
    assert result.fired == result.trials == 20
    assert result.worst <= 1


def test_check_finds_what_is_wrong_and_gives_the_inputs(quantize: Any) -> None:
    quantize.replace(lambda m: torch.clamp(torch.round(m.x * m.scale), m.lo, m.hi))
    with pytest.raises(PatternChanged, match="output 0 differs by") as caught:
        quantize.check(lo=-128, hi=127)
    assert caught.value.inputs.keys() == {"x", "scale", "offset", "lo", "hi"}
    assert isinstance(caught.value.inputs["x"], Tensor)
    assert re.search(r"x = \w+\[\d+, \d+\]", str(caught.value))


def test_check_says_when_nothing_fired(quantize: Any) -> None:
    with pytest.raises(NeverFired, match=r"(?s)is not int8.*pattern.check\(lo=-128"):
        quantize.check(hi=[100, 101])
    with pytest.raises(UnknownName, match="unknown argument 'high'"):
        quantize.check(high=1)


def test_getitem_is_part_of_a_pattern() -> None:
    @graft.pattern
    def largest(x: Tensor) -> Tensor:
        return torch.relu(torch.max(x, 1).values)

    @largest.replace(nodes=True)
    def _(m: graft.Match) -> Any:
        assert m.node("getitem").target is operator.getitem
        return m.graph.call(aten.amax.default, m.graph.call(aten.relu.default, m.x), [1])

    run = compiled(lambda x: x.max(1).values.relu())
    assert run.report.matches == {"largest": 1}
    torch.testing.assert_close(run(X), X.max(1).values.relu())
