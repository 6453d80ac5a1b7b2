"""What a user may write about streams, and what it means, from every front end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgraft as graft
from torchgraft.errors import BadMarker, BadValue, OrderCycle, UnorderedUse
from torchgraft.plan import Launch, Plan, Wait
from torchgraft.stream import memory
from torchgraft.stream.prove import hazards

aten, air = torch.ops.aten, torch.ops.air


class Model(nn.Module):
    """mm and abs beside the main stream; add and sub read them on it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with graft.stream("side"):
            mm = torch.mm(x, x)
            absolute = torch.abs(mm)
        return torch.add(absolute, 1), torch.sub(x, mm)


def plain(x: Tensor) -> tuple[Tensor, Tensor]:
    mm = torch.mm(x, x)
    absolute = torch.abs(mm)
    add = torch.add(absolute, 1)
    sub = torch.sub(x, mm)
    return add, sub


def streams(plan: Plan) -> dict[str, str]:
    """Kernel by kernel, where it runs."""
    return {step.kernel: step.stream for step in plan.launches}


def before(plan: Plan, first: str, then: str) -> bool:
    """Whether the plan makes one kernel come after another: no clock lets them overlap."""
    launches = {step.kernel: step for step in plan.launches}
    clocks: dict[str, set[str]] = {}
    events: dict[str, set[str]] = {}
    for step in plan.steps:
        known = clocks.setdefault(step.stream, set())
        if isinstance(step, Launch):
            if step is launches[then]:
                return first in known
            known.add(step.kernel)
        elif isinstance(step, Wait):
            known |= events[step.event]
        elif hasattr(step, "event"):
            events[step.event] = set(known)
    raise AssertionError(then)


X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
SPLIT = {
    "aten.mm.default": "side",
    "aten.abs.default": "side",
    "aten.add.Tensor": "main",
    "aten.sub.Tensor": "main",
}


def exported(config: graft.Config) -> Any:
    return graft.compile(torch.export.export(Model(), (X,)), config=config)


def traced(config: graft.Config) -> Any:
    return graft.compile(torch.jit.trace(Model(), (X,)), (X,), config=config)


def module(config: graft.Config) -> Any:
    return graft.compile(Model(), (X,), config=config)


@pytest.mark.parametrize("front_end", [module, exported, traced])
def test_a_stream_in_model_code_holds_from_every_front_end(front_end: Callable[..., Any]) -> None:
    compiled = front_end(graft.Config(mode="eager", adversary=3))
    assert streams(compiled.plan) == SPLIT
    assert compiled.plan.hazards() == []
    torch.testing.assert_close(compiled(X), plain(X))


def test_a_stream_in_model_code_holds_in_torch_compile() -> None:
    f = torch.compile(Model(), backend="torchgraft", mode="eager")
    torch.testing.assert_close(f(X), plain(X))
    placed = {node.op: node.stream for node in graft.reports()[-1].nodes}
    assert placed == SPLIT


def test_regions_do_not_cross_streams() -> None:
    compiled = graft.compile(Model(), (X,), adversary=1)
    assert streams(compiled.plan) == {"region0": "side", "region1": "main"}
    torch.testing.assert_close(compiled(X), plain(X))


def test_an_inner_stream_wins_and_main_is_the_callers() -> None:
    def model(x: Tensor) -> Tensor:
        with graft.stream("a"):
            one = x.sin()
            with graft.stream("b"):
                two = one.cos()
            with graft.stream("main"):
                three = one.tan()
            four = two.exp()
        return three + four

    compiled = graft.compile(model, (X,), mode="eager", adversary=0)
    assert streams(compiled.plan) == {
        "aten.sin.default": "a",
        "aten.cos.default": "b",
        "aten.tan.default": "main",
        "aten.exp.default": "a",
        "aten.add.Tensor": "main",
    }
    torch.testing.assert_close(compiled(X), model(X))
    with pytest.raises(BadValue, match="the name of a stream"):
        graft.stream("")


# --- Passes ---


@graft.fx_pass(stage="pre", register=False)
def split(graph: graft.Graph) -> None:
    mm, absolute, sub = graph.one(aten.mm), graph.one(aten.abs), graph.one(aten.sub)
    graph.place(mm, absolute, stream="side")
    graph.order(absolute, then=sub)


@pytest.mark.parametrize("mode", ["eager", "default"])
def test_a_pass_places_and_orders(mode: str) -> None:
    compiled = graft.compile(plain, (X,), mode=mode, pre_passes=[split], adversary=5)
    assert compiled.plan.hazards() == []
    torch.testing.assert_close(compiled(X), plain(X))


