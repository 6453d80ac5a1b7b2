"""Plans: overlap, order, agreement between the ranks, programs in files. Two ranks."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import random

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import check, main, raised
from models import MLP, split_mlp
from torch import Tensor, nn
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.device_mesh import init_device_mesh

import torchgraft as graft
from torchgraft.errors import CollectiveFailed, NoGroup, RanksDiffer
from torchgraft.native import driver
from torchgraft.plan import Collective, Launch, Plan
from torchgraft.program import Program, link

OUT = pathlib.Path(os.environ["OUT"])


def reduce(x: Tensor) -> Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD)


class Two(nn.Module):
    """Two sums, each with work beside it that does not need it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        first = reduce(x @ self.a)
        beside = (x @ self.b).sin()
        second = reduce(first.cos() @ self.a)
        return first + beside + second


def names(plan: Plan) -> list[str]:
    return [step.kernel.split(".")[1] for step in plan.launches]


@check
def overlap_in_the_plan() -> None:
    """Work that needs no result of a collective lies between its start and the wait for it."""
    model, x = Two(), torch.randn(4, 8)
    compiled = graft.compile(model, (x,), mode="eager")
    torch.testing.assert_close(compiled(x), model(x))
    plan = compiled.plan
    order = names(plan)
    start = order.index("all_reduce")
    assert order[:start] == ["mm"], order  # started as soon as its input is there
    assert order[start + 1 : start + 3] == ["mm", "sin"], order  # what goes on beside it
    assert order[start + 3] == "cos", order  # its first use, before which main waits
    first = plan.collectives[0]
    assert (first.group, first.stream, first.kind) == ("world", "comm:world", "all_reduce")
    assert (first.type, first.nbytes) == ("f32[4, 8]", 128)
    assert first.line is not None
    assert "agree.py" in first.line
    assert not plan.hazards()
    assert Plan.parse(str(plan)) == plan
    without = [s for s in plan.steps if not (type(s).__name__ == "Wait" and s.stream == "main")]
    assert dataclasses.replace(plan, steps=tuple(without)).hazards()  # the proof sees them


