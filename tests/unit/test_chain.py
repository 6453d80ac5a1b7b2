"""Small layers of one row as one kernel on CUDA; what is replaced by it, here on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgraft as graft
from torchgraft import _torch
from torchgraft.codegen import chain, regions


def chained(model: nn.Module, *args: Tensor, device: str = "cpu") -> torch.fx.GraphModule:
    """The model's only region, its chains of layers replaced."""
    gm = graft.compile(model, args, mode="eager").graph.gm
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    gm, inputs, *_ = regions.extract(gm, regions.Unit("", regions.Place("generated"), calls))
    chain.as_one(gm, _torch.fake_mode_of([node.meta["val"] for node in inputs]), device)
    return gm


def kernels(gm: torch.fx.GraphModule) -> list[list[str]]:
    """What follows each layer, for each kernel."""
    found: Any = gm.graph.find_nodes(op="call_function", target=chain.layers())
    return [list(node.args[3]) for node in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 24), (1, 1, 24)])
def test_layers_and_what_follows_each_are_one_kernel(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    model = nn.Sequential(
        nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 7, bias=False), nn.GELU(),
        nn.Linear(7, 16), nn.GELU(approximate="tanh"), nn.Linear(16, 3), nn.SiLU(), nn.Sigmoid(),
    ).to(dtype)  # fmt: skip
    x = torch.randn(shape, dtype=dtype)
    gm = chained(model, x)
    assert kernels(gm) == [["relu", "gelu_none", "gelu_tanh", "silu sigmoid"]]
    torch.testing.assert_close(gm(x)[0], model(x))
    assert not kernels(chained(model, x, device="cuda"))


class Fork(nn.Module):
    """The second layer's result is read by two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second, left, right, last = self.layers
        shared = second(first(x).relu()).tanh()
        return last(left(shared).relu()), right(shared) + 1


def test_a_chain_ends_where_others_read_its_result() -> None:
    model, x = Fork(), torch.randn(1, 8)
    gm = chained(model, x)
    assert kernels(gm) == [["relu", "tanh"], ["relu", ""]]
    for made, expected in zip(gm(x), model(x), strict=True):
        torch.testing.assert_close(made, expected)


def test_what_is_too_large_for_one_kernel_is_several_or_none() -> None:
    def layers(width: int, count: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))

    assert kernels(chained(layers(128, 7), torch.randn(1, 128))) == [[""] * 3, [""] * 3]
    assert kernels(chained(layers(100, 3), torch.randn(1, 100))) == [[""] * 3]
    assert not kernels(chained(layers(129, 2), torch.randn(1, 129))), "blocks of 256"
    assert not kernels(chained(layers(chain.WIDEST + 1, 2), torch.randn(1, chain.WIDEST + 1)))
    assert not kernels(chained(layers(16, 2), torch.randn(2, 16))), "two rows"


class Given(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).relu() @ weight


def test_weights_that_are_given_are_not_held() -> None:
    assert not kernels(chained(Given(), torch.randn(1, 8), torch.randn(8, 8)))
