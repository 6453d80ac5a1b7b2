"""Verification: broken rewrites are named, right ones are left alone."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import process
import pytest
import torch
from models import CASES
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

import torchgraft as graft
from torchgraft import errors
from torchgraft.verify import compare, samples

aten = torch.ops.aten


class Model(nn.Module):
    """A bit of everything: weights, indices, views, masks, a softmax, a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.up = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.table(ids) + x
        z = self.up(y).permute(1, 0)
        self.seen += y.mean(0)
        w = torch.softmax(z * 0.5, 0)
        return torch.where(w > 0.1, w - 1, w), z.exp()


INPUTS = (torch.tensor([1, 6, 3, 0]), torch.linspace(-1, 1, 32).reshape(4, 8))


# --- Ten rewrites, each broken on purpose: (how it is broken, the operator that is hit) ---


def _break(target: Any, change: Callable[[graft.Graph, Any], Any]) -> Any:
    def broken(graph: graft.Graph) -> None:
        node = graph.all(target)[0]
        with graph.before(node):
            value = change(graph, node)
        if value is not None:
            graph.replace(node, value)

    return graft.fx_pass(broken, register=False, name="broken")


def _set(**changes: Any) -> Callable[[graft.Graph, Any], None]:
    def change(graph: graft.Graph, node: Any) -> None:
        for name, value in changes.items():
            setattr(node, name, value(node) if callable(value) else value)

    return change


PASSES: dict[str, tuple[Any, Any]] = {
    "a scalar is off": (aten.mul.Tensor, _set(args=lambda n: (n.args[0], 0.51))),
    "operands are swapped": (aten.sub.Tensor, _set(args=lambda n: (n.args[1], n.args[0]))),
    "another dim": (aten._softmax.default, _set(args=lambda n: (n.args[0], 1, False))),
    "another operator": (aten.exp.default, lambda g, n: g.call(aten.expm1.default, n.args[0])),
    "a node is dropped": (aten.exp.default, lambda g, n: n.args[0]),
    "a view became a copy in another order": (
        aten.permute.default,
        lambda g, n: g.call(aten.reshape.default, n.args[0], list(n.meta["val"].shape)),
    ),
    "a mask is turned": (aten.gt.Scalar, lambda g, n: g.call(aten.le.Scalar, *n.args)),
    "a mean without a row": (
        aten.mean.dim,
        lambda g, n: g.call(
            aten.mean.dim, g.call(aten.slice.Tensor, n.args[0], 0, 1, 4), *n.args[1:]
        ),
    ),
}


def blamed(info: Any) -> tuple[str, str]:
    return info.value.by.split(" (")[0], info.value.node


@pytest.mark.parametrize("how", PASSES)
@pytest.mark.parametrize("freeze", [True, False])
def test_a_broken_pass_and_its_node_are_named(
    how: str, freeze: bool, tmp_path: pathlib.Path
) -> None:
    target, change = PASSES[how]
    clean = graft.compile(Model(), INPUTS, mode="eager", freeze=freeze, verify="each")
    guilty = clean.graph.all(target)[0].name
    with pytest.raises(errors.ResultChanged) as info:
        graft.compile(
            Model(),
            INPUTS,
            mode="eager",
            freeze=freeze,
            verify="each",
            verify_dir=str(tmp_path),
            post_passes=[_break(target, change)],
        )
    assert blamed(info) == ("pass 'broken'", guilty)
    assert pathlib.Path(__file__).name in str(info.value.line)
    assert info.value.script is not None
    assert pathlib.Path(info.value.script).parent == tmp_path


CONVERTERS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "a converter is off by one": (
        aten.exp.default,
        lambda net, x: net.add("aten::exp2", net.add("aten::mul", x, 1.4)),
    ),
    "a converter swaps its operands": (
        aten.sub.Tensor,
        lambda net, x, other, *, alpha=1: net.add("aten::sub", other, x),
    ),
}


