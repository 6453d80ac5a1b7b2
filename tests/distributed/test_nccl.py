"""A world of one process, its group made from a file: collectives inside captured CUDA graphs.

The same programs run on gloo, so that what they check is checked on a machine without CUDA, too.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import pathlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

import torchgraft as graft
from torchgraft.comm import call

if not dist.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

HELD = "the captured CUDA graph holds its collectives"


@dataclasses.dataclass(frozen=True)
class World:
    device: str
    mode: str

    @property
    def captures(self) -> bool:
        return self.mode == "reduce-overhead"

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device)


def start(backend: str, store: pathlib.Path) -> None:
    """Make this process the whole world of `torch.distributed`, without any network."""
    if backend == "nccl" and not dist.is_nccl_available():
        pytest.skip("torch without NCCL")
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)


@pytest.fixture(
    params=[
        "gloo eager",
        pytest.param("nccl eager", marks=pytest.mark.cuda),
        pytest.param("nccl reduce-overhead", marks=pytest.mark.cuda),
    ]
)
def world(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[World]:
    backend, mode = request.param.split()
    start(backend, tmp_path / "store")
    yield World("cuda" if backend == "nccl" else "cpu", mode)
    torch.compiler.reset()
    gc.collect()  # NCCL waits for the graphs that hold its kernels
    dist.destroy_process_group()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The collectives that were launched from Python: a replayed graph launches none."""
    kinds: list[str] = []
    original = call.Call.__call__

    def counted(self: call.Call, *args: object, **kwargs: object) -> object:
        kinds.append(self._step.kind)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(call.Call, "__call__", counted)
    return kinds


# --- One program for each collective that torch can trace ---


def all_reduce(x: Tensor) -> Tensor:
    y = x @ x
    dist.all_reduce(y)
    return y + (x @ x).sin()