@check
def overlap_of_large_tensors() -> None:
    """Nobody waits for a collective only to free the memory that it reads."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        total = reduce(x + 1)
        return total[:8, :8] + (w @ w) @ w

    args = (torch.ones(2048, 1024), torch.ones(8, 8))
    compiled = graft.compile(fn, args, mode="eager")
    text = str(compiled.plan)
    assert text.rindex("aten.mm") < text.index("wait('main'"), text
    torch.testing.assert_close(compiled(*args), fn(*args))


@check
def overlap_in_generated_code() -> None:
    model, x = Two(), torch.randn(4, 8)
    compiled = graft.compile(model, (x,))
    torch.testing.assert_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)
    kernels = [step.kernel for step in compiled.plan.launches]
    start = kernels.index("_c10d_functional.all_reduce.default")
    assert [k.rstrip("0123456789") for k in kernels[:3]] == [
        "region",
        "_c10d_functional.all_reduce.default",
        "region",
    ], kernels
    text = str(compiled.plan)
    beside = text.index(f"'{kernels[start + 1]}'")
    assert beside < text.index("wait('main'"), text


@check
def overlap_is_measured() -> None:
    model, x = Two(), torch.randn(4, 8)
    compiled = graft.compile(model, (x,), mode="eager")
    profile = compiled.profile((x,), repeat=2)
    assert profile.hidden is not None
    assert 0 <= profile.hidden <= 1
    assert "hidden by others" in str(profile)
    spans = [span for span in profile.timeline.spans if span.collective]
    assert len(spans) == 2
    assert spans[0].end <= spans[1].start  # one group, one after the other


@check
def order_with_an_adversary() -> None:
    """Delays on every stream change nothing."""
    model, x = Two(), torch.randn(4, 8)
    expected = model(x)
    for seed in range(3):
        compiled = graft.compile(model, (x,), mode="eager", adversary=seed)
        torch.testing.assert_close(compiled(x), expected)


@check
def small_ones_are_merged() -> None:
    """Neighbours of one kind are one collective, unless somebody would wait for it."""
    torch.manual_seed(dist.get_rank())
    args = (torch.randn(4), torch.randn(2, 3), torch.randn(2, 3))

    def fn(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        x, y = reduce(a * 2), reduce(b.sin())
        z = functional.all_gather_tensor(c, 0, dist.group.WORLD)
        w = functional.all_gather_tensor(c * 2, 0, dist.group.WORLD)
        return x / 2, y + 1, x.sum() + y.sum(), z, w.cos()

    expected = fn(*args)
    for bytes_, kinds in ((64 << 10, ["all_reduce", "all_gather_into_tensor"]), (16, None)):
        compiled = graft.compile(fn, args, mode="eager", bucket_bytes=bytes_)
        for got, wanted in zip(compiled(*args), expected, strict=True):
            torch.testing.assert_close(got, wanted)
        found = [step.kind for step in compiled.plan.collectives]
        assert found == kinds if kinds else len(found) == 4

    def held_up(a: Tensor, b: Tensor) -> Tensor:
        """The product needs the first sum and not the second."""
        x = reduce(a)
        return x @ x + reduce(b)

    square = (torch.randn(3, 3), torch.randn(3, 3))
    compiled = graft.compile(held_up, square, mode="eager")
    assert len(compiled.plan.collectives) == 2
    torch.testing.assert_close(compiled(*square), held_up(*square))


@check
def ranks_with_different_graphs() -> None:
    """Both ranks raise, and both say the same."""
    rank = dist.get_rank()

    def fn(x: Tensor) -> Tensor:
        y = reduce(x + 1)
        if rank == 1:
            return functional.all_gather_tensor(y, 0, dist.group.WORLD).sum()
        return reduce(y * 2).sum()

    run = torch.compile(fn, backend="torchgraft", mode="eager")
    error = raised(lambda: run(torch.ones(4)), RanksDiffer)
    assert error.rank == 1
    assert error.has.startswith("all_gather_into_tensor(f32[4]")
    assert error.other.startswith("rank 0: all_reduce(f32[4]")
    assert error.step > 0


@check
def ranks_with_different_shapes() -> None:
    rank = dist.get_rank()
    run = torch.compile(lambda x: reduce(x + 1), backend="torchgraft", mode="eager")
    error = raised(lambda: run(torch.ones(4 + rank)), RanksDiffer)
    assert "f32[5]" in error.has
    assert "f32[4]" in error.other


@check
def a_rank_with_one_collective_less() -> None:
    rank = dist.get_rank()

    def fn(x: Tensor) -> Tensor:
        return reduce(reduce(x)) if rank == 0 else reduce(x)

    run = torch.compile(fn, backend="torchgraft", mode="eager")
    error = raised(lambda: run(torch.ones(4)), RanksDiffer)
    assert error.has == "nothing more"


@check
def both_send_first() -> None:
    """Everything is there and would never happen: each rank waits for the other to receive."""
    rank = dist.get_rank()

    def fn(x: Tensor) -> Tensor:
        got = torch.empty_like(x)
        dist.send(x * 2, 1 - rank)
        dist.recv(got, 1 - rank)
        return got

    run = torch.compile(fn, backend="torchgraft", mode="eager", fullgraph=True)
    error = raised(lambda: run(torch.ones(4)), RanksDiffer)
    assert error.has.endswith("first"), error
    assert error.other.endswith("first"), error


@check
def dynamic_sizes() -> None:
    """Sizes that are known at the call are compared there."""
    rank = dist.get_rank()
    run = torch.compile(lambda x: reduce(x + 1), backend="torchgraft", mode="eager", dynamic=True)
    for size in (4, 6, 4):
        torch.testing.assert_close(run(torch.ones(size)), torch.full((size,), 4.0))
    error = raised(lambda: run(torch.ones(4 + rank)), RanksDiffer)
    assert "f32[5]" in error.has
    torch.testing.assert_close(run(torch.ones(3)), torch.full((3,), 4.0))  # and it goes on


@check
def one_rank_compiles_again() -> None:
    """A rank that meets another shape of its own is compiled again alone; nobody waits for it."""
    rank = dist.get_rank()
    programs: list[Program] = []
    backend = graft.backend(graft.Config(mode="eager"), on_program=programs.append)

    def fn(x: Tensor) -> Tensor:
        return reduce(x.sum(0)) * 2

    run = torch.compile(fn, backend=backend, dynamic=False)
    for rows in ((4, 4), (4, 3), (2, 3)):
        expected = torch.full((5,), 2.0 * sum(rows))
        torch.testing.assert_close(run(torch.ones(rows[rank], 5)), expected)
    assert len(programs) == 2


def _mutated(plan: Plan, rng: random.Random) -> Plan:
    """One change to what a rank does together with others, or to the order that it needs."""
    steps = list(plan.steps)
    at = rng.choice([i for i, step in enumerate(steps) if isinstance(step, Collective)])
    step = steps[at]
    assert isinstance(step, Collective)
    kind = rng.choice(("kind", "reduction", "type", "dropped", "doubled", "swapped", "wait"))
    if kind == "kind":
        steps[at] = dataclasses.replace(step, kind="broadcast")
    elif kind == "reduction":
        steps[at] = dataclasses.replace(step, args=(step.args[0], "max", step.args[-1]))
    elif kind == "type":
        steps[at] = dataclasses.replace(step, type=rng.choice(("f32[8, 4]", "f64[4, 8]")))
    elif kind == "dropped":
        steps[at] = Launch("aten.neg.default", step.args[:1], (), step.outputs, stream=step.stream)
    elif kind == "doubled":
        made = graft.plan.Buffer(10_000)
        steps.insert(at, dataclasses.replace(step, outputs=(made,)))
    elif kind == "swapped":
        others = [i for i, s in enumerate(steps) if isinstance(s, Collective) and i != at]
        other = steps[others[0]]
        assert isinstance(other, Collective)
        steps[at] = dataclasses.replace(step, type=other.type, args=(step.args[0], *other.args[1:]))
    else:
        waits = [i for i, s in enumerate(steps) if type(s).__name__ == "Wait"]
        del steps[rng.choice(waits)]
    return dataclasses.replace(plan, steps=tuple(steps))


@check
def mutations_of_one_rank() -> None:
    """Eight random changes to the plan of rank 1 are all found, on both ranks."""

    def fn(x: Tensor) -> Tensor:
        y = reduce(x + 1)
        z = functional.all_reduce((y[:2] * 2).contiguous(), "max", dist.group.WORLD)
        return y.sum() + z.sum()

    programs: list[Program] = []
    backend = graft.backend(graft.Config(mode="eager"), on_program=programs.append)
    x = torch.randn(4, 8)
    torch.compile(fn, backend=backend)(x)
    [program] = programs
    kernels = {**program.linker.kernels, "aten.neg.default": graft.run.host.Kernel(torch.neg)}
    rng, seen = random.Random(0), set[str]()
    for number in range(8):
        plan = program.plan
        if dist.get_rank() == 1:
            while plan == program.plan or str(plan) in seen:
                plan = _mutated(program.plan, rng)
            seen.add(str(plan))
        run = lambda plan=plan: link(plan, kernels, program.linker.constants, "cpu")([x])  # noqa: E731
        error = raised(run)
        print(f"mutation {number}: {type(error).__name__}", flush=True)
    run = link(program.plan, program.linker.kernels, program.linker.constants, "cpu")
    torch.testing.assert_close(run([x])[0], fn(x))  # and the group is as good as before


@check
def one_file_serves_every_rank() -> None:
    """Rank 0 saves; every rank loads that file and gives it the weights that it has."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    whole = MLP()
    split, x = split_mlp(whole, mesh), torch.randn(4, 8)
    compiled = graft.compile(split, (x,), mode="eager")
    torch.testing.assert_close(compiled(x), whole(x))
    path = OUT / "mlp.graft"
    if rank == 0:
        compiled.save(path)
    dist.barrier()
    loaded = graft.load(path, weights=split.state_dict())
    torch.testing.assert_close(loaded(x), whole(x))
    assert str(loaded.plan) == str(compiled.plan)
    assert loaded.plan.collectives


