"""Collectives, as far as one process can tell."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import torchgraft as graft
from torchgraft.comm import wait
from torchgraft.comm.fit import Entry, difference
from torchgraft.comm.turn import Turn, turn
from torchgraft.errors import BadPlan, CannotCapture, NoGroup, WrongGroup
from torchgraft.inspect.timeline import predict
from torchgraft.plan import Collective, Plan
from torchgraft.stream.order import in_turn

X = torch.ones(4)


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def summed(x: Tensor) -> Tensor:
    return functional.all_reduce(x + 1, "sum", dist.group.WORLD).cos()


# --- What fits together ---


def reduce(step: int, kind: str = "f32[4]", how: str = "'sum'") -> Entry:
    return Entry(step, "all_reduce", kind, [how])


def send(step: int, peer: int, kind: str = "f32[4]") -> Entry:
    return Entry(step, "send", kind, [str(peer), "0"])


def recv(step: int, peer: int, kind: str = "f32[4]") -> Entry:
    return Entry(step, "recv", kind, [str(peer), "0"])


def exchange(takes: list[int], gives: list[int]) -> Entry:
    return Entry(3, "all_to_all_single", f"f32[{sum(gives)}, 2]", [str(takes), str(gives)])


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([[reduce(1), reduce(4)]] * 3, None),
        ([[reduce(1)], [reduce(2)]], None),  # the same at another step: a pad before it, say
        ([[reduce(1)], [reduce(1)], [reduce(1, "f32[5]")]], (1, 2, "all_reduce(f32[5], 'sum')")),
        ([[reduce(1), reduce(4)], [reduce(1)]], (4, 1, "nothing more")),
        ([[reduce(1)], [reduce(1), reduce(7)]], (7, 1, "all_reduce(f32[4], 'sum')")),
        ([[reduce(1)], [reduce(1, how="'max'")]], (1, 1, "all_reduce(f32[4], 'max')")),
        ([[send(1, 1)], [recv(1, 0)]], None),
        ([[send(1, 1)], []], (1, 0, "send(f32[4], 1, 0)")),
        ([[send(1, 1), recv(2, 1)], [recv(1, 0), send(2, 0)]], None),
        ([[send(1, 1), recv(2, 1)], [send(1, 0), recv(2, 0)]], (1, 0, "send(f32[4], 1, 0) first")),
        ([[recv(1, 1), send(2, 1)], [recv(1, 0), send(2, 0)]], (1, 0, "recv(f32[4], 1, 0) first")),
        ([[send(1, 1), reduce(2)], [recv(3, 0), reduce(4)]], None),
        (
            [[send(5, 1), reduce(6)], [reduce(1), recv(2, 0)]],
            (1, 1, "all_reduce(f32[4], 'sum') first"),
        ),
        ([[send(1, 1), reduce(2)], [reduce(7), recv(8, 0)]], (1, 0, "send(f32[4], 1, 0) first")),
        ([[send(1, 1)], [recv(1, 0), send(2, 2)], [recv(1, 1)]], None),
        (
            [[send(1, 1), recv(2, 2)], [send(1, 2), recv(2, 0)], [send(1, 0), recv(2, 1)]],
            (1, 0, "send(f32[4], 1, 0) first"),
        ),
        ([[], [recv(2, 0)]], (2, 1, "recv(f32[4], 0, 0)")),
        ([[send(1, 1)], [recv(2, 0, "f64[4]")]], (2, 1, "recv(f64[4], 0, 0)")),
        ([[exchange([1, 2], [1, 3])], [exchange([3, 1], [2, 1])]], None),
        (
            [[exchange([1, 2], [1, 3])], [exchange([2, 1], [2, 1])]],
            (3, 1, "all_to_all_single(f32[3, 2], [2, 1], [2, 1]), which takes 2 from rank 0"),
        ),
    ],
)
def test_what_ranks_do_together(
    ranks: list[list[Entry]], found: tuple[int, int, str] | None
) -> None:
    got = difference(ranks)
    assert (None if got is None else got[:3]) == found


# --- Plans ---

TEXT = """\
def plan(b0):
    b1 = launch('main', 'work', b0)
    record('main', 'after0')
    wait('comm:tp', 'after0')
    b2 = collective('comm:tp', 'sum', b1, 'tp', kind='all_reduce', type='f32[4]', nbytes=16, \
line='a.py:3')
    record('comm:tp', 'after1')
    b3 = launch('main', 'work', b1)
    wait('main', 'after1')
    b4 = launch('main', 'join', b2, b3)
    return (b4,)"""


def test_a_collective_prints_and_parses() -> None:
    plan = Plan.parse(TEXT)
    assert str(plan) == TEXT
    [step] = plan.collectives
    assert isinstance(step, Collective)
    assert (step.kind, step.group, step.stream, step.nbytes) == ("all_reduce", "tp", "comm:tp", 16)
    assert not plan.hazards()


def test_a_collective_without_a_group_is_no_step() -> None:
    with pytest.raises(BadPlan, match="names its group"):
        Plan.parse("def plan(b0):\n    b1 = collective('comm:tp', 'sum', b0)\n    return (b1,)")


def test_a_plan_that_overlaps_nothing_needs_no_other_stream() -> None:
    plan = Plan.parse(TEXT)
    assert in_turn(plan) is None  # the second launch of main runs beside the collective
    chain = Plan.parse(
        TEXT.replace("    b3 = launch('main', 'work', b1)\n", "").replace("b3", "b1")
    )
    alone = in_turn(chain)
    assert alone is not None
    assert alone.streams == ["main"]
    assert [step.kernel for step in alone.launches] == ["work", "sum", "join"]


@pytest.mark.parametrize(("talk", "hidden"), [(1.0, 1.0), (4.0, 0.5), (2.0, 1.0)])
def test_how_much_of_a_collective_is_hidden(talk: float, hidden: float) -> None:
    plan = Plan.parse(TEXT)
    assert predict(plan, [1.0, talk, 2.0, 1.0], {}).hidden == hidden


def test_nothing_is_hidden_where_nobody_talks() -> None:
    plan = Plan.parse("def plan(b0):\n    b1 = launch('main', 'work', b0)\n    return (b1,)")
    assert predict(plan, [1.0], {}).hidden is None


# --- One process ---


def test_a_program_in_a_world_of_one(alone: None) -> None:
    compiled = graft.compile(summed, (X,), mode="eager")
    torch.testing.assert_close(compiled(X), summed(X))
    [step] = compiled.plan.collectives
    assert step.line == f"{__file__}:{summed.__code__.co_firstlineno + 1}"


def test_a_collective_is_not_computed_at_compile_time(alone: None) -> None:
    weight = torch.nn.Parameter(torch.ones(4))

    class Held(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return x + functional.all_reduce(self.weight, "sum", dist.group.WORLD)

    compiled = graft.compile(Held(), (X,), mode="eager")
    assert len(compiled.plan.collectives) == 1
    torch.testing.assert_close(compiled(X), X + 1)


def test_two_groups_of_one_name_are_told_apart(alone: None) -> None:
    one = dist.new_group([0], group_desc="pair")

    def fn(x: Tensor) -> Tensor:
        return functional.all_reduce(x, "sum", one)

    compiled = graft.compile(fn, (X,), mode="eager")
    assert [step.group for step in compiled.plan.collectives] == ["pair"]
    torch.testing.assert_close(compiled(X), X)


def test_a_file_names_its_groups(alone: None, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "summed.graft"
    compiled = graft.compile(summed, (X,), mode="eager")
    compiled.save(path)
    loaded = graft.load(path)
    assert loaded.plan == compiled.plan
    torch.testing.assert_close(loaded(X), summed(X))


# --- What does not fit ---


def test_a_program_of_a_file_outside_a_process_group(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "summed.graft"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        graft.compile(summed, (X,), mode="eager").save(path)
    finally:
        dist.destroy_process_group()
    with pytest.raises(NoGroup) as caught:
        graft.load(path)(X)
    line = f"{__file__}:{summed.__code__.co_firstlineno + 1}"
    assert str(caught.value) == (
        f"all_reduce of f32[4] at {line}: torch.distributed is not initialised in this process.\n"
        "Start it with torchrun and call torch.distributed.init_process_group() first."
    )


def test_a_collective_outside_a_process_group_names_its_line() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x + 1
        dist.all_reduce(y)
        return y

    with pytest.raises(CannotCapture) as caught:
        graft.compile(fn, (X,), mode="eager")
    assert caught.value.line == f"{__file__}:{fn.__code__.co_firstlineno + 2}"
    assert "call torch.distributed.init_process_group() first" in str(caught.value)


def test_an_unknown_group(alone: None) -> None:
    def fn(x: Tensor) -> Tensor:
        return functional.all_reduce(x, "sum", "wolrd")  # type: ignore[arg-type]

    with pytest.raises(NoGroup) as caught:
        graft.compile(fn, (X,), mode="eager")(X)
    assert str(caught.value) == (
        f"all_reduce of f32[4] at {__file__}:{fn.__code__.co_firstlineno + 1}: this process has no "
        "group 'wolrd'. Did you mean 'world'? Known: 'world'.\n"
        "Make it first: init_device_mesh(..., mesh_dim_names=('wolrd',)), or "
        "new_group(ranks, group_desc='wolrd')."
    )


def test_a_group_of_another_size(alone: None) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.ops._c10d_functional.all_gather_into_tensor(x, 4, "0").sin()

    with pytest.raises(WrongGroup) as caught:
        graft.compile(fn, (X,), mode="eager")(X)
    assert str(caught.value) == (
        f"all_gather_into_tensor of f32[4] at {__file__}:{fn.__code__.co_firstlineno + 1}: it was "
        "compiled for 4 ranks, group 'world' has 1.\n"
        "Start it with groups of that size, or compile it again for these."
    )


def test_a_wait_ends() -> None:
    store = dist.HashStore()
    store.set("there", "1")
    assert wait.missing(store, ["there"], 60) == []
    assert wait.missing(store, ["there", "not"], 0.01) == ["not"]
    assert wait.polled(store, "there", 60)
    assert not wait.polled(store, "not", 0.01)


def test_a_turn_is_taken_once() -> None:
    store = dist.HashStore()
    first, second, other = (Turn(store, 0.01, name) for name in ("a", "a", "b"))
    assert (first.first, second.first, other.first) == (True, False, True)
    assert second.result() is None  # the first one did not get through in time
    first.done("made")
    assert second.result() == "made"
    assert turn("anything") is None  # this process is alone


def test_results_that_nobody_reads_yet_are_bounded(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathers of weights, as of a sharded model, do not all start at once."""
    monkeypatch.setattr("torchgraft.comm.overlap.AHEAD", 64)

    def fn(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = x @ functional.all_reduce(weight, "sum", dist.group.WORLD)
        return x

    args = tuple(torch.randn(4, 4) for _ in range(5))
    compiled = graft.compile(fn, args, mode="eager", bucket_bytes=0)
    torch.testing.assert_close(compiled(*args), fn(*args))
    kinds = [step.kernel.split(".")[1] for step in compiled.plan.launches]
    assert kinds == ["all_reduce", "mm"] * 4, kinds
    assert not compiled.plan.hazards()