def test_order_holds_where_no_data_asks_for_it() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.sin(), x.cos(), x.tan()

    @graft.fx_pass(stage="pre", register=False)
    def chain(graph: graft.Graph) -> None:
        sin, cos, tan = graph.one(aten.sin), graph.one(aten.cos), graph.one(aten.tan)
        graph.place(cos, stream="side")
        graph.order(tan, then=cos)  # against the order of the program
        graph.order(cos, then=[sin])

    compiled = graft.compile(model, (X,), mode="eager", pre_passes=[chain], adversary=2)
    assert before(compiled.plan, "aten.tan.default", "aten.cos.default")
    assert before(compiled.plan, "aten.cos.default", "aten.sin.default")
    torch.testing.assert_close(compiled(X), model(X))


def test_order_outlives_the_passes_that_replace_what_it_names() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin() * 1, x.cos() + x.cos()

    @graft.fx_pass(stage="pre", register=False)
    def late(graph: graft.Graph) -> None:
        first = graph.one(aten.mul)  # x * 1: the built-in passes let sin take its place
        one, two = graph.all(aten.cos)  # and make one of these two
        graph.place(one, two, graph.one(aten.add), stream="side")
        graph.order(first, then=[one, two])

    @graft.pattern(register=False)
    def cosine(x: Tensor) -> Tensor:
        return torch.cos(x)

    @cosine.replace
    def _(m: graft.Match) -> Tensor:
        return torch.sin(m.x + torch.pi / 2)

    def find(x: Tensor) -> tuple[Tensor, Tensor]:
        return model(x)

    config = graft.Config(mode="eager", pre_passes=[late], patterns=[cosine], adversary=4)
    compiled = graft.compile(find, (X,), config=config)
    steps = compiled.plan.launches
    side = [step for step in steps if step.stream == "side"]
    assert [step.kernel for step in side] == [
        "aten.add.Tensor",
        "aten.sin.default",
        "aten.add.Tensor",
    ]
    waits = [step for step in compiled.plan.steps if isinstance(step, Wait)]
    assert any(step.stream == "side" and step.event != "entry" for step in waits)
    torch.testing.assert_close(compiled(X), model(X), rtol=1e-4, atol=1e-5)


def test_a_circle_of_orders_is_an_error_with_its_nodes() -> None:
    @graft.fx_pass(stage="pre", register=False)
    def circle(graph: graft.Graph) -> None:
        graph.order(graph.one(aten.add), then=graph.one(aten.mm))

    with pytest.raises(OrderCycle) as caught:
        graft.compile(plain, (X,), mode="eager", pre_passes=[circle])
    assert "mm (aten.mm.default) at" in str(caught.value)
    assert "add (aten.add.Tensor) at" in str(caught.value)


def test_only_nodes_of_the_graph_are_placed_or_ordered() -> None:
    @graft.fx_pass(stage="pre", register=False)
    def wrong(graph: graft.Graph) -> None:
        graph.place(graph.inputs[0], stream="side")

    with pytest.raises(BadValue, match=r"graph\.place"):
        graft.compile(plain, (X,), mode="eager", pre_passes=[wrong])


@pytest.mark.parametrize("block", [lambda: graft.stream("side"), graft.fallback])
def test_a_graph_break_in_a_block_leaves_it_to_eager_code(block: Any) -> None:
    def model(x: Tensor) -> Tensor:
        with block():
            y = x.sin()
            torch._dynamo.graph_break()
            y = y.cos()
        return y + 1

    f = torch.compile(model, backend="torchgraft", mode="eager")
    for _ in range(2):
        torch.testing.assert_close(f(X), model(X))


# --- torch's own streams and events, as torch.compile hands them to a backend ---


def events(*, waits: bool) -> Callable[..., None]:
    """A pass that leaves what torch.compile leaves of `with torch.cuda.stream(s)` and an event."""

    def write(gm: torch.fx.GraphModule, example_inputs: Any, config: Any) -> None:
        import torch._dynamo.variables.streams
        from torch._functorch._aot_autograd import streams as aot

        graph = gm.graph
        mm, absolute, add, sub = (n for n in graph.nodes if n.op == "call_function")
        for node in (mm, absolute):
            node.meta["custom"] = {"stream": 1}
            node.meta.pop("stream", None)
        for node in (sub, add):
            node.meta["custom"] = {"stream": 0}
            node.meta.pop("stream", None)
        with graph.inserting_after(absolute):
            graph.call_function(torch.ops.streams.record_event.default, (7, 1))
        with graph.inserting_before(add if waits else sub):
            graph.call_function(torch.ops.streams.wait_event.default, (7, 0))
        if waits and hasattr(aot, "wrap_all_sync_nodes_with_control_deps"):
            aot.wrap_all_sync_nodes_with_control_deps(gm)  # from torch 2.12 on AOTAutograd does

    return write