@check
def a_file_runs_in_cpp() -> None:
    """The loader of C++: the plan's group is one that the program has registered by that name."""
    torch.ops.load_library(driver.build("runtime").lib / "libtorchgraft.so")
    model, x = Two(), torch.randn(4, 8) + dist.get_rank()
    graft.compile(model, (x,), mode="eager").save(path := OUT / f"two{dist.get_rank()}.graft")
    engine = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    error = raised(lambda: torch.ops.torchgraft.run_engine([x], engine), RuntimeError)
    assert "the process group registered under the name world" in str(error), error
    _register_process_group("world", dist.group.WORLD)
    for _ in range(3):
        [made] = torch.ops.torchgraft.run_engine([x], engine)
        torch.testing.assert_close(made, model(x))
    _unregister_process_group("world")


@check
def one_rank_compiles() -> None:
    """With a cache, the second rank loads what the first one compiled, with its own weights."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    whole = MLP()
    split, x = split_mlp(whole, mesh), torch.randn(4, 8)
    for freeze in (True, False):
        settings = {"mode": "eager", "freeze": freeze, "cache_dir": OUT / "cache"}
        compiled = graft.compile(split, (x,), **settings)
        torch.testing.assert_close(compiled(x), whole(x))
        said = "\n".join(compiled.report.notes)
        made = [None] * size
        dist.all_gather_object(made, "cache miss" in said)
        loaded = [None] * size
        dist.all_gather_object(loaded, "another rank compiled it" in said)
        assert sum(made) == 1, said
        assert sum(loaded) == size - 1, said


@check
def verification_needs_every_rank() -> None:
    """It runs the program, so with a cache, too, no rank waits for another to compile."""
    x = torch.randn(4)
    settings = {"mode": "eager", "cache_dir": OUT / "verified", "verify": "end"}
    compiled = graft.compile(lambda x: reduce(x * 2), (x,), **settings)
    torch.testing.assert_close(compiled(x), 4 * x)


@check
def one_rank_generates_code() -> None:
    """Behind torch.compile, too: the others find the code in Inductor's cache."""
    unique = [random.SystemRandom().random()]
    dist.broadcast_object_list(unique)

    def fn(x: Tensor) -> Tensor:
        return (reduce((x * unique[0]).sin()) + unique[0]).cos()

    programs: list[Program] = []
    backend = graft.backend(graft.Config(), on_program=programs.append)
    x, size = torch.randn(32), dist.get_world_size()
    torch.testing.assert_close(torch.compile(fn, backend=backend)(x), fn(x))
    [program] = programs
    said = "another rank generated the code of"
    found = [note for note in program.report.notes if note.startswith(said)]
    taken = [int(note.removeprefix(said).split()[0]) for note in found]
    everybody = [None] * size
    dist.all_gather_object(everybody, sum(taken))
    regions = len(program.report.regions)
    assert regions == 2
    assert 0 < sum(everybody) <= regions * (size - 1), everybody  # a cache may always miss


