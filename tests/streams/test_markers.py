"""The marker operators `torch.ops.air.*`: what they mean, and what is said where it is nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_semantics import SPLIT, X, before, plain, streams
from torch import Tensor, nn

import torchgraft as graft
from torchgraft.errors import BadMarker, BrokenGraph

aten, air = torch.ops.aten, torch.ops.air


def marked(body: Callable[[Tensor], Any]) -> Any:
    return graft.compile(body, (X,), mode="eager", adversary=7)


def test_markers_are_completed_and_the_repair_names_both_lines() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        air.scope_enter(["_user_stream_label"], ["stream_1"])
        mm = torch.mm(x, x)
        absolute = torch.abs(mm)
        done = air.record()
        air.scope_exit()
        add = torch.add(absolute, 1)
        air.wait([done])
        sub = torch.sub(x, mm)
        return add, sub

    compiled = marked(model)
    torch.testing.assert_close(compiled(X), plain(X))
    assert streams(compiled.plan)["aten.abs.default"] == "stream_1"
    assert before(compiled.plan, "aten.abs.default", "aten.sub.Tensor")
    [note] = [n for n in compiled.report.notes if n.startswith("a wait was added")]
    code = model.__code__
    lines = [f"{code.co_filename}:{code.co_firstlineno + offset}" for offset in (3, 6)]
    assert note == (
        f"a wait was added, read after write of abs_1: add (aten.add.Tensor) at {lines[1]} on "
        f"stream 'main', after abs_1 (aten.abs.default) at {lines[0]} on stream 'stream_1'"
    )


def test_markers_written_by_a_pass_do_the_same() -> None:
    def naive(gm: torch.fx.GraphModule, example_inputs: Any, config: Any) -> None:
        graph = gm.graph
        for node in list(graph.nodes):
            if node.target is aten.mm.default:
                with graph.inserting_before(node):
                    graph.call_function(air.scope_enter.default, (["_user_stream_label"], ["s"]))
            if node.target is aten.abs.default:
                with graph.inserting_after(node):
                    done = graph.call_function(air.record.default)
                with graph.inserting_after(done):
                    graph.call_function(air.scope_exit.default)
            if node.target is aten.sub.Tensor:
                with graph.inserting_before(node):
                    graph.call_function(air.wait.default, ([done],))

    for passes in ({"pre_passes": [naive]}, {"post_passes": [naive]}):
        config = graft.Config(mode="eager", adversary=1, **passes)
        f = torch.compile(plain, backend=graft.backend(config))
        torch.testing.assert_close(f(X), plain(X))
        report = graft.reports()[-1]
        assert {n.op for n in report.nodes if n.stream == "s"} == {
            "aten.mm.default",
            "aten.abs.default",
        }
        assert any(n.startswith("a wait was added") for n in report.notes)
        torch._dynamo.reset()


def test_scopes_nest_and_a_label_may_be_any_key() -> None:
    def model(x: Tensor) -> Tensor:
        air.scope_enter(["_other", "_user_stream_label"], ["1", "outer"])
        one = x.sin()
        air.scope_enter(["_user_stream_label"], ["inner"])
        two = one.cos()
        air.scope_exit()
        air.scope_enter(["_op_aicore_num"], ["4"])
        three = two.tan()
        air.scope_exit()
        air.scope_exit()
        return three.exp()

    compiled = marked(model)
    assert streams(compiled.plan) == {
        "aten.sin.default": "outer",
        "aten.cos.default": "inner",
        "aten.tan.default": "outer",
        "aten.exp.default": "main",
    }
    tan = compiled.graph.one(aten.tan)
    assert tan.meta["scope"] == {
        "_other": "1",
        "_user_stream_label": "outer",
        "_op_aicore_num": "4",
    }
    torch.testing.assert_close(compiled(X), model(X))


def test_waits_on_tensors_and_results_of_wait_tensor() -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        air.scope_enter(["_user_stream_label"], ["side"])
        one = x.sin()
        air.scope_exit()
        air.wait([one])
        two = x.cos()
        three = x.tan()
        air.wait_tensor(three, two)  # the result is dropped: later uses of `three` wait anyway
        return one, two, three.exp()

    compiled = marked(model)
    assert before(compiled.plan, "aten.sin.default", "aten.cos.default")
    assert before(compiled.plan, "aten.cos.default", "aten.exp.default")
    assert not [n for n in compiled.graph.nodes if "air" in str(n.target)]
    torch.testing.assert_close(compiled(X), model(X))


def test_a_record_is_everything_its_stream_has_done() -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        air.scope_enter(["_user_stream_label"], ["side"])
        one, two = x.sin(), x.cos()
        done = air.record()
        three = x.tan()
        air.scope_exit()
        air.wait([done])
        four = x.exp()
        five = x.neg()
        return one, two, three, four, five

    plan = marked(model).plan
    for then in ("aten.exp.default", "aten.neg.default"):
        assert before(plan, "aten.sin.default", then)
        assert before(plan, "aten.cos.default", then)
    assert not before(plan, "aten.tan.default", "aten.exp.default")


def test_markers_that_do_nothing_are_said() -> None:
    def model(x: Tensor) -> Tensor:
        air.scope_enter(["_user_stream_label"], ["side"])
        one = x.sin()
        done = air.record()
        air.scope_exit()
        unused = air.record()  # noqa: F841
        two = one.cos()
        air.wait([done])
        return two

    def with_record(gm: torch.fx.GraphModule, example_inputs: Any, config: Any) -> None:
        [cos] = gm.graph.find_nodes(op="call_function", target=aten.cos.default)
        with gm.graph.inserting_before(cos):
            gm.graph.call_function(air.record.default)

    compiled = graft.compile(model, (X,), mode="eager", pre_passes=[with_record])
    notes = "\n".join(compiled.report.notes)
    assert "is never waited for" in notes
    assert "nothing follows wait" in notes
    assert "on stream 'main'; the end of the program waits for every stream anyway" in notes


def of_an_input(x: Tensor) -> Tensor:
    air.wait([x])
    return x.sin()


def of_nothing(x: Tensor) -> Tensor:
    air.scope_enter(["_user_stream_label"], ["side"])
    done = air.record()
    air.scope_exit()
    air.wait([done])
    return x.sin()


def behind_an_input(x: Tensor) -> Tensor:
    return air.wait_tensor(x.sin(), x).cos()


def returned(x: Tensor) -> Tensor:
    return air.wait_tensor(x.sin(), x.cos())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (of_an_input, r"air.wait.default\) at .* has nothing to wait for"),
        (of_nothing, r"air.wait.default\) at .* has nothing to wait for"),
        (behind_an_input, r"air.wait_tensor.default\) at .* has nothing to wait for"),
        (returned, "nobody reads what wait_tensor .* gives but the caller"),
    ],
)
def test_a_wait_that_means_nothing_is_said_with_its_line(model: Any, words: str) -> None:
    compiled = marked(model)
    torch.testing.assert_close(compiled(X), model(X))
    [note] = compiled.report.notes
    assert re.search(words, note)
    assert "test_markers.py:" in note


def test_a_pass_may_name_arguments_and_leave_the_overload_open() -> None:
    def write(gm: torch.fx.GraphModule, example_inputs: Any, config: Any) -> None:
        graph, keys = gm.graph, ["_user_stream_label"]
        mm, absolute, add, sub = (n for n in graph.nodes if n.op == "call_function")
        with graph.inserting_before(mm):
            graph.call_function(air.scope_enter, (), {"keys": keys, "values": ["s"]})
        with graph.inserting_after(absolute):
            done = graph.call_function(air.record)
        with graph.inserting_after(done):
            graph.call_function(air.scope_exit)
        with graph.inserting_before(sub):
            graph.call_function(air.wait, (), {"x": [done]})
            given = {"self": sub.args[1], "dependency": add}
            late = graph.call_function(air.wait_tensor.default, (), given)
        sub.args = (sub.args[0], late)

    compiled = graft.compile(plain, (X,), mode="eager", pre_passes=[write], adversary=3)
    assert streams(compiled.plan)["aten.abs.default"] == "s"
    assert before(compiled.plan, "aten.abs.default", "aten.sub.Tensor")
    assert before(compiled.plan, "aten.add.Tensor", "aten.sub.Tensor")
    torch.testing.assert_close(compiled(X), plain(X))


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        torch.ops.air.scope_enter(["_user_stream_label"], ["side"])
        mm = torch.mm(x, x)
        absolute = torch.abs(mm)
        torch.ops.air.scope_exit()
        return torch.add(absolute, 1), torch.sub(x, mm)


class Open(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.ops.air.scope_enter(["_user_stream_label"], ["side"])
        return x.sin()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_markers_in_scripted_code() -> None:
    """TorchScript must not take them for dead."""
    compiled = graft.compile(torch.jit.script(Scripted()), (X,), mode="eager", adversary=1)
    assert streams(compiled.plan) == SPLIT
    torch.testing.assert_close(compiled(X), plain(X))
    with pytest.raises(BadMarker, match="the scope is never closed"):
        graft.compile(torch.jit.script(Open()), (X,), mode="eager")


def enter(x: Tensor) -> Tensor:
    air.scope_enter(["_user_stream_label"], ["side"])
    return x.sin()


def twice(x: Tensor) -> Tensor:
    air.scope_enter(["_user_stream_label"] * 2, ["one", "two"])
    y = x.sin()
    air.scope_exit()
    return y


def unnamed(x: Tensor) -> Tensor:
    air.scope_enter(["_user_stream_label"], [""])
    y = x.sin()
    air.scope_exit()
    return y


def leave(x: Tensor) -> Tensor:
    y = x.sin()
    air.scope_exit()
    return y


def uneven(x: Tensor) -> Tensor:
    air.scope_enter(["_user_stream_label", "other"], ["side"])
    y = x.sin()
    air.scope_exit()
    return y


def nothing(x: Tensor) -> Tensor:
    air.wait([])
    return x.sin()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (enter, "the scope is never closed; call torch.ops.air.scope_exit"),
        (leave, "there is no open scope; call torch.ops.air.scope_enter before it"),
        (uneven, "2 keys for 1 values"),
        (twice, "a key stands twice among"),
        (unnamed, "_user_stream_label is empty; give the stream a name"),
        (nothing, "it waits for nothing"),
    ],
)
def test_a_marker_without_meaning_is_an_error_with_its_line(model: Any, words: str) -> None:
    with pytest.raises(BadMarker, match=words) as caught:
        graft.compile(model, (X,), mode="eager")
    assert "test_markers.py:" in str(caught.value)


def test_a_wait_before_its_record_names_the_pass() -> None:
    def early(gm: torch.fx.GraphModule, example_inputs: Any, config: Any) -> None:
        [mm] = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
        with gm.graph.inserting_after(mm):
            done = gm.graph.call_function(air.record.default)
        with gm.graph.inserting_before(mm):
            gm.graph.call_function(air.wait.default, ([done],))

    with pytest.raises(BrokenGraph, match=r"early.*'record_default', which is later in the graph"):
        graft.compile(plain, (X,), mode="eager", pre_passes=[early])
