"""`max-autotune`: what is tried, what is kept, and what happens where nothing can be.

Time is injected: a scripted clock and timer, never the machine's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgraft as graft
from torchgraft import tune
from torchgraft.codegen import spread
from torchgraft.fx.cost import NOMINAL


class Towers(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, w), nn.ReLU(), nn.Linear(w, 8)) for w in widths
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([tower(x) for tower in self.towers], 1)


class Script:
    """Timings by the name of the way that is under the clock: seconds, or what to raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **ways: Any) -> None:
        self.ways, self.names = ways, dict[int, str]()
        self.now = 0.0
        plain = tune.Tuner._choose

        def choose(tuner: tune.Tuner, what: str, calls: Any, report: Any) -> str:
            self.names = {id(call): name for name, call in calls.items()}
            return plain(tuner, what, calls, report)

        monkeypatch.setattr(tune.Tuner, "_choose", choose)
        monkeypatch.setattr(tune, "sample", self.sample)
        monkeypatch.setattr(tune, "clock", lambda: self.now)

    def sample(self, call: Callable[[], object], device: str) -> float:
        call()  # it runs
        for name, seconds in self.ways.items():
            if name.replace("_", " ") in self.names[id(call)]:
                held = seconds.pop(0) if isinstance(seconds, list) else seconds
                if isinstance(held, Exception):
                    raise held
                return float(held)
        return 1.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's costs are a GPU's, so that there are streams to choose from."""
    monkeypatch.setattr(spread, "machine_for", lambda device: NOMINAL["cuda"])


def compiled(model: nn.Module, x: Tensor, **fields: Any) -> graft.Compiled:
    made = graft.compile(model, (x,), mode="max-autotune", **fields)
    with torch.no_grad():
        torch.testing.assert_close(made(x), model(x), rtol=1e-4, atol=1e-5)
    return made


X = torch.randn(4, 8)
ATEN = {"torch_executed_ops": ["aten::addmm", "aten::relu", "aten::cat", "aten::bmm"]}
"""Nothing to generate: these tests are about the choice."""


@pytest.mark.parametrize(("one", "several"), [(3e-6, 5e-6), (5e-6, 3e-6)])
def test_streams_are_kept_where_they_are_faster(
    monkeypatch: pytest.MonkeyPatch, gpu: None, one: float, several: float
) -> None:
    Script(monkeypatch, one_stream=one, streams=several)
    made = compiled(Towers(8, 16), X, **ATEN)
    assert (len(made.plan.streams) > 1) is (several < one)
    by_name = {trial.name: trial for trial in made.report.trials}
    assert by_name.keys() == {"one stream", "2 streams"}
    assert by_name["one stream"].seconds == one
    assert by_name["one stream"].kept is (one < several)
    assert "autotune: the program: " in str(made.report)


@pytest.mark.parametrize("apart", [1e-6, 9e-6])
def test_merged_branches_are_kept_where_they_are_faster(
    monkeypatch: pytest.MonkeyPatch, apart: float
) -> None:
    Script(monkeypatch, branches_apart=apart, one_stream=5e-6)
    made = compiled(Towers(8, 8), X, **ATEN)
    merged = len(made.graph.all(torch.ops.aten.bmm)) > 0
    assert merged is (apart > 5e-6)


def test_a_region_is_tuned_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    Script(monkeypatch, as_predicted=5e-6, tuned=3e-6)
    made = compiled(nn.Linear(8, 8), X)
    assert [(t.what, t.name, t.kept) for t in made.report.trials] == [
        ("region0", "as predicted", False),
        ("region0", "tuned", True),
    ]


def test_a_budget_too_small_for_anything_gives_the_untuned_plan_and_says_so(
    monkeypatch: pytest.MonkeyPatch, gpu: None
) -> None:
    script = Script(monkeypatch)

    def late(self: tune.Tuner, gm: Any, report: Any) -> Any:
        script.now += 10  # the compile alone takes longer than the budget
        return plain(self, gm, report)

    plain = tune.Tuner._run
    monkeypatch.setattr(tune.Tuner, "_run", late)
    made = compiled(Towers(8, 16), X, autotune_seconds=1, **ATEN)
    assert len(made.plan.streams) == 2  # as predicted
    assert made.report.trials == []
    assert any("autotune: 1 s are too few to try anything" in n for n in made.report.notes)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("no")]
)
def test_a_way_that_fails_is_dropped_and_not_the_compile(
    monkeypatch: pytest.MonkeyPatch, gpu: None, error: Exception
) -> None:
    Script(monkeypatch, one_stream=[1e-6, error], streams=5e-6)
    made = compiled(Towers(8, 16), X, **ATEN)
    assert len(made.plan.streams) == 2
    assert [trial.name for trial in made.report.trials] == ["2 streams"]
    assert any("one stream was dropped: " in note for note in made.report.notes)


def test_a_way_that_cannot_be_built_is_dropped(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    Script(monkeypatch)
    plain = graft.program._assemble

    def assemble(gm: Any, config: graft.Config, *args: Any, **kwargs: Any) -> Any:
        if config.streams == "off":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(gm, config, *args, **kwargs)

    monkeypatch.setattr("torchgraft.program._assemble", assemble)
    made = compiled(Towers(8, 16), X, **ATEN)
    assert len(made.plan.streams) == 2
    assert any("autotune: one stream was dropped: " in note for note in made.report.notes)


def wild() -> list[float]:
    return [1e-6, 9e-6, 5e-6] * 3


def test_a_choice_that_drowns_in_noise_warns(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    Script(monkeypatch, one_stream=wild(), streams=wild())
    with pytest.warns(UserWarning, match="timings vary by .* so the choice means little"):
        compiled(Towers(8, 16), X, **ATEN)


def test_what_is_not_clearly_faster_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, gpu: None
) -> None:
    Script(monkeypatch, one_stream=[1e-6, 4e-6, 9e-6] * 3, streams=wild())
    with pytest.warns(UserWarning, match="so the choice means little and is '2 streams'"):
        made = compiled(Towers(8, 16), X, **ATEN)
    assert len(made.plan.streams) == 2  # as predicted, though one has the lower median


def test_a_clear_choice_does_not_warn(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    Script(monkeypatch, one_stream=[20e-6, 22e-6, 30e-6] * 3, streams=wild())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "torchgraft: Towers: nothing was compiled")
        made = compiled(Towers(8, 16), X, **ATEN)
    assert len(made.plan.streams) == 2


def test_what_the_user_fixed_is_not_tried(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    Script(monkeypatch)
    made = compiled(Towers(8, 8), X, streams="off", merge_branches=False, **ATEN)
    assert made.report.trials == []
    assert len(made.plan.streams) == 1


def test_inputs_that_the_program_writes_are_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    class Count(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return self.linear(x) + self.count

    Script(monkeypatch)
    model = Count()
    made = graft.compile(model, (X,), mode="max-autotune", torch_executed_ops=["aten::addmm"])
    first = made(X)
    torch.testing.assert_close(made(X), first + 1)


def test_the_choice_holds_for_new_weights_and_for_a_package(
    monkeypatch: pytest.MonkeyPatch, gpu: None, tmp_path: Any
) -> None:
    Script(monkeypatch, one_stream=1e-6, streams=5e-6)
    model = Towers(8, 16)
    made = compiled(model, X, **ATEN)
    twin = Towers(8, 16)
    made.load_state_dict(twin.state_dict())
    assert len(made.plan.streams) == 1
    with torch.no_grad():
        torch.testing.assert_close(made(X), twin(X), rtol=1e-4, atol=1e-5)
    made.save(tmp_path / "towers.graft", weights=twin.state_dict())
    assert len(graft.load(tmp_path / "towers.graft").plan.streams) == 1


def test_the_machine_itself_can_be_asked() -> None:
    assert tune.sample(lambda: sum(range(1000)), "cpu") > 0


@pytest.mark.parametrize("wrong", [-1, "60", True])
def test_a_budget_is_a_number_of_seconds(wrong: Any) -> None:
    with pytest.raises(graft.errors.BadValue, match=r"Config\.autotune_seconds"):
        graft.Config(autotune_seconds=wrong)


@pytest.mark.slow
def test_a_budget_that_ends_within_a_region_leaves_the_rest_of_it_untuned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    script = Script(monkeypatch)
    timed = []
    plain = AlgorithmSelectorCache.do_autotuning

    def slow(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        script.now += 1000  # one product takes longer than the budget
        timed.append(name)
        return plain(self, name, *args, **kwargs)

    monkeypatch.setattr(AlgorithmSelectorCache, "do_autotuning", slow)
    model = nn.Sequential(*(nn.Linear(8 * n, 8 * n + 8) for n in range(1, 5)))
    made = compiled(model, X)
    assert len(timed) == 1
    [note] = [note for note in made.report.notes if "not tuned" in note]
    assert note.startswith("autotune: region0: the time was up, so 3 products")
    assert AlgorithmSelectorCache.do_autotuning is slow  # nothing of ours is left behind
