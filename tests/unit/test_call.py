"""Which calls take the short path: the same in Python and in C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgraft as graft
from torchgraft.errors import InputMismatch
from torchgraft.native import executor
from torchgraft.run.call import Call

pytestmark = pytest.mark.slow  # C++ may have to be built


@pytest.fixture(params=["python", "native"], autouse=True)
def _checker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHGRAFT_EXECUTOR", request.param)
    assert (executor.check() is not None) == (request.param == "native")


@pytest.fixture
def detours(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What calls took the long path."""
    seen: list[str] = []
    slow = Call.slow

    def counted(self: Call, leaves: Any) -> Any:
        seen.append(str(self.signature.specs[0]))
        return slow(self, leaves)

    monkeypatch.setattr(Call, "slow", counted)
    return seen


def double(x: Tensor) -> Tensor:
    return x * 2


class Own(Tensor):
    pass


COMPLEX = torch.randn(2, 3, dtype=torch.complex64)
DETOURS: dict[str, tuple[Tensor, Tensor]] = {
    "strides": (torch.randn(2, 3), torch.randn(3, 2).t()),
    "a gradient": (torch.randn(2, 3), torch.randn(2, 3, requires_grad=True)),
    "a parameter": (torch.randn(2, 3), nn.Parameter(torch.randn(2, 3), requires_grad=False)),
    "a subclass": (torch.randn(2, 3), torch.randn(2, 3).as_subclass(Own)),
    "a conjugate": (COMPLEX, COMPLEX.conj()),
    "a negative": (torch.randn(1, 1), torch.randn(1, 1, dtype=torch.complex64).conj().imag),
    "columns for rows": (torch.randn(3, 2).t(), torch.randn(2, 3)),
}


@pytest.mark.parametrize("name", DETOURS)
def test_what_is_not_just_as_declared_takes_the_long_path(name: str, detours: list[str]) -> None:
    declared, given = DETOURS[name]
    compiled = graft.compile(double, (declared,), mode="eager")
    torch.testing.assert_close(compiled(declared), declared * 2)
    assert not detours
    torch.testing.assert_close(compiled(given), (given * 2).as_subclass(Tensor))
    assert len(detours) == 1


WRONG: dict[str, Callable[[], Any]] = {
    "dtype": lambda: torch.randn(2, 3, dtype=torch.float64),
    "size": lambda: torch.randn(2, 4),
    "dims": lambda: torch.randn(2, 3, 1),
    "device": lambda: torch.empty(2, 3, device="meta"),
    "sparse": lambda: torch.randn(2, 3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(3), torch.randn(2)]),
    "no tensor": lambda: 3.0,
    "none": lambda: None,
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_was_not_declared_is_refused(name: str) -> None:
    x = torch.randn(2, 3)
    compiled = graft.compile(double, (x,), mode="eager")
    for args in [(WRONG[name](),), (), (x, x)]:
        with pytest.raises(InputMismatch):
            compiled(*args)
    with pytest.raises(InputMismatch, match=r"one inside torch\.func"):
        torch.vmap(compiled)(torch.randn(5, 2, 3))


def test_ranges_gears_formats_and_autocast(detours: list[str]) -> None:
    ranged = graft.compile(double, (graft.Input(min_shape=(2, 3), max_shape=(8, 3)),), mode="eager")
    geared = graft.compile(double, (graft.Input(gears=[(2, 3), (4, 3)]),), mode="eager")
    for compiled in (ranged, geared):
        for rows in (2, 4):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(compiled(x), x * 2)
        for rows in (1, 9):
            with pytest.raises(InputMismatch):
                compiled(torch.randn(rows, 3))
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    compiled = graft.compile(double, (images,), mode="eager")
    assert compiled(images).is_contiguous(memory_format=torch.channels_last)
    assert not detours
    torch.testing.assert_close(compiled(images.contiguous()), images * 2)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ranged(x), x * 2)
    assert len(detours) == 2
