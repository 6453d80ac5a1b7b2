"""Shared fixtures: one thread, seeded, a fresh registry, GPU tests skipped without a GPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
import torch

import torchgraft as graft
from torchgraft import _torch

torch.set_num_threads(1)
# Whether the C++ executor is built differs from machine to machine; tests of it say so.
os.environ.setdefault("TORCHGRAFT_EXECUTOR", "python")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    """Nothing that a test registers, seeds or compiles reaches the next one."""
    torch.manual_seed(0)
    torch.compiler.reset()
    with graft.Registry(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield
    _torch.forget_dropped()
