"""The demo runs to its end and its own checks hold."""

from __future__ import annotations

import pathlib
import sys

import process
import pytest

DEMO = pathlib.Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.mark.slow
def test_the_demo_agrees_with_eager() -> None:
    done = process.run([sys.executable, DEMO])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "addmm.default 12 8" in lines  # two attention layers, each with two products less
    assert any(line.startswith("merge_projections post") for line in lines)
    assert "gradient ok" in lines  # of its operator
    assert any("launched as itself: cpu python kernel" in line for line in lines)
    assert lines[-1] == "All results agree."