def test_torch_streams_and_events_are_streams_and_order() -> None:
    compiled = graft.compile(plain, (X,), mode="eager", pre_passes=[events(waits=True)])
    assert streams(compiled.plan) == {
        "aten.mm.default": "stream1",
        "aten.abs.default": "stream1",
        "aten.add.Tensor": "main",
        "aten.sub.Tensor": "main",
    }
    torch.testing.assert_close(compiled(X), plain(X))


def test_an_event_that_leaves_a_hazard_is_an_error_with_both_lines() -> None:
    with pytest.raises(UnorderedUse) as caught:
        graft.compile(plain, (X,), mode="eager", pre_passes=[events(waits=False)])
    code = plain.__code__
    lines = [f"{code.co_filename}:{code.co_firstlineno + offset}" for offset in (2, 3)]
    assert str(caught.value).startswith(
        f"read after write of abs_1: nothing orders\n"
        f"  add (aten.add.Tensor) at {lines[1]} on stream 'main'\n"
        f"after\n"
        f"  abs_1 (aten.abs.default) at {lines[0]} on stream 'stream1'\n"
    )


def test_an_event_of_somebody_else_is_an_error() -> None:
    def foreign(gm: torch.fx.GraphModule, example_inputs: Any, config: Any) -> None:
        import torch._dynamo.variables.streams

        [mm] = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
        with gm.graph.inserting_before(mm):
            gm.graph.call_function(torch.ops.streams.wait_event.default, (3, 0))

    with pytest.raises(BadMarker, match="an event that this graph does not record"):
        graft.compile(plain, (X,), mode="eager", pre_passes=[foreign])


# --- Memory: writes, views, backward ---


