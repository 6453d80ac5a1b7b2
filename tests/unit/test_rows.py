"""Programs over batches of any length."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchgraft as graft
from torchgraft.errors import BadValue, InputMismatch, UnknownName


class Sizes(nn.Module):
    """The rows doubled, and how many of them a call had."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, torch.full((x.shape[0],), x.shape[0])


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return x
        return -x


def compiled(*inputs: graft.Input, model: Any = None) -> graft.Compiled:
    return graft.compile(model or Sizes(), inputs, mode="eager")


def given(count: int, **more: Any) -> dict[str, Any]:
    return {"x": np.arange(3.0 * count, dtype=np.float32).reshape(count, 3), **more}


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (0, []),
        (1, [1]),
        (2, [4, 4]),
        (4, [4] * 4),
        (5, [8] * 5),
        (9, [8] * 8 + [1]),
        (19, [8] * 16 + [4] * 3),
    ],
)
def test_a_batch_takes_the_smallest_gears_that_hold_it(count: int, sizes: list[int]) -> None:
    rows = graft.Rows(compiled(graft.Input(gears=[(8, 3), (1, 3), (4, 3)])))
    made = rows(given(count, id=np.arange(count)))
    np.testing.assert_array_equal(made["output0"], 2 * given(count)["x"])
    assert made["output1"].tolist() == sizes
    assert made["id"].tolist() == list(range(count))


def test_a_range_takes_batches_as_they_are(tmp_path: pathlib.Path) -> None:
    compiled(graft.Input(min_shape=(2, 3), max_shape=(6, 3))).save(tmp_path / "p.graft")
    rows = graft.Rows(tmp_path / "p.graft")
    assert rows.inputs == {"x": (3,)}
    assert rows(given(5))["output1"].tolist() == [5] * 5
    assert rows(given(1))["output1"].tolist() == [2]  # filled up to the least
    assert rows(given(8))["output1"].tolist() == [6] * 6 + [2, 2]


def test_gears_of_other_sizes_are_told_apart() -> None:
    rows = graft.Rows(compiled(graft.Input(gears=[(2, 3), (4, 5)])))
    assert rows(given(3))["output1"].tolist() == [2, 2, 2]
    assert rows({"x": np.ones((3, 5), np.float32)})["output1"].tolist() == [4, 4, 4]
    assert rows.inputs == {"x": (None,)}
    with pytest.raises(InputMismatch):
        rows({"x": np.ones((3, 7), np.float32)})


def test_a_dict_gives_columns_of_its_names() -> None:
    def named(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"sum": x + y.to(x.dtype), "difference": x - y.to(x.dtype)}

    half = graft.Input((2, 3), dtype=torch.bfloat16)
    rows = graft.Rows(compiled(half, graft.Input((2, 3), dtype=torch.int64), model=named))
    made = rows({"x": np.ones((3, 3)), "y": np.full((3, 3), 2, np.int32)})
    assert made["sum"].tolist() == [[3.0] * 3] * 3
    assert made["difference"].tolist() == [[-1.0] * 3] * 3


def test_what_does_not_fit_is_named() -> None:
    rows = graft.Rows(compiled(graft.Input((2, 3))))
    with pytest.raises(UnknownName, match=r"unknown column 'x'.*Known: 'y'"):
        rows({"y": np.ones((2, 3))})
    with pytest.raises(BadValue, match=r"column 'x': expected values for torch.float32"):
        rows({"x": np.ones((2, 3), complex)})
    two = graft.Rows(compiled(graft.Input((2,)), graft.Input((2,)), model=torch.add))
    names = [spec.name for spec in two.program.captures[0].signature.specs]
    with pytest.raises(BadValue, match="columns of one length"):
        two(dict(zip(names, (np.ones(2), np.ones(1)), strict=True)))


def test_programs_without_rows_are_refused() -> None:
    with pytest.raises(BadValue, match="the same rows in dim 0"):
        graft.Rows(compiled(graft.Input((2, 3)), graft.Input((3, 3)), model=torch.mm))
    branching = torch.jit.script(Branching())
    with pytest.raises(BadValue, match="compiled as a whole"):
        graft.Rows(compiled(graft.Input((2, 3)), model=branching))
    total = graft.Rows(compiled(graft.Input((2, 3)), model=nn.Flatten(0)))
    with pytest.raises(BadValue, match="a tensor of 2 rows"):
        total({"input": np.ones((2, 3))})


@pytest.mark.cuda
def test_batches_go_to_the_device_and_back() -> None:
    rows = graft.Rows(compiled(graft.Input(gears=[(1, 3), (4, 3)], device="cuda")))
    made = rows(given(7))
    np.testing.assert_array_equal(made["output0"], 2 * given(7)["x"])
