"""Captured graphs on the simulated device, however late its streams are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchgraft import compat
from torchgraft.compat import simulated

compat.install()
sys.path.insert(0, str(Path(__file__).parents[1]))
import captures  # noqa: E402  (it lies beside)

pytestmark = pytest.mark.feature("torch_npu", "simulated device: captured graphs")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", captures.CHECKS)
def test_a_capture(name: str, seed: int) -> None:
    with simulated.adversary(seed):
        captures.CHECKS[name]()
