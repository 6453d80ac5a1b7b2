"""Passes: order, checks after each one, the built-in ones, what a pass author holds."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from models import Mlp
from torch import Tensor
from torch.fx import GraphModule

import torchgraft as graft
from torchgraft.errors import (
    BadPass,
    BrokenGraph,
    NotFound,
    PassFailed,
    PassOrder,
    UnknownName,
)
from torchgraft.passes.pipeline import BUILTIN, passes_for
from torchgraft.passes.spec import Pass

aten = torch.ops.aten
X = torch.randn(4, 4)


def compiled(fn: Any, *args: Any, **fields: Any) -> graft.Compiled:
    return graft.compile(fn, args or (X,), mode="eager", **fields)


def ops(program: graft.Compiled) -> list[str]:
    return [node.op.removeprefix("aten.") for node in program.report.nodes]


# --- What a pass is ---


def test_a_plain_function_is_a_pass_its_return_value_is_ignored() -> None:
    seen: list[Any] = []

    def negate(gm: GraphModule, example_inputs: Any, config: graft.Config) -> Any:
        seen.append((len(example_inputs), config.mode))
        for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            node.target = aten.sub.Tensor
        return "ignored"

    run = compiled(lambda x: x + 1, pre_passes=[negate])
    torch.testing.assert_close(run(X), X - 1)
    assert seen == [(1, "eager")]
    step = next(step for step in run.report.steps if step.name == "negate")
    assert (step.stage, step.added, step.removed, step.changed) == ("pre", 0, 0, 1)


def test_a_graph_pass_edits_and_its_new_nodes_have_values_at_once() -> None:
    @graft.fx_pass(stage="post")
    def double(graph: graft.Graph) -> None:
        add = graph.one(aten.add.Tensor)
        twice = graph.call(aten.mul.Tensor, add, 2)
        assert twice.meta["val"].shape == (4, 4)
        for user in list(add.users):
            if user is not twice:
                user.replace_input_with(add, twice)

    run = compiled(lambda x: (x + 1).relu())
    torch.testing.assert_close(run(X), ((X + 1) * 2).relu())


def test_before_puts_nodes_where_it_says_and_replace_takes_constants() -> None:
    @graft.fx_pass(stage="pre")
    def rewrite(graph: graft.Graph) -> None:
        relu = graph.one(aten.relu)  # a packet finds every overload
        with graph.before(relu):
            new = graph.call(aten.sigmoid.default, relu.args[0])
        graph.replace(relu, new)
        graph.replace(graph.one(aten.full.default), 4)

    run = compiled(lambda x: x.relu() + torch.full((), 3.0))
    assert ops(run) == ["sigmoid.default", "add.Tensor"]
    torch.testing.assert_close(run(X), X.sigmoid() + 4)


def test_both_forms_run_behind_torch_compile_forward_and_backward() -> None:
    kinds: list[int] = []

    def count(gm: GraphModule, example_inputs: Any, config: graft.Config) -> None:
        kinds.append(len(gm.graph.nodes))

    config = graft.Config(mode="eager", post_passes=[count])
    run = torch.compile(Mlp(), backend=graft.backend(config))
    run(torch.randn(2, 8)).sum().backward()
    assert len(kinds) == 2


# --- Order ---


def spec(name: str, stage: str = "post", **order: Any) -> Pass:
    def fn(graph: graft.Graph) -> None: ...

    return graft.fx_pass(fn, name=name, stage=stage, register=False, **order)


def names(config: graft.Config) -> list[str]:
    return [p.name for p in passes_for(config) if p.stage != "built-in"]


def test_order_is_by_stage_then_by_name_then_as_given() -> None:
    config = graft.Config(
        pre_passes=[spec("z", "pre"), spec("y", "pre", before="z")],
        post_passes=[spec("c", after=["a", "b"]), spec("b"), spec("a"), spec("d")],
    )
    assert names(config) == ["y", "z", "b", "a", "c", "d"]


def test_built_in_passes_lie_between_and_can_be_named() -> None:
    config = graft.Config(post_passes=[spec("late", after="fold_constants")])
    stages = [p.stage for p in passes_for(config)]
    assert stages == ["built-in"] * len(BUILTIN) + ["post"]


def test_an_unknown_name_suggests_the_nearest() -> None:
    config = graft.Config(post_passes=[spec("late", after="fold_constant")])
    with pytest.raises(UnknownName, match="Did you mean 'fold_constants'"):
        passes_for(config)
    with pytest.raises(UnknownName, match=r"unknown stage 'posts'. Did you mean 'post'"):
        spec("x", "posts")


def test_a_cycle_is_shown() -> None:
    config = graft.Config(post_passes=[spec("a", after="b"), spec("b", after="a")])
    with pytest.raises(PassOrder, match=r"(a -> b -> a|b -> a -> b)"):
        passes_for(config)
    config = graft.Config(pre_passes=[spec("early", "pre", after="dead_code")])
    with pytest.raises(PassOrder, match="early"):
        passes_for(config)


# --- Registries ---


def test_a_registry_is_a_scope_and_can_be_handed_over() -> None:
    with graft.Registry() as inner:

        @graft.fx_pass(stage="pre")
        def inside(graph: graft.Graph) -> None: ...

        assert names(graft.Config()) == ["inside"]
        with graft.Registry():
            assert names(graft.Config()) == []
            assert names(graft.Config(registry=inner)) == ["inside"]
    assert names(graft.Config()) == []
    inner.unregister("inside")
    assert len(inner) == 0
    with pytest.raises(UnknownName, match="unknown pass or pattern 'inside'"):
        inner.unregister("inside")


def test_a_name_can_be_taken_once() -> None:
    spec("one").stage  # noqa: B018
    graft.fx_pass(lambda graph: None, name="one")
    with pytest.raises(BadPass, match="the name is taken by the one at"):
        graft.fx_pass(lambda graph: None, name="one")


def test_registries_are_safe_to_use_from_threads() -> None:
    registry = graft.Registry()

    def work(i: int) -> None:
        for k in range(50):
            registry.register(spec(f"p{i}.{k}"))
            list(registry)
            registry.unregister(f"p{i}.{k}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registry) == 0


# --- What is checked after a pass ---


def broken(fn: Any) -> Any:
    def bad(gm: GraphModule, example_inputs: Any, config: graft.Config) -> None:
        fn(gm)

    return bad


def swap_order(gm: GraphModule) -> None:
    relu = gm.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    add = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)[0]
    relu.append(add)


def wrong_type(gm: GraphModule) -> None:
    add = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)[0]
    add.target, add.args = aten.mm.default, (add.args[0], 3)


def no_such_constant(gm: GraphModule) -> None:
    relu = gm.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    with gm.graph.inserting_before(relu):
        relu.args = (gm.graph.create_node("get_attr", "missing"),)


def a_module_call(gm: GraphModule) -> None:
    relu = gm.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    with gm.graph.inserting_before(relu):
        relu.args = (gm.graph.call_method("relu", relu.args),)


def fewer_outputs(gm: GraphModule) -> None:
    gm.graph.output_node().args = ((),)


def another_input(gm: GraphModule) -> None:
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_after(first):
        gm.graph.placeholder("extra")


def write_the_input(gm: GraphModule) -> None:
    add = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)[0]
    add.target = aten.add_.Tensor


def write_a_value(gm: GraphModule) -> None:
    relu = gm.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    with gm.graph.inserting_before(relu):
        gm.graph.call_function(aten.copy_.default, (relu.args[0], relu.args[0]))


def keep_sum(gm: GraphModule) -> None:
    [x] = gm.graph.find_nodes(op="placeholder")
    add = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)[0]
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(aten.copy_.default, (x, add))


def another_shape(gm: GraphModule) -> None:
    relu = gm.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    relu.target, relu.args = aten.sum.dim_IntList, (relu.args[0], [0])


def another_dtype(gm: GraphModule) -> None:
    relu = gm.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    relu.target, relu.args = aten.isnan.default, (relu.args[0],)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (swap_order, r"node 'relu': it uses 'add', which is later in the graph"),
        (wrong_type, r"node 'add': .*aten.mm"),
        (no_such_constant, r"no attribute 'missing'"),
        (a_module_call, r"call_method 'relu'"),
        (fewer_outputs, r"must return a tuple of 1 values"),
        (another_input, r"1 inputs became 2"),
        (write_the_input, r"node 'add': aten.add_.Tensor writes in place"),
        (write_a_value, r"aten.copy_.default writes in place"),
        (
            keep_sum,
            r"'copy__default': aten.copy_.default writes input 'x', which the program only reads",
        ),
        (another_shape, r"output 0 was f32\[\d.*\] on cpu and is f32\[.*\] on cpu now"),
        (another_dtype, r"output 0 was f32\[.*\] on cpu and is bool\[.*\] on cpu now"),
    ],
)
def test_a_pass_that_breaks_the_graph_is_named_with_the_node(fn: Any, message: str) -> None:
    with pytest.raises(BrokenGraph, match=message) as caught:
        compiled(lambda x: (x + 1).relu(), post_passes=[broken(fn)])
    assert caught.value.name == "bad"


def test_a_pass_may_write_what_the_program_writes_and_no_other_input() -> None:
    def fn(x: Tensor) -> Tensor:
        y = (x + 1).relu()
        x.zero_()
        return y

    x = torch.zeros(2)
    graft.compile(fn, (x,), mode="eager", post_passes=[broken(keep_sum)])(x)
    assert x.tolist() == [1.0, 1.0]


def test_what_a_program_returns_keeps_its_strides() -> None:
    def by_rows(gm: GraphModule, example_inputs: Any, config: graft.Config) -> None:
        for relu in gm.graph.find_nodes(op="call_function", target=aten.relu.default):
            with gm.graph.inserting_before(relu):
                dense = {"memory_format": torch.contiguous_format}
                relu.args = (gm.graph.call_function(aten.clone.default, relu.args, dense),)

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x.permute(1, 2, 0).relu()
        return y, y.exp(), y

    x = torch.randn(2, 3, 4)
    run = graft.compile(fn, (x,), mode="eager", pre_passes=[by_rows], verify="each")
    one, two, three = run(x)
    assert one is three
    assert one.stride() == two.stride() == fn(x)[0].stride()
    torch.testing.assert_close((one, two), fn(x)[:2])


def test_a_raising_pass_is_named_and_its_exception_chained() -> None:
    def bad(gm: GraphModule, example_inputs: Any, config: graft.Config) -> None:
        raise ValueError("nope")

    with pytest.raises(PassFailed, match=r"pass 'bad' \(stage 'pre', .*test_passes.py:\d+\)") as e:
        compiled(lambda x: x + 1, pre_passes=[bad])
    assert isinstance(e.value.__cause__, ValueError)
    run = torch.compile(lambda x: x + 1, backend=graft.backend(graft.Config(pre_passes=[bad])))
    with pytest.raises(Exception, match="pass 'bad'"):
        run(X)


def test_a_pass_with_the_wrong_signature_is_refused_before_anything_runs() -> None:
    def two(gm: Any, inputs: Any) -> None: ...

    with pytest.raises(BadPass, match=r"'two': its signature .* cannot be called with"):
        compiled(lambda x: x + 1, pre_passes=[two])
    with pytest.raises(BadPass, match=r"graft.Graph"):
        graft.fx_pass(lambda: None, name="none")


def test_a_missing_node_says_what_there_is() -> None:
    @graft.fx_pass(stage="pre")
    def pick(graph: graft.Graph) -> None:
        graph.one(aten.mm.default)

    with pytest.raises(
        NotFound, match=r"one aten.mm.default in the graph, found 0.*aten.add.Tensor"
    ):
        compiled(lambda x: x + 1)


def test_values_follow_what_a_pass_changed() -> None:
    @graft.fx_pass(stage="post")
    def to_double(graph: graft.Graph) -> None:
        add = graph.one(aten.add.Tensor)
        wide = graph.call(aten._to_copy.default, add.args[0], dtype=torch.float64)
        add.args = (wide, *add.args[1:])

    run = compiled(lambda x: (x + 1).relu() > 1)
    assert run(X).dtype == torch.bool
    assert [n.meta["val"].dtype for n in run.graph.nodes] == [torch.float64] * 3 + [torch.bool]


def test_a_view_of_what_has_other_strides_now_may_copy() -> None:
    @graft.fx_pass(stage="pre")
    def transposed(graph: graft.Graph) -> None:
        add = graph.one(aten.add.Tensor)
        with graph.before(next(iter(add.users))):
            turned = graph.call(aten.permute.default, add, [1, 0])
            turned = graph.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
            back = graph.call(aten.permute.default, turned, [1, 0])
        add.replace_all_uses_with(back, delete_user_cb=lambda n: n.target is aten.view.default)

    with graft.Registry():
        run = graft.compile(
            lambda x: (x + 1).view(-1), (torch.zeros(2, 3),), mode="eager", pre_passes=[transposed]
        )
    x = torch.arange(6.0).view(2, 3)
    assert run(x).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


# --- The built-in passes ---


def test_noops_go_and_copies_that_a_caller_can_tell_stay() -> None:
    run = compiled(lambda x: (x.view(4, 4).expand(4, 4).to(x.dtype).clone() * 1).sin())
    assert ops(run) == ["sin.default"]
    x = X.clone()
    out = compiled(lambda x: x.clone())(x)
    assert out.data_ptr() != x.data_ptr()
    view = compiled(lambda x: x.clone().view(-1))(x)
    assert view.data_ptr() != x.data_ptr()
    assert compiled(lambda x: x * 1)(x).data_ptr() != x.data_ptr()


def test_dead_code_goes_but_writes_stay() -> None:
    def fn(x: Tensor) -> Tensor:
        x.sin()
        x.add_(1)
        return x.cos()

    assert ops(compiled(fn, X.clone())) == ["add.Tensor", "cos.default", "copy_.default"]


def test_the_same_is_computed_once_but_draws_are_not_merged() -> None:
    run = compiled(lambda x: (x.sin() + 1) * (x.sin() + 1) + (x.sin() + 1.0))
    assert ops(run) == ["sin.default", "add.Tensor", "mul.Tensor", "add.Tensor", "add.Tensor"]
    run = compiled(lambda x: torch.rand_like(x) + torch.rand_like(x))
    assert len(ops(run)) == 3


def test_what_depends_on_frozen_weights_alone_is_folded() -> None:
    class M(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.w.sin() * 2).t()

    model = M()
    run = compiled(model)
    assert ops(run) == ["mm.default"]
    torch.testing.assert_close(run(X), model(X).detach())
    assert not [name for name, _ in run.graph.gm.named_buffers() if name.startswith("_weight")]
    assert len(ops(compiled(model, freeze=False))) == 4


def test_what_depends_on_nothing_is_held_where_it_takes_more_than_reading_it() -> None:
    def banded(x: Tensor) -> Tensor:
        at = torch.arange(x.shape[0])
        near = (at[:, None] - at).abs() // 2 < 2
        return x.masked_fill(near.logical_not(), -1)

    run = compiled(banded)
    assert ops(run) == ["scalar_tensor.default", "where.self"]
    torch.testing.assert_close(run(X), banded(X))
    assert len(ops(compiled(lambda x: x + torch.arange(4) * 2))) == 3  # part of what reads it
    ranged = graft.Input(min_shape=(2, 4), max_shape=(8, 4))
    run = compiled(lambda x: banded(x @ x.t()), ranged)
    assert len(ops(run)) > 5  # there is one for each size
    for rows in (2, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(run(x), banded(x @ x.t()))
    drawn = compiled(lambda x: x + (((torch.rand(4) + 1) * 2).sin().cos() + 3))
    assert not torch.equal(drawn(X), drawn(X))


def test_folding_computes_in_the_types_of_the_graph() -> None:
    class M(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return x + self.a @ self.b

    model = M().eval()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        run = compiled(model)
        expected = model(X)
    assert ops(run) == ["add.Tensor"]
    torch.testing.assert_close(run(X), expected)


def test_sizes_that_data_tells_are_not_folded() -> None:
    def picked(x: Tensor) -> Tensor:
        at = torch.arange(8).remainder(3).cos().exp().sin().gt(0.5)
        return x[:, torch.nonzero(at).squeeze(1)]

    x = torch.randn(4, 8)
    torch.testing.assert_close(compiled(picked, x)(x), picked(x))

    class M(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.arange(8) % 3 == 0)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, self.mask.nonzero()  # type: ignore[operator]

    torch.testing.assert_close(compiled(M(), x)(x), M()(x))


def test_a_mask_of_attention_is_held() -> None:
    q = torch.randn(1, 2, 4, 8)

    def masked(q: Tensor) -> Tensor:
        mask = torch.zeros(4, 4).masked_fill(torch.eye(4, dtype=torch.bool), -torch.inf)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, mask)

    run = compiled(masked, q)
    assert "masked_fill.Scalar" not in ops(run)
    assert "zeros.default" not in ops(run)
    torch.testing.assert_close(run(q), masked(q))


def test_what_is_large_and_depends_on_nothing_is_computed() -> None:
    def many(x: Tensor) -> Tensor:
        return x + ((torch.arange(1 << 20) % 7 * 3 + 1) // 2 - 1).float().sum()

    assert ops(compiled(many)) == ["add.Tensor"]  # the sum is one number
    wide = torch.randn(1, 1 << 22)
    assert len(ops(compiled(lambda x: x + (torch.arange(1 << 23)[::2] % 7 * 3 + 1) // 2, wide))) > 3
    few = compiled(lambda x: x + torch.ones(1 << 13, 1 << 10).cos().sin().exp().tanh()[:4, 0])
    assert len(ops(few)) > 3


def test_view_becomes_reshape() -> None:
    assert ops(compiled(lambda x: x.view(-1).sin())) == ["reshape.default", "sin.default"]
