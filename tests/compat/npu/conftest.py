"""The device is there for every test of this folder."""

from __future__ import annotations

import pytest

from torchgraft.compat import simulated

simulated.activate()


@pytest.fixture(autouse=True)
def _idle() -> object:
    """What a test leaves on a stream does not reach the next one."""
    import torch

    yield
    torch.npu.synchronize()