@check
def an_unknown_group() -> None:
    x = torch.ones(4)
    compiled = graft.compile(lambda x: reduce(x), (x,), mode="eager")
    plan = compiled.plan
    steps = [
        dataclasses.replace(step, args=(*step.args[:-1], "wolrd"))
        if isinstance(step, Collective)
        else step
        for step in plan.steps
    ]
    linker = compiled._programs[0].linker
    run = link(dataclasses.replace(plan, steps=tuple(steps)), linker.kernels, {}, "cpu")
    error = raised(lambda: run([x]), NoGroup)
    assert "all_reduce of f32[4] at " in str(error)
    assert "Did you mean 'world'?" in str(error)


@check
def a_group_that_one_rank_does_not_know() -> None:
    """The other one hears of it at once: it would wait for the first collective."""
    rank, x = dist.get_rank(), torch.ones(4)
    compiled = graft.compile(lambda x: reduce(reduce(x).cos()), (x,), mode="eager")
    plan, linker = compiled.plan, compiled._programs[0].linker
    if rank == 1:
        steps = list(plan.steps)
        at = max(i for i, step in enumerate(steps) if isinstance(step, Collective))
        steps[at] = dataclasses.replace(steps[at], args=(*steps[at].args[:-1], "wolrd"))
        plan = dataclasses.replace(plan, steps=tuple(steps))
    error = raised(lambda: link(plan, linker.kernels, {}, "cpu")([x]))
    if rank == 1:
        assert isinstance(error, NoGroup), error
    else:
        assert isinstance(error, CollectiveFailed), error
        assert error.guilty == (1,), error
        assert "'wolrd'" in str(error), error


if __name__ == "__main__":
    main()