@pytest.mark.parametrize("how", CONVERTERS)
def test_a_broken_converter_and_its_node_are_named(how: str, tmp_path: pathlib.Path) -> None:
    target, fn = CONVERTERS[how]
    clean = graft.compile(Model(), INPUTS, mode="eager")
    guilty = clean.graph.all(target)[0].name
    graft.converter(target, name="bad")(fn)
    graft.converter(aten.gt.Scalar, name="good")(
        lambda net, x, other: net.add("aten::logical_not", net.add("aten::le", x, other))
    )
    with pytest.raises(errors.ResultChanged) as info:
        graft.compile(Model(), INPUTS, mode="eager", verify="each", verify_dir=str(tmp_path))
    assert info.value.by.startswith("converter 'bad'")
    assert info.value.node == guilty


# --- What is compared ---


def test_right_rewrites_pass_on_every_model() -> None:
    for make in CASES.values():
        model, args = make()
        graft.compile(model, args, mode="eager", verify="pin")


def test_memory_strides_dtypes_and_writes_count() -> None:
    x = torch.randn(3, 4)

    def graph(fn: Callable[..., Any]) -> GraphModule:
        return symbolic_trace(fn)

    same = lambda x: (x.t(), x + 1)  # noqa: E731
    graft.verify(graph(same), graph(same), (x,))
    cases: dict[str, Any] = {
        "shared memory with input 0, now with None": lambda x: (x.t().clone(), x + 1),
        "strides": lambda x: (x.t().contiguous(), x + 1),
        "dtype": lambda x: (x.t(), (x + 1).double()),
        "shape": lambda x: (x.t(), (x + 1)[:2]),
    }
    for text, fn in cases.items():
        with pytest.raises(errors.ResultChanged, match=text):
            graft.verify(graph(same), graph(fn), (x,))
    written = graph(lambda x: (x.add_(1) + 0,))
    with pytest.raises(errors.ResultChanged, match="input 0 after the call"):
        graft.verify(graph(lambda x: (x + 1,)), written, (x,))


def test_a_constant_written_in_place_is_found() -> None:
    @graft.fx_pass(register=False)
    def in_place(graph: graft.Graph) -> None:
        node = next(n for n in graph.gm.graph.nodes if n.op == "get_attr")
        getattr(graph.gm, node.target).mul_(2)

    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(errors.ResultChanged, match="was written to; make a new one"):
        graft.compile(
            model, (torch.ones(1, 2),), mode="eager", verify="each", pre_passes=[in_place]
        )


def test_rounding_is_no_difference_but_more_is() -> None:
    want = torch.randn(64)
    assert compare.unlike(want, want * (1 + 1e-7), depth=4) is None
    text = compare.unlike(want, want * (1 + 1e-3), depth=4)
    assert text is not None
    assert "of 64 numbers differ, the worst by" in text
    half = want.half()
    assert compare.unlike(half, half * 1.001, depth=4) is None
    assert compare.unlike(half, half * 1.2, depth=4) is not None
    assert compare.unlike(torch.tensor([1, 2]), torch.tensor([1, 3]), depth=99) is not None
    assert compare.tolerance(torch.float64, 16) < 1e-13
    nan = torch.tensor([float("nan"), 1.0])
    assert compare.unlike(nan, nan.clone(), depth=1) is None
    assert compare.unlike(nan, torch.tensor([0.0, 1.0]), depth=1) is not None


def test_random_operators_draw_the_same_before_and_after() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.1))
    x = torch.ones(64)
    graft.compile(model, (x,), mode="eager", verify="pin")

    @graft.fx_pass(register=False)
    def other_odds(graph: graft.Graph) -> None:
        node = next(n for n in graph.nodes if n.args and 0.5 in n.args)
        node.args = tuple(0.6 if arg == 0.5 else arg for arg in node.args)

    with pytest.raises(errors.ResultChanged):
        graft.compile(model, (x,), mode="eager", verify="each", post_passes=[other_odds])


def test_drawn_inputs_fit_their_uses() -> None:
    spec = graft.Input((4,), dtype=torch.int64)
    graph = graft.compile(lambda i: torch.eye(3)[i] + 1, (spec,), mode="eager").graph
    mixed, *_ = samples.draws(graph.gm)
    assert set(mixed[0].tolist()) <= {0, 1, 2}
    mask = graft.Input((8,), dtype=torch.bool)
    moved = graft.Input(min_shape=(2, 3), max_shape=(9, 3))
    graph = graft.compile(lambda m, x: (~m, x + 1), (mask, moved), mode="eager").graph
    mixed, *_ = samples.draws(graph.gm)
    assert mixed[0].dtype == torch.bool
    assert 2 <= mixed[1].shape[0] <= 9


