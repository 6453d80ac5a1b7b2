"""What has one row, as the loops that are generated for it on CUDA; here on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgraft as graft
from torchgraft import _torch
from torchgraft._torch import generator
from torchgraft.codegen import regions, single

aten = torch.ops.aten


class Call(nn.Module):
    """A function of tensors, with weights of its own."""

    def __init__(self, fn: Callable[..., Any], *weights: Tensor) -> None:
        super().__init__()
        self.fn, self.weights = fn, nn.ParameterList(weights)

    def forward(self, *args: Tensor) -> Any:
        return self.fn(*args, *self.weights)


def loops(model: nn.Module, *args: Tensor, device: str = "cpu") -> torch.fx.GraphModule:
    """The model's only region, with loops for what has one row."""
    gm = graft.compile(model, args, mode="eager").graph.gm
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    gm, inputs, *_ = regions.extract(gm, regions.Unit("", regions.Place("generated"), calls))
    mode = _torch.fake_mode_of([node.meta["val"] for node in inputs])
    single.as_loops(gm, mode, device)
    return gm


def targets(gm: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes]


def agree(model: nn.Module, *args: Tensor, gone: Any) -> None:
    gm = loops(model, *args)
    assert gone not in targets(gm)
    torch.testing.assert_close(gm(*args)[0], model(*args))
    assert gone in targets(loops(model, *args, device="cuda"))  # another device's stay


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_product_of_one_row_is_a_sum(dtype: torch.dtype) -> None:
    agree(nn.Linear(24, 40, dtype=dtype), torch.randn(1, 24, dtype=dtype), gone=aten.addmm.default)
    agree(Call(torch.mm, torch.randn(24, 40)), torch.randn(1, 24), gone=aten.mm.default)
    stacked = Call(torch.bmm, torch.randn(3, 24, 40))
    agree(stacked, torch.randn(3, 1, 24), gone=aten.bmm.default)


@pytest.mark.slow
def test_weights_keep_their_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cast would be folded into them, and twice as many bytes be read at each call."""
    held: list[Tensor] = []

    def seen(gm: torch.fx.GraphModule, *args: Any) -> None:
        held.extend(value for value in vars(gm).values() if isinstance(value, Tensor))
        held.extend(gm.buffers())

    monkeypatch.setattr(single, "as_loops", functools.partial(single.as_loops, device="cpu"))
    monkeypatch.setattr(generator, "rebase", seen)
    model, x = nn.Linear(24, 40, dtype=torch.float16), torch.randn(1, 24, dtype=torch.float16)
    compiled = graft.compile(model, (x,))
    torch.testing.assert_close(compiled(x), model(x))
    assert sorted((str(t.dtype), tuple(t.shape)) for t in held) == [
        ("torch.float16", (40,)),
        ("torch.float16", (40, 24)),  # and nothing else, such as what they were made of
    ]


def test_other_products_stay() -> None:
    many_rows = loops(nn.Linear(24, 40), torch.randn(2, 24))
    computed = loops(Call(lambda x, y: x @ y.sin()), torch.randn(1, 8), torch.randn(8, 4))
    scaled = Call(lambda x, w: torch.addmm(w[0], x, w, alpha=2.0), torch.randn(8, 4))
    assert aten.addmm.default in targets(many_rows)
    assert aten.mm.default in targets(computed)  # to turn it would cost more than it gains
    assert aten.addmm.default in targets(loops(scaled, torch.randn(1, 8)))


def test_more_weights_than_a_library_reads_faster_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "MANY", 24 * 40 - 1)
    assert aten.addmm.default in targets(loops(nn.Linear(24, 40), torch.randn(1, 24)))


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_one_query(
    masked: bool, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    write = single._attends("dropout_p", "is_causal")

    def on_cpu(*args: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
        return write(*args, attn_bias=attn_mask, **kwargs)

    def attend(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, *mask, scale=scale)

    monkeypatch.setitem(single._WAYS, flash, on_cpu)
    q, k, v = torch.randn(2, 3, 1, 8), torch.randn(2, 3, 20, 8), torch.randn(2, 3, 20, 8)
    mask = [torch.randn(2, 1, 1, 20)] if masked else []
    if masked:
        mask[0][1] = float("-inf")  # nothing is seen there, and the answer is zero
    agree(Call(attend), q, k, v, *mask, gone=flash)
    assert flash in targets(loops(Call(attend), torch.randn(2, 3, 2, 8), k, v, *mask))


def put(old: Tensor, at: Tensor, new: Tensor) -> Tensor:
    return aten.index_put(old, [None, at], new)


@pytest.mark.parametrize("slot", [0, 5, -1])
def test_one_slot_of_a_cache_is_a_choice(slot: int) -> None:
    cache, new = torch.randn(4, 6, 3), torch.randn(4, 1, 3)
    agree(Call(put), cache, torch.tensor([slot]), new, gone=aten.index_put.default)


def test_a_slot_that_is_not_there_is_an_error() -> None:
    gm = loops(Call(put), torch.randn(4, 6), torch.tensor([0]), torch.randn(4, 1))
    with pytest.raises(IndexError):
        gm(torch.randn(4, 6), torch.tensor([6]), torch.randn(4, 1))


def test_other_writes_stay() -> None:
    def added(old: Tensor, at: Tensor, new: Tensor) -> Tensor:
        return aten.index_put(old, [None, at], new, accumulate=True)

    def whole(old: Tensor, at: Tensor, new: Tensor) -> Tensor:
        return aten.index_put(old, [at], new)

    old, one, two = torch.randn(4, 6), torch.tensor([1]), torch.tensor([1, 2])
    several = loops(Call(put), old, two, torch.randn(4, 2))
    summed = loops(Call(added), old, one, torch.randn(4, 1))
    rows = loops(Call(whole), old, one, torch.randn(6))
    for gm in (several, summed, rows):
        assert aten.index_put.default in targets(gm)


@pytest.mark.slow
def test_a_package_lays_out_new_weights_as_the_loops_want_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(single, "as_loops", functools.partial(single.as_loops, device="cpu"))
    model, x = Call(torch.mm, torch.randn(24, 40)), torch.randn(1, 24)
    compiled = graft.compile(model, (x,))
    torch.testing.assert_close(compiled(x), model(x))
    compiled.save(tmp_path / "model.graft")
    other = Call(torch.mm, torch.randn(24, 40))
    loaded = graft.load(tmp_path / "model.graft", weights=other.state_dict())
    torch.testing.assert_close(loaded(x), other(x))
    compiled.load_state_dict(other.state_dict())
    torch.testing.assert_close(compiled(x), other(x))
