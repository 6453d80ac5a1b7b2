"""Captured graphs where the CPU stands for the NPU."""

from __future__ import annotations

from pathlib import Path

import captures
import pytest


@pytest.mark.feature(
    "torch_npu", "torch.npu.NPUGraph, graph, update, task groups: captured and replayed"
)
@pytest.mark.parametrize("name", captures.CHECKS)
def test_a_capture(ascend: Path, name: str) -> None:
    captures.CHECKS[name]()
