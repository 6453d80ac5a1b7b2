"""`Config(streams="auto")`: branches found, fusions kept, results equal whatever the interleaving.

The host is given a GPU's cost model, so that placement has something to win.
"""

from __future__ import annotations

import dataclasses
import operator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchgraft as graft
from torchgraft.codegen import spread
from torchgraft.codegen.atoms import atoms
from torchgraft.fx.cost import NOMINAL, Machine

aten = torch.ops.aten
GPU = NOMINAL["cuda"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's costs are a GPU's."""
    monkeypatch.setattr(spread, "machine_for", lambda device: GPU)


class Experts(nn.Module):
    def __init__(self, count: int = 4, width: int = 32) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        mixed = torch.stack([expert(x) for expert in self.experts], -1)
        return (mixed * weights.unsqueeze(1)).sum(-1)


class Tables(nn.Module):
    """DLRM's shape: a dense tower beside many lookups, then their products."""

    def __init__(self, tables: int = 6, width: int = 16) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        self.tables = nn.ModuleList(nn.Embedding(50, width) for _ in range(tables))
        self.top = nn.Linear((tables + 1) ** 2, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        found = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([self.bottom(dense), *found], 1)
        return self.top((features @ features.transpose(1, 2)).flatten(1)).sigmoid()


class Towers(nn.Module):
    """Towers of different widths, so that they cannot be merged."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 8))
            for w in widths or (16, 24, 32, 40)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([tower(x) for tower in self.towers], 1)


class Inception(nn.Module):
    """GoogLeNet's block, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.Conv2d(cin, 8, 1),
                    nn.Sequential(nn.Conv2d(cin, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1)),
                    nn.Sequential(nn.Conv2d(cin, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 5, padding=2)),
                    nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(cin, 8, 1)),
                ]
            )
            for cin in (3, 32)
        )

    def forward(self, x: Tensor) -> Tensor:
        for branches in self.blocks:
            x = F.relu(torch.cat([branch(x) for branch in branches], 1))
        return x.mean((2, 3))


def cases() -> list[tuple[str, nn.Module, tuple[Tensor, ...]]]:
    ids = torch.arange(12).view(2, 6)
    return [
        ("experts", Experts(), (torch.randn(8, 32),)),
        ("tables", Tables(), (torch.randn(2, 13), ids)),
        ("towers", Towers(), (torch.randn(4, 16),)),
        ("inception", Inception(), (torch.randn(1, 3, 12, 12),)),
    ]


CASES = pytest.mark.parametrize(
    ("model", "args"), [pytest.param(m, a, id=name) for name, m, a in cases()]
)


@CASES
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_branches_run_on_streams_and_nothing_races(
    gpu: None, model: nn.Module, args: tuple[Tensor, ...], seed: int
) -> None:
    compiled = graft.compile(model, args, mode="eager", streams="auto", adversary=seed)
    assert len(compiled.plan.streams) > 2
    assert compiled.plan.hazards() == []
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), model(*args))
    assert any(note.startswith("streams: ") for note in compiled.report.notes)


def test_generated_code_on_streams_gives_the_same(gpu: None) -> None:
    model, x = Towers(16, 24), torch.randn(4, 16)
    compiled = graft.compile(model, (x,), streams="auto", adversary=3)
    assert len(compiled.plan.streams) == 2
    assert {node.runs for node in compiled.report.nodes} == {"generated"}
    assert len(compiled.report.regions) <= 3  # a tower, another one, and what joins them
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@CASES
def test_no_kernel_is_cut(model: nn.Module, args: tuple[Tensor, ...]) -> None:
    """What the generator would fuse is in one launch."""
    gm = captured(model, *args)
    found = spread.spread(gm, lambda node: True, GPU)
    if isinstance(model, Tables):  # all lookups are one kernel: nothing to run beside the tower
        assert isinstance(found, str)
        return
    assert isinstance(found, spread.Spread)
    assert found.cut == 0
    for atom in atoms(gm, lambda node: True):
        assert len({node.meta["piece"] for node in atom.nodes}) == 1


def captured(fn: nn.Module, *args: Tensor) -> torch.fx.GraphModule:
    return graft.compile(fn, args, mode="eager", streams="off").graph.gm


