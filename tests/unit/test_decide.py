"""Parts of an input, such as each layer's of one cache, are taken before a captured region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import torchgraft as graft
from torchgraft.codegen.decide import decide
from torchgraft.codegen.regions import Unit
from torchgraft.report import Report

aten = torch.ops.aten


def units(
    fn: Callable[..., object], *args: Tensor, device: str = "cuda", **settings: Any
) -> list[Unit]:
    """How a graph is cut that is to be captured."""
    gm = graft.compile(fn, args, mode="eager", **settings).graph.gm
    config = graft.Config(mode="reduce-overhead", streams="off")
    return decide(gm, config, Report("test", "compile", config.mode, device), {})


def kinds(cut: list[Unit]) -> list[str]:
    return [unit.place.kind for unit in cut]


def layers(x: Tensor, cache: Tensor) -> Tensor:
    for i in range(3):
        x = (x.sin() * cache[i]).softmax(-1)
    return x


def test_each_layers_part_of_a_cache_is_an_address_before_one_region() -> None:
    given = torch.randn(4), torch.randn(3, 4)
    cut = units(layers, *given)
    assert kinds(cut) == ["part", "part", "part", "generated"]
    assert not any(node.target is aten.select.int for node in cut[-1].nodes)
    assert kinds(units(layers, *given, device="cpu")) == ["generated"]


def test_a_single_part_or_one_of_what_is_computed_is_left_to_the_generator() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        made = y * 2
        return x[1] + made[0] * made[1]

    assert kinds(units(fn, torch.randn(2, 4), torch.randn(2, 4))) == ["generated"]


def test_an_input_that_is_written_stays_whole() -> None:
    def fn(x: Tensor, cache: Tensor) -> Tensor:
        total = x + cache[0] + cache[1]
        cache.copy_(cache * 2)
        return total

    assert "part" not in kinds(units(fn, torch.randn(4), torch.randn(2, 4)))


def test_a_part_that_waits_for_another_call_is_not_there_from_the_start() -> None:
    def late(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], config: graft.Config) -> None:
        graph = graft.Graph(gm, example_inputs, config)
        first, *_ = graph.all(aten.select.int)
        graph.order(graph.one(aten.exp.default), then=first)

    def fn(x: Tensor, cache: Tensor) -> Tensor:
        return x.exp() + cache[0] + cache[1] * cache[2]

    cut = units(fn, torch.randn(4), torch.randn(3, 4), post_passes=[late])
    assert kinds(cut).count("part") == 2
    assert sum(node.target is aten.select.int for unit in cut for node in unit.nodes) == 3
