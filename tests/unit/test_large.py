"""Large products on CPU, and those whose columns do not fill vectors, by the loop for convolutions:
the same answers, and only where they were measured."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgraft as graft
from torchgraft.codegen import direct, large, own


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many products of each region are such, on whatever processor; small ones will do."""
    found: list[int] = []
    original = large.as_code

    def told(gm: Any, mode: Any) -> bool:
        original(gm, mode)
        calls = gm.graph.find_nodes(op="call_function", target=direct.direct())
        found.append(len(calls))
        return bool(calls)

    monkeypatch.setattr(own, "is_ahead", lambda *vendors: True)
    monkeypatch.setattr(large, "as_code", told)
    monkeypatch.setattr(large, "LEAST", 1e4)
    return found


class Several(nn.Module):
    """Layers, each with an input of its own and something behind it."""

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        pairs = zip(self.layers, inputs, strict=True)
        return [nn.functional.gelu(layer(x)) * 2 for layer, x in pairs]


SHAPES = [
    (32, 64, 32, True),
    (33, 70, 64, True),
    (130, 800, 32, False),  # two blocks each way, and two rows left
    (128, 1600, 96, True),
    (256, 16, 160, False),
    (5, 40, 99, True),  # vectors that are not filled
    (300, 33, 12, False),
    (7, 8, 1000, True),
]


def check(model: nn.Module, *inputs: Tensor, program: Any = None) -> None:
    program = program or graft.compile(model, inputs)
    with torch.no_grad():
        found = program(*inputs)
        exact = model.double()(*(x.double() for x in inputs))
    model.float()
    for one, right in zip(found, exact, strict=True):
        assert one.is_contiguous()
        assert (one - right).norm() <= 2e-6 * right.norm()


@pytest.mark.parametrize("threads", [1, 3])
def test_answers_are_right(made: list[int], threads: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(inner, outs, bias=bias) for _, inner, outs, bias in SHAPES]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(Several(*layers).eval(), *(torch.randn(r, inner) for r, inner, *_ in SHAPES))
    finally:
        torch.set_num_threads(before)
    assert made == [len(SHAPES)]


def test_rows_of_images_and_parts_of_others_are_right(made: list[int]) -> None:
    """What is no matrix, and what lies in a larger one."""
    torch.manual_seed(0)
    model = Several(nn.Linear(64, 32), nn.Linear(64, 96)).eval()
    check(model, torch.randn(2, 20, 64), torch.randn(40, 128)[:, 64:])
    assert made == [2]


def test_other_products_are_not(made: list[int]) -> None:
    def ask(layer: nn.Module, *size: int, **fields: object) -> None:
        graft.compile(layer.eval(), (torch.randn(size, dtype=layer.weight.dtype),), **fields)  # type: ignore[arg-type]

    ask(nn.Linear(64, 64), 31, 64)
    ask(nn.Linear(64, 64), 257, 64)
    ask(nn.Linear(64, 50), 4, 64)
    ask(nn.Linear(64, 17), 64, 64)  # half of what would be computed
    ask(nn.Linear(4, 32), 32, 4)  # too small
    ask(nn.Linear(64, 64), 64, 64, freeze=False)
    ask(nn.Linear(64, 64).bfloat16(), 64, 64)
    assert made == [0] * 7


def test_a_package_computes_so_too_and_takes_new_weights(
    made: list[int], tmp_path: pathlib.Path
) -> None:
    torch.manual_seed(0)
    model, x = Several(nn.Linear(96, 64)).eval(), torch.randn(50, 96)
    graft.compile(model, (x,)).save(tmp_path / "model.graft")
    assert made == [1, 1]
    loaded = graft.load(tmp_path / "model.graft")
    check(model, x, program=loaded)
    other = Several(nn.Linear(96, 64)).eval()
    loaded.load_state_dict(other.state_dict())
    check(other, x, program=loaded)