class Sides(nn.Module):
    """One fused kernel feeds a row of small products and, with light work on `y`, another one."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x.relu()
        return self.row(h) + self.row[0]((y * h[:1, :1]).view(-1, 64).mean(0))


@pytest.mark.parametrize(("rows", "cut"), [(1024, 1), (8, 0)])
def test_a_kernel_is_cut_where_that_pays_and_only_there(rows: int, cut: int) -> None:
    """The row can start before the light work on a large `y` is done; a small one is soon done."""
    machine = Machine(bandwidth=2e10, flops=50e12, launch=4e-6, units=4, wait=1.5e-6)
    gm = captured(Sides(), torch.randn(64, 64), torch.randn(rows, 512))
    found = spread.spread(gm, lambda node: True, machine)
    assert getattr(found, "cut", 0) == cut
    [relu] = gm.graph.find_nodes(op="call_function", target=aten.relu.default)
    mul = next(n for n in gm.graph.nodes if n.target is aten.mul.Tensor)
    assert (relu.meta.get("piece") != mul.meta.get("piece")) is bool(cut)


def test_streams_that_somebody_wrote_stay(gpu: None) -> None:
    def fn(x: Tensor) -> Tensor:
        with graft.stream("mine"):
            left = torch.mm(x, x)
        return left + torch.mm(x, x.T) + torch.mm(x.T, x)

    x = torch.randn(8, 8)
    compiled = graft.compile(fn, (x,), mode="eager", streams="auto")
    assert compiled.plan.streams == ["main", "mine"]
    assert "streams: those of the program" in compiled.report.notes


def test_random_numbers_and_effects_keep_one_stream(gpu: None) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.mm(x, torch.rand_like(x)) + torch.mm(x, torch.rand_like(x))

    compiled = graft.compile(fn, (torch.randn(8, 8),), mode="eager", streams="auto")
    assert compiled.plan.streams == ["main"]


def test_attention_without_dropout_draws_nothing(gpu: None) -> None:
    def fn(q: Tensor, k: Tensor) -> Tensor:
        one, two = (F.scaled_dot_product_attention(x, k, k) for x in (q, q + 1))
        return one + two

    q, k = torch.randn(2, 1, 2, 8, 16)
    compiled = graft.compile(fn, (q, k), mode="eager", streams="auto", adversary=1)
    assert len(compiled.plan.streams) == 2
    torch.testing.assert_close(compiled(q, k), fn(q, k))
    dropout = graft.compile(
        lambda q, k: F.scaled_dot_product_attention(q, k, k, dropout_p=0.5), (q, k), mode="eager"
    )
    assert not torch.equal(dropout(q, k), dropout(q, k))


def test_written_inputs_are_written_last(gpu: None) -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.zeros(8, 8))
            self.towers = Towers()

        def forward(self, x: Tensor) -> Tensor:
            old = self.held.sum(1, keepdim=True)
            self.held.copy_(x[:, :8].repeat(2, 1))
            return self.towers(x) + old[:4]

    model, x = Cache(), torch.randn(4, 16)
    compiled = graft.compile(model, (x,), mode="eager", streams="auto", adversary=1)
    assert len(compiled.plan.streams) > 1
    twin = Cache()
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        for scale in (1.0, 2.0):
            torch.testing.assert_close(compiled(x * scale), twin(x * scale))


@pytest.mark.parametrize(
    ("fields", "device", "expected"),
    [
        ({}, "cuda", False),
        ({"mode": "reduce-overhead"}, "cuda", True),
        ({"mode": "max-autotune"}, "cuda", True),
        ({"mode": "reduce-overhead", "streams": "off"}, "cuda", False),
        ({"streams": "auto"}, "cuda", True),
        ({"mode": "max-autotune"}, "cpu", True),
        ({"streams": "auto"}, "npu", False),
    ],
)
def test_when_the_compiler_places(fields: dict[str, str], device: str, expected: bool) -> None:
    assert spread.wanted(graft.Config(**fields), device) is expected


def host(threads: int) -> Machine:
    return dataclasses.replace(NOMINAL["cpu"], units=threads, flops=threads * 100e9)


def test_on_the_host_small_branches_and_one_thread_stay_on_one_stream() -> None:
    for threads in (1, 16):  # a wait between threads costs more than the branches
        found = spread.spread(captured(*_towers()), lambda node: True, host(threads))
        assert isinstance(found, str)


def _towers() -> tuple[nn.Module, Tensor]:
    return Towers(), torch.randn(4, 16)


def test_on_the_host_branches_pay_where_calls_leave_threads_idle() -> None:
    """Long products of few rows: one thread's work each, and much of it."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return operator.add(x @ y, y.T @ x.T)

    gm = captured(fn, torch.randn(32, 1 << 16), torch.randn(1 << 16, 32))  # type: ignore[arg-type]
    found = spread.spread(gm, lambda node: True, host(8))
    assert isinstance(found, spread.Spread)
    assert found.streams == 2


def test_an_unknown_choice_is_named() -> None:
    with pytest.raises(graft.errors.UnknownName, match=r"Config.streams: unknown choice 'outo'"):
        graft.Config(streams="outo")
