"""Programs that a sceptical user tried, each of which once went wrong."""

from __future__ import annotations

import torch
from torch import Tensor

import torchgraft as graft


def test_a_constant_in_a_program_behind_torch_compile() -> None:
    def fn(x: Tensor) -> Tensor:
        x[:, 1] = 0
        return x + torch.tensor(3)

    x = torch.randn(2, 3)
    expected = fn(x.clone())
    for mode in ("eager", "default"):
        torch.compiler.reset()
        torch.testing.assert_close(
            torch.compile(fn, backend="torchgraft", mode=mode)(x.clone()), expected
        )


def test_a_negated_integer_wraps_before_a_float_is_added() -> None:
    def fn(x: Tensor) -> Tensor:
        return (-x) + 1.0

    x = torch.tensor([0, 5, 128], dtype=torch.uint8)
    assert graft.compile(fn, (x,), mode="eager")(x).tolist() == fn(x).tolist() == [1, 252, 129]
