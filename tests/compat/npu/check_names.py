"""Every public name on the simulated device: there, or refused by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchgraft import compat

compat.install()
sys.path.insert(0, str(Path(__file__).parents[1]))
import names  # noqa: E402  (it lies beside)
import signatures  # noqa: E402
import torch_npu  # noqa: E402, F401

REFUSED = {"torch_npu.npu.ExternalEvent", "torch_npu.npu.MemPool", "torch_npu.jit.optimize"}


def test_every_public_name_is_there_or_refused() -> None:
    found = {
        f"{module}.{name}": names.state(module, name)
        for module, listed in names.NAMES.items()
        for name in listed.split()
    }
    assert {found[name] for name in REFUSED} == {"refused"}


@pytest.mark.parametrize("full", signatures.SIGNATURES)
def test_a_signature_is_that_of_the_real_package(full: str) -> None:
    assert list(signatures.differences(full, signatures.SIGNATURES[full])) == []