def all_gather_into_tensor(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_gather_into_tensor(out, x * 2)
    return out + x.sum()


def reduce_scatter_tensor(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.reduce_scatter_tensor(out, x @ x)
    return out * 2


def all_to_all_single(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.cos())
    return out - x


def broadcast(x: Tensor) -> Tensor:
    y = x + 1
    dist.broadcast(y, 0)
    return y * 2


def in_a_row(x: Tensor) -> Tensor:
    """Several, some of which nobody waits for before the end."""
    sums = [functional.all_reduce(x @ x * i, "sum", dist.group.WORLD) for i in range(3)]
    y = (x @ x).tanh()
    return torch.stack([*sums, functional.all_reduce(y, "max", dist.group.WORLD)])


PROGRAMS: list[Callable[[Tensor], Tensor]] = [
    all_reduce,
    all_gather_into_tensor,
    reduce_scatter_tensor,
    all_to_all_single,
    broadcast,
    in_a_row,
]


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_results(world: World, launched: list[str], fn: Callable[[Tensor], Tensor]) -> None:
    """Right on every call, and after the first one a captured program only replays."""
    compiled = graft.compile(fn, (world.randn(64, 64),), mode=world.mode, bucket_bytes=0)
    count = len(compiled.plan.collectives)
    assert count == (4 if fn is in_a_row else 1)
    assert {step.stream for step in compiled.plan.collectives} == {"comm:world"}
    given = [world.randn(64, 64) for _ in range(4)]
    found = [compiled(x) for x in given]  # all at once: an output must outlive later calls
    for x, y in zip(given, found, strict=True):
        torch.testing.assert_close(y, fn(x), atol=1e-3, rtol=1e-3)
    assert (HELD in compiled.report.notes) is world.captures, compiled.report.notes
    assert not any("not captured" in note for note in compiled.report.notes)
    times = 2 if world.captures else 4  # the warm-up and the capture, or each call
    assert len(launched) == count * times


class Parallel(nn.Module):
    """A tensor-parallel MLP beside a gate that needs no sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128, bias=False), nn.Linear(128, 32, bias=False)
        self.gate = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(x)))
        return functional.all_reduce(y, "sum", dist.group.WORLD) * torch.sigmoid(self.gate(x))


def test_training_behind_torch_compile(world: World) -> None:
    model = Parallel().to(world.device)
    twin = copy.deepcopy(model)
    programs = []
    backend = graft.backend(graft.Config(mode=world.mode), on_program=programs.append)
    run = torch.compile(model, backend=backend, fullgraph=True)
    given = [world.randn(8, 32) for _ in range(4)]
    for module, forward in ((model, run), (twin, twin)):
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
        for x in given:
            optimiser.zero_grad()
            forward(x).square().mean().backward()
            optimiser.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name], atol=1e-4, rtol=1e-3, msg=name)
    kinds = [[step.kind for step in program.plan.collectives] for program in programs]
    assert kinds == [["all_reduce"], ["all_reduce"]]  # forward and backward
    assert [HELD in program.report.notes for program in programs] == [world.captures] * 2


def test_each_gear_is_captured(world: World, launched: list[str]) -> None:
    gears = graft.Input(gears=[(8, 32), (16, 32)])
    model = Parallel().to(world.device).eval()
    compiled = graft.compile(model, (gears,), mode=world.mode)
    with torch.no_grad():
        for rows in (8, 16, 8, 16, 8):
            x = world.randn(rows, 32)
            torch.testing.assert_close(compiled(x), model(x), atol=1e-3, rtol=1e-3)
    assert [HELD in report.notes for report in compiled.reports] == [world.captures] * 2
    assert len(launched) == (4 if world.captures else 5)


def test_a_saved_program(world: World, tmp_path: pathlib.Path) -> None:
    model, x = Parallel().to(world.device).eval(), world.randn(8, 32)
    graft.compile(model, (x,), mode=world.mode).save(tmp_path / "model.graft")
    loaded = graft.load(tmp_path / "model.graft")
    with torch.no_grad():
        for _ in range(3):
            x = world.randn(8, 32)
            torch.testing.assert_close(loaded(x), model(x), atol=1e-3, rtol=1e-3)
    assert (HELD in loaded.report.notes) is world.captures, loaded.report.notes


def test_a_profile_has_the_collective_on_a_track_of_its_own(world: World) -> None:
    model, x = Parallel().to(world.device).eval(), world.randn(8, 32)
    compiled = graft.compile(model, (x,), mode=world.mode)
    profile = compiled.profile((x,), repeat=3)
    [talk] = [kernel for kernel in profile.kernels if kernel.stream == "comm:world"]
    assert "all_reduce" in talk.name
    assert talk.seconds > 0
    assert talk.cost.bytes >= 4 * 8 * 32
    assert profile.hidden is not None
    assert 0 <= profile.hidden <= 1
    names = {
        event["args"]["name"]
        for event in profile.trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert names == {"stream main", "stream comm:world"}
    torch.testing.assert_close(compiled(x), model(x).detach(), atol=1e-3, rtol=1e-3)


# --- What cannot be captured stays outside, with the reason ---


@pytest.mark.cuda
def test_gloo_is_not_captured(tmp_path: pathlib.Path, launched: list[str]) -> None:
    start("gloo", tmp_path / "store")
    world = World("cuda", "reduce-overhead")
    try:
        compiled = graft.compile(all_reduce, (world.randn(64, 64),), mode="reduce-overhead")
        for _ in range(3):
            x = world.randn(64, 64)
            torch.testing.assert_close(compiled(x), all_reduce(x), atol=1e-3, rtol=1e-3)
        assert (
            "not captured as a CUDA graph: all_reduce of f32[64, 64] goes through gloo, "
            "and only NCCL can be captured"
        ) in compiled.report.notes
        assert len(launched) == 3
    finally:
        dist.destroy_process_group()


def test_sizes_of_a_range_are_compared_at_each_call(world: World, launched: list[str]) -> None:
    spec = graft.Input(min_shape=(2, 32), max_shape=(64, 32))
    model = Parallel().to(world.device).eval()
    compiled = graft.compile(model, (spec,), mode=world.mode)
    with torch.no_grad():
        for rows in (2, 40, 7):
            x = world.randn(rows, 32)
            torch.testing.assert_close(compiled(x), model(x), atol=1e-3, rtol=1e-3)
    assert len(launched) == 3
    found = [note for note in compiled.report.notes if note.startswith("not captured")]
    assert len(found) == world.captures
    assert all("must be compared between the ranks at each call" in note for note in found)