class Counter(nn.Module):
    """Writes a buffer and an input, on different streams, that others read before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before = self.count.sin()
        with graft.stream("side"):
            self.count.add_(x[0])
            y = x.cos()
            x.mul_(2)
        view = x[1:]
        with graft.stream("other"):
            z = view.exp() + y[1:]
        return before + self.count, z


@pytest.mark.parametrize("mode", ["eager", "default"])
@pytest.mark.parametrize("freeze", [True, False])
def test_writes_and_views_across_streams(mode: str, freeze: bool) -> None:
    ours, theirs = Counter(), Counter()
    compiled = graft.compile(ours, (X.clone(),), mode=mode, freeze=freeze, adversary=11)
    for _ in range(3):
        one, two = X.clone(), X.clone()
        torch.testing.assert_close(compiled(one), theirs(two))
        torch.testing.assert_close(one, two)


def test_a_view_is_ready_before_another_stream_reads_it() -> None:
    def model(x: Tensor) -> Tensor:
        y = x.sin().t().reshape(-1)  # may be a view, may be a copy
        with graft.stream("side"):
            z = y.cos()
        return z + y

    for seed in range(8):
        compiled = graft.compile(model, (X,), mode="eager", adversary=seed)
        assert before(compiled.plan, "aten.reshape.default", "aten.cos.default")
        torch.testing.assert_close(compiled(X), model(X))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with graft.stream("side"):
            left = self.one(x).relu()
        return left * self.two(x).tanh()


class Marked(Branches):
    def forward(self, x: Tensor) -> Tensor:
        air.scope_enter(["_other"], ["1"])
        air.scope_enter(["_user_stream_label"], ["side"])
        left = self.one(x).relu()
        done = air.record()
        air.scope_exit()
        right = self.two(x).tanh()
        air.scope_exit()
        air.scope_enter(["_user_stream_label"], ["side"])
        left = left.exp()
        again = air.record()
        air.scope_exit()
        air.wait([done, again])
        return left * right.sin()


@pytest.mark.parametrize("mode", ["eager", "default"])
@pytest.mark.parametrize("kind", [Branches, Marked])
def test_backward_runs_on_the_streams_of_forward(kind: type[Branches], mode: str) -> None:
    torch.manual_seed(0)
    model = kind()
    config = graft.Config(mode=mode, adversary=2)
    f = torch.compile(model, backend=graft.backend(config))
    x = X.clone().requires_grad_()
    f(x).sum().backward()
    got = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    x.grad = None
    model(x).sum().backward()
    torch.testing.assert_close(got, [x.grad, *(p.grad for p in model.parameters())])
    forward, backward = graft.reports()[-2:]
    assert {"main", "side"} == {node.stream for node in forward.nodes}
    if kind is Marked:
        placed = {node.op: node.stream for node in forward.nodes}
        assert (placed["aten.exp.default"], placed["aten.sin.default"]) == ("side", "main")
    assert backward.name.endswith("backward")
    assert {"main", "side"} == {node.stream for node in backward.nodes}


@pytest.mark.parametrize("mode", ["eager", "default"])
def test_random_numbers_are_drawn_in_the_order_of_the_program(mode: str) -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        with graft.stream("a"):
            one = torch.rand_like(x)
        with graft.stream("b"):
            two = torch.rand_like(x)
        return one, two, torch.rand_like(x)

    compiled = graft.compile(model, (X,), mode=mode, adversary=5)
    torch.manual_seed(4)
    want = compiled(X)
    for _ in range(5):
        torch.manual_seed(4)
        torch.testing.assert_close(compiled(X), want)
    if mode == "eager":
        torch.manual_seed(4)
        torch.testing.assert_close(want, model(X))


def test_calls_with_effects_keep_their_order() -> None:
    said: list[str] = []
    library = torch.library.Library("streams_test", "FRAGMENT")
    library.define("say(str what, Tensor x) -> ()")
    library.impl("say", lambda what, x: said.append(what), "CompositeExplicitAutograd")
    torch.fx.node.has_side_effect(torch.ops.streams_test.say.default)

    def model(x: Tensor) -> Tensor:
        torch.ops.streams_test.say("one", x)
        with graft.stream("a"):
            torch.ops.streams_test.say("two", x)
            y = x.sin()
        with graft.stream("b"):
            torch.ops.streams_test.say("three", x)
        torch.ops.streams_test.say("four", x)
        return y

    compiled = graft.compile(model, (X,), mode="eager", adversary=6)
    for _ in range(5):
        said.clear()
        compiled(X)
        assert said == ["one", "two", "three", "four"]


def test_several_threads_and_several_programs_at_once() -> None:
    programs = [graft.compile(Model(), (X,), mode="eager", adversary=seed) for seed in range(3)]
    want = plain(X)
    errors: list[BaseException] = []

    def work(compiled: Any) -> None:
        try:
            for _ in range(20):
                torch.testing.assert_close(compiled(X), want)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(p,)) for p in programs for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)


def test_inference_mode_reaches_every_stream() -> None:
    compiled = graft.compile(Counter(), (X.clone(),), mode="eager", freeze=False)
    with torch.inference_mode():
        x = X.clone()
        result, _ = compiled(x)
    assert result.is_inference()


def test_memory_is_kept_within_what_was_granted() -> None:
    def model(x: Tensor) -> Tensor:
        sums = []
        for i in range(6):
            y = x * i  # made on main, read on the side: main forgets it once it knows of the read
            with graft.stream("side"):
                sums.append(y.sum())
        return torch.stack(sums)

    big = torch.randn(512, 512)
    free = graft.compile(model, (big,), mode="eager", stream_memory=float("inf"))
    tight = graft.compile(model, (big,), mode="eager", adversary=1)

    def peak(plan: Plan) -> int:
        muls = [s.outputs[0] for s in plan.launches if s.kernel == "aten.mul.Tensor"]
        return memory.peak(plan, {out: 1 for out in muls if out is not None})

    assert peak(free.plan) == 5
    assert peak(tight.plan) == 1
    assert any("to keep memory within 1.1 times" in note for note in tight.report.notes)
    assert hazards(tight.plan) == []
    torch.testing.assert_close(tight(big), model(big))
    torch.testing.assert_close(free(big), model(big))


def _in_a_branch(x: Tensor) -> Tensor:
    def yes(x: Tensor) -> Tensor:
        with graft.stream("side"):
            y = x @ x
        return y + x.cos()

    return torch.cond(x.sum() > 0, yes, lambda x: x - 1, (x,))


def _marked_in_a_branch(x: Tensor) -> Tensor:
    def yes(x: Tensor) -> Tensor:
        torch.ops.air.scope_enter(["_user_stream_label"], ["side"])
        y = x @ x
        torch.ops.air.scope_exit()
        return y + x.cos()

    return torch.cond(x.sum() > 0, yes, lambda x: x - 1, (x,))


@pytest.mark.parametrize("mode", ["eager", pytest.param("default", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", [_in_a_branch, _marked_in_a_branch])
def test_streams_in_branches(model: Any, mode: str) -> None:
    x = torch.eye(4)
    compiled = graft.compile(model, (x,), mode=mode)
    streams = {node.node: node.stream for node in compiled.report.nodes}
    assert streams["true_graph_0/mm"] == "side"
    assert {stream for name, stream in streams.items() if not name.endswith("/mm")} == {"main"}
    for given in (x, -x):
        torch.testing.assert_close(compiled(given), model(given))


def test_a_marker_in_a_branch_without_meaning_is_an_error() -> None:
    def open_scope(x: Tensor) -> Tensor:
        def yes(x: Tensor) -> Tensor:
            torch.ops.air.scope_enter(["_user_stream_label"], ["side"])
            return x @ x

        return torch.cond(x.sum() > 0, yes, lambda x: x - 1, (x,))

    with pytest.raises(BadMarker, match=r"test_semantics.py:\d+: the scope is never"):
        graft.compile(open_scope, (torch.eye(4),), mode="eager")
