"""Who computes a product on CPU: the generator where there are few rows, else a library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import torchgraft as graft
from torchgraft._torch import generator
from torchgraft.codegen import inductor, regions


def region(model: nn.Module, x: torch.Tensor, **fields: object) -> torch.fx.GraphModule:
    """The model's only region, as the generator gets it."""
    compiled = graft.compile(model, (x,), mode="eager", **fields)
    gm = compiled.graph.gm
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    return regions.extract(gm, regions.Unit("", regions.Place("generated"), calls))[0]


def is_micro(gm: torch.fx.GraphModule) -> bool:
    return inductor._by_generator(inductor._products(gm))


@pytest.mark.parametrize(
    ("rows", "width", "expected"), [(1, 256, True), (6, 512, True), (8, 256, False), (16, 64, True)]
)
def test_few_rows_are_the_generators(rows: int, width: int, expected: bool) -> None:
    assert is_micro(region(nn.Linear(width, width), torch.randn(rows, width))) is expected


def test_a_region_goes_with_most_of_its_work() -> None:
    class Both(nn.Module):
        def __init__(self, small: int) -> None:
            super().__init__()
            self.one = nn.Linear(64, small)
            self.two = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.one(x[:1]), self.two(x)

    x = torch.randn(64, 64)
    assert not is_micro(region(Both(64), x))
    assert is_micro(region(Both(64 * 128), x))


def test_weights_that_change_or_fit_no_cache_are_left_to_a_library() -> None:
    assert not is_micro(region(nn.Linear(64, 64), torch.randn(1, 64), freeze=False))
    assert inductor._by_generator([(1, 2 * 1024 * 1024)])
    assert not inductor._by_generator([(1, 2 * 8192 * 8192)])


@pytest.mark.parametrize(
    ("intel", "rows", "expected"), [(False, 64, True), (False, 8, False), (True, 64, False)]
)
def test_large_products_are_onednns_where_mkl_is_not_at_home(
    monkeypatch: pytest.MonkeyPatch, intel: bool, rows: int, expected: bool
) -> None:
    monkeypatch.setattr(generator, "is_intel", lambda: intel)
    given: list[bool] = []
    plain = generator._freeze

    def freeze(gm: object, inputs: object, onednn: bool) -> object:
        given.append(onednn)
        return plain(gm, inputs, onednn)  # type: ignore[arg-type]

    monkeypatch.setattr(generator, "_freeze", freeze)
    model, x = nn.Linear(256, 256).eval(), torch.randn(rows, 256)
    compiled = graft.compile(model, (x,))
    assert given == [expected]
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_generated_products_are_right() -> None:
    model = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 5)).eval()
    x = torch.randn(3, 48)
    compiled = graft.compile(model, (x,))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("front", "asks"), [("compile", False), ("backend", True)])
def test_code_asks_for_sizes_only_where_nobody_has(
    monkeypatch: pytest.MonkeyPatch, front: str, asks: bool
) -> None:
    given: list[dict[str, object]] = []
    plain = generator.compile_graph

    def spy(*args: object, options: dict[str, object], **kwargs: object) -> object:
        given.append(dict(options))
        return plain(*args, options=options, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(generator, "compile_graph", spy)
    x = torch.randn(3, 4)
    if front == "compile":
        run = graft.compile(torch.sin, (x,))
        with pytest.raises(graft.errors.InputMismatch):
            run(torch.randn(4, 3))  # the call has checked
        torch.testing.assert_close(run(torch.randn(4, 3).T * 0 + x), x.sin())
    else:
        run = torch.compile(torch.sin, backend="torchgraft")
    torch.testing.assert_close(run(x), x.sin())
    assert [options.get("size_asserts", True) for options in given] == [asks]


def test_code_still_asks_behind_a_kernel_of_somebody_elses() -> None:
    @torch.library.custom_op("products::turned", mutates_args=())
    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.T.clone(memory_format=torch.contiguous_format).T  # not as foretold

    @turned.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    compiled = graft.compile(lambda x: turned(x).relu() + 1, (torch.randn(3, 4),))
    with pytest.raises(AssertionError, match="stride"):
        compiled(torch.randn(3, 4))


def test_a_package_with_few_rows_takes_new_weights(tmp_path: Path) -> None:
    """The generator packs weights in its own way, which cannot be repeated for others."""
    model, other = nn.Linear(16, 16).eval(), nn.Linear(16, 16).eval()
    x = torch.randn(1, 16)
    graft.compile(model, (x,)).save(tmp_path / "linear.graft")
    loaded = graft.load(tmp_path / "linear.graft")
    loaded.load_state_dict(other.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), other(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_region_with_a_product_of_two_values_is_generated_all_the_same() -> None:
    class Score(nn.Linear):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x) @ y

    model, args = Score(8, 8), (torch.randn(2, 8), torch.randn(8, 8))
    compiled = graft.compile(model, args)
    assert compiled.report.coverage == 1
    torch.testing.assert_close(compiled(*args), model(*args).detach())
