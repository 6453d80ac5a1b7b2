"""What follows products and convolutions, in their library's own kernel; here as on CUDA, by
plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgraft as graft
from torchgraft._torch import generator
from torchgraft.codegen import epilogue, regions

aten = torch.ops.aten


def region(model: nn.Module, *args: Tensor) -> torch.fx.GraphModule:
    """The model's only region, as the generator gets it."""
    gm = graft.compile(model, args, mode="eager").graph.gm
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    return regions.extract(gm, regions.Unit("", regions.Place("generated"), calls))[0]


def test_the_relu_of_a_product_is_joined_with_it() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    x = torch.randn(3, 8)
    gm = region(model, x)
    epilogue.join_products(gm, "cuda")
    assert not gm.graph.find_nodes(op="call_function", target=aten._addmm_activation.default)
    epilogue.join_products(gm, "cpu")
    calls = [node.target for node in gm.graph.nodes if "addmm" in str(node.target)]
    assert calls == [aten._addmm_activation.default, aten.addmm.default]
    torch.testing.assert_close(gm(x)[0], model(x))


def test_a_product_that_is_read_before_its_relu_stays() -> None:
    linear, x = nn.Linear(8, 16), torch.randn(3, 8)

    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = linear(x)
            return y.relu() + y

    gm = region(Both(), x)
    epilogue.join_products(gm, "cpu")
    assert not gm.graph.find_nodes(op="call_function", target=aten._addmm_activation.default)


class Block(nn.Module):
    """As in ResNet: two convolutions behind each other, and one around them."""

    def __init__(self, around: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=2, dilation=2)
        self.around = nn.Conv2d(8, 16, 1, stride=2) if around else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).relu())
        other = y.sin() if self.around is None else self.around(x)
        return (y + other).relu()


def convolutions(model: nn.Module, x: Tensor, device: str = "cpu") -> Any:
    """The region with its convolutions joined, and how many are joined and not."""
    gm = region(model, x)
    epilogue.join_convolutions(gm, device)
    targets = [node.target for node in gm.graph.nodes]
    return gm, targets.count(epilogue.convolution_relu()), targets.count(aten.convolution.default)


def half(model: nn.Module) -> nn.Module:
    return model.bfloat16().eval()


class Residual(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return (x + super().forward(x)).relu()


@torch.no_grad()
def test_relu_and_sum_of_convolutions_are_joined_with_them() -> None:
    model, x = half(Block()), torch.randn(2, 8, 10, 12).bfloat16()
    gm, joined, left = convolutions(model, x)
    assert (joined, left) == (2, 1)  # of two that are added, one computes the sum
    torch.testing.assert_close(gm(x)[0], model(x), rtol=2e-2, atol=2e-2)


@torch.no_grad()
def test_one_behind_the_other() -> None:
    model = half(nn.Sequential(*(Residual(8, 8, 1) for _ in range(3))))
    x = torch.randn(1, 8, 5, 5).bfloat16()
    gm, joined, left = convolutions(model, x)
    assert (joined, left) == (3, 0)
    torch.testing.assert_close(gm(x)[0], model(x), rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@torch.no_grad()
def test_code_calls_them_channels_last() -> None:
    model, x = half(Block()), torch.randn(2, 8, 10, 12).bfloat16()
    gm, _, _ = convolutions(model, x)
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    run = generator.compile_graph(gm, values, options={}, is_inference=True, is_backward=False)
    torch.testing.assert_close(run([x])[0], model(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "model",
    [
        Block(around=False),  # the second one is read by sin as well: only the first
        nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1, groups=2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1, bias=False), nn.ReLU()),
    ],
    ids=["read twice", "groups", "transposed", "no bias"],
)
@torch.no_grad()
def test_those_that_do_not_fit_stay(model: nn.Module) -> None:
    model, x = half(model), torch.randn(1, 8, 6, 6).bfloat16()
    gm, joined, left = convolutions(model, x)
    assert (joined, left) == (1, 1)
    torch.testing.assert_close(gm(x)[0], model(x), rtol=2e-2, atol=2e-2)


def test_other_types_and_devices_stay() -> None:
    x = torch.randn(1, 8, 6, 6)
    assert convolutions(Block().eval(), x)[1] == 0
    assert convolutions(half(Block()), x.bfloat16(), "cuda")[1] == 0


def test_what_the_library_has_no_kernel_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Tensor:
        raise RuntimeError("no engine")

    monkeypatch.setattr(epilogue, "convolution_relu", lambda: fails)
    epilogue._runs.cache_clear()
    try:
        gm = region(half(Block()), torch.randn(1, 8, 6, 6).bfloat16())
        epilogue.join_convolutions(gm, "cpu")
        assert len(gm.graph.find_nodes(op="call_function", target=aten.convolution.default)) == 3
    finally:
        epilogue._runs.cache_clear()


def test_the_operator() -> None:
    """Its fake agrees with it, strides included."""
    x, w, b = torch.randn(2, 3, 9, 7), torch.randn(5, 3, 3, 2), torch.randn(5)
    for other in (None, torch.randn(2, 5, 5, 6)):
        args = (x, w, b, [2, 1], [1, 0], [1, 1], other)
        torch.library.opcheck(
            epilogue.convolution_relu(), args, test_utils=("test_schema", "test_faketensor")
        )
        made = epilogue.convolution_relu()(*args)
        assert made.is_contiguous(memory_format=torch.channels_last)