def test_what_only_positive_numbers_show_is_shown() -> None:
    @graft.fx_pass(register=False)
    def wrong(graph: graft.Graph) -> None:
        graph.one(aten.log.default).target = aten.log2.default

    fn = lambda x: (-x.abs() - 1).log() + (x - 3).log()  # noqa: E731
    spec = graft.Input((8,))
    graft.compile(lambda x: x.sqrt().log().log1p(), (spec,), mode="eager", verify="each")
    compiled = graft.compile(fn, (spec,), mode="eager", verify="each")
    assert compiled.report.notes == []
    with pytest.raises(errors.ResultChanged):
        graft.compile(lambda x: x.log(), (spec,), mode="eager", verify="each", post_passes=[wrong])


@torch.library.custom_op("graft_tests::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    if not bool((x == 7).all()):
        raise ValueError("sevens only")
    return x.clone()


@picky.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_inputs_that_cannot_be_made_are_said() -> None:
    fn = lambda x: picky(x) + 1  # noqa: E731
    compiled = graft.compile(fn, (torch.full((3,), 7.0),), mode="eager", verify="each")
    assert compiled.report.notes == []  # the real input was used
    compiled = graft.compile(fn, (graft.Input((3,)),), mode="eager", verify="each")
    assert any(note.startswith("not verified: no inputs") for note in compiled.report.notes)


# --- What comes of it ---


def test_the_script_stands_alone(tmp_path: pathlib.Path) -> None:
    target, change = PASSES["a scalar is off"]
    with pytest.raises(errors.ResultChanged) as info:
        graft.compile(
            Model(),
            INPUTS,
            mode="eager",
            verify="each",
            verify_dir=str(tmp_path),
            post_passes=[_break(target, change)],
        )
    script = info.value.script
    assert f"Reproduce it with: python {script}" in str(info.value)
    ran = process.run([sys.executable, script])
    assert "Tensor-likes are not close" in ran.stderr
    assert "torchgraft" not in pathlib.Path(str(script)).read_text().split("import", 1)[1]


def test_the_message_says_who_where_how_much_and_how_to_see_it(tmp_path: pathlib.Path) -> None:
    class Small(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    @graft.fx_pass(register=False)
    def triple(graph: graft.Graph) -> None:
        graph.one(aten.mul.Tensor).args = (graph.inputs[0], 3)

    with pytest.raises(errors.ResultChanged) as info:
        graft.compile(
            Small(), (torch.ones(2),), verify="each", verify_dir=str(tmp_path), pre_passes=[triple]
        )
    line = Small.forward.__code__.co_firstlineno + 1
    assert str(info.value) == (
        f"pass 'triple' ({triple.where}) changed the result: node 'mul' (aten.mul.Tensor)\n"
        f"  at {__file__}:{line}\n"
        f"  output 0: 2 of 2 numbers differ, the worst by 1 at [0] (2 became 3; 1.53e-05 is "
        f"rounding)\n"
        f"Reproduce it with: python {tmp_path / 'pass_triple.py'}\n"
        f"Mend it, or go on without it: verify='pin' does."
    )


def test_pin_undoes_the_rewrite_and_goes_on() -> None:
    target, change = PASSES["another operator"]
    graft.converter(aten.sub.Tensor, name="bad")(
        lambda net, x, other, *, alpha=1: net.add("aten::sub", other, x)
    )
    graft.converter(aten.gt.Scalar, name="good")(
        lambda net, x, other: net.add("aten::logical_not", net.add("aten::le", x, other))
    )
    config = graft.Config(verify="pin", post_passes=[_break(target, change)])
    compiled = graft.compile(Model(), INPUTS, config=config)
    torch.testing.assert_close(compiled(*INPUTS), Model.forward(_twin(compiled), *INPUTS))
    pinned = {node.op: node.reason for node in compiled.report.nodes if node.kind == "pinned"}
    assert set(pinned) == {"aten.exp.default", "aten.sub.Tensor"}
    assert pinned["aten.exp.default"].startswith("pass 'broken'")
    assert pinned["aten.sub.Tensor"].startswith("converter 'bad'")
    assert "aten.logical_not.default" in {node.op for node in compiled.report.nodes}
    assert sum(note.startswith("undone: ") for note in compiled.report.notes) == 2


def _twin(compiled: Any) -> Any:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def wrong_cos(monkeypatch: pytest.MonkeyPatch) -> None:
    """A code generator that computes sin for cos."""
    from torchgraft.codegen import inductor

    generate = inductor.generate

    def broken(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        for node in gm.graph.find_nodes(op="call_function", target=aten.cos.default):
            node.target = aten.sin.default
        gm.recompile()  # the generator's cache goes by the module's code
        return generate(gm, *args, **kwargs)

    monkeypatch.setattr(inductor, "generate", broken)


def several(x: Tensor) -> Tensor:
    return ((x + 1.25).tanh() * 1.75).cos().exp() - x


def test_generated_code_is_compared_at_the_end_and_pinned(wrong_cos: None) -> None:
    x = torch.randn(5)
    with pytest.raises(errors.ResultChanged, match=r"launch of 'region0' changed .* node 'cos'"):
        graft.compile(several, (x,), verify="end")
    compiled = graft.compile(several, (x,), verify="pin")
    torch.testing.assert_close(compiled(x), several(x))
    [node] = compiled.report.fallbacks
    assert (node.op, node.kind) == ("aten.cos.default", "pinned")


def noisy(x: Tensor) -> Tensor:
    late = torch.rand_like(x.sin())
    return (torch.nn.functional.dropout(x, 0.5, True) * torch.rand_like(x)).cos() + late


def test_random_numbers_are_compared_at_the_end(request: pytest.FixtureRequest) -> None:
    x = torch.randn(64)
    compiled = graft.compile(noisy, (x,), verify="end")
    assert not compiled.report.fallbacks
    assert not compiled.report.notes
    assert graft.bisect(compiled, (x,)) is None
    request.getfixturevalue("wrong_cos")
    with pytest.raises(errors.ResultChanged, match="node 'cos'"):
        graft.compile(noisy, (x,), verify="end")
    pinned = graft.compile(noisy, (x,), verify="pin")
    assert [node.op for node in pinned.report.fallbacks] == ["aten.cos.default"]


def test_random_numbers_in_a_branch_are_not() -> None:
    def fn(x: Tensor) -> Tensor:
        result: Tensor = torch.cond(x.sum() > 0, torch.rand_like, torch.sin, (x,))
        return result

    compiled = graft.compile(fn, (torch.ones(3),), verify="end")
    assert "random numbers in a branch: only types were compared" in compiled.report.notes


def test_bisect_finds_the_node_in_a_region(wrong_cos: None) -> None:
    x = torch.randn(5)
    compiled = graft.compile(several, (x,))
    found = graft.bisect(compiled, (x,))
    assert found is not None
    assert (found.by, found.node) == ("launch of 'region0'", "cos")
    assert "node 'cos'" in str(found)


def test_bisect_finds_nothing_or_the_pass() -> None:
    x = torch.randn(5)
    assert graft.bisect(graft.compile(several, (x,)), x, model=several) is None
    broken = _break(aten.cos.default, lambda g, n: g.call(aten.sin.default, n.args[0]))
    compiled = graft.compile(several, (x,), mode="eager", post_passes=[broken])
    found = graft.bisect(compiled, x, model=several)
    assert found is not None
    assert found.by.startswith("pass 'broken'")
    assert found.node == "cos"


def test_off_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a graph was run")

    monkeypatch.setattr(compare, "on_aten", never)
    graft.compile(several, (torch.ones(2),), mode="eager")
    with pytest.raises(errors.UnknownName, match="Did you mean 'each'"):
        graft.Config(verify="eac")


@pytest.mark.slow
def test_torch_compile_is_verified_too() -> None:
    target, change = PASSES["a scalar is off"]
    config = graft.Config(verify="each", post_passes=[_break(target, change)])
    with pytest.raises(Exception, match="pass 'broken'"), torch.no_grad():
        torch.compile(Model(), backend=graft.backend(config))(*INPUTS)
    torch.compiler.reset()
    model = Model()
    model.requires_grad_(True)
    run = torch.compile(model, backend=graft.backend(graft.Config(verify="pin")))
    run(*INPUTS)[0].sum().backward()
    assert model.up.weight.grad is not None
