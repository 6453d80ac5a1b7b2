"""Ascend packages for a test: importable inside it, gone after it; "npu" is the CPU."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import torchgraft.compat
from torchgraft.compat import device, notes, settings

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture
def ascend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder that the test runs in."""
    monkeypatch.setenv(device.VARIABLE, "cpu")
    monkeypatch.setenv(settings.MODE, "eager")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(notes, "_said", {})
    torchgraft.compat.install()
    device.activate()
    try:
        yield tmp_path
    finally:
        device.deactivate()
        torchgraft.compat.uninstall()


@pytest.fixture
def script(ascend: Path) -> Callable[[str], dict[str, Any]]:
    """Runs a script of `scripts` and gives its globals."""
    return lambda name: runpy.run_path(str(SCRIPTS / name), run_name="__main__")
