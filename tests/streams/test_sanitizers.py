"""Programs over several streams under sanitizers: torch's own, which knows of streams and events,
and NVIDIA's racecheck, which looks into kernels. Each has a control that it must find."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys

import process
import pytest

pytestmark = [pytest.mark.cuda, pytest.mark.slow]
HERE = pathlib.Path(__file__).parent
FOUND = 9
RACECHECK = ["compute-sanitizer", "--tool", "racecheck", "--error-exitcode", str(FOUND)]
RACECHECK += ["--target-processes", "application-only"]
needs_racecheck = pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer"
)


def run(what: str, *more: str, under: list[str] | None = None) -> tuple[int, str]:
    """The exit code of a program of `sanitized.py`, and all that it and its sanitizer said."""
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHGRAFT_EXECUTOR": "python"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), env.get("PYTHONPATH", "")])
    command = [*(under or []), sys.executable, str(HERE / "sanitized.py"), what, *more]
    done = process.run(command, env=env)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("what", ["launched", "captured"])
def test_torchs_sanitizer_finds_nothing(what: str) -> None:
    code, said = run(what, "torch")
    assert code == 0, said[-6000:]
    assert "ran to its end" in said
    assert "CSAN detected" not in said, said[-6000:]


def test_torchs_sanitizer_finds_a_wait_left_out() -> None:
    code, said = run("plan", "torch")
    assert code != 0, said[-6000:]
    assert "CSAN detected a possible data race" in said, said[-6000:]
    code, said = run("plan")
    assert (code, "ran to its end" in said) == (0, True), said[-6000:]  # it does not fail by itself


@needs_racecheck
@pytest.mark.parametrize("what", ["launched", "captured"])
def test_racecheck_finds_nothing(what: str) -> None:
    code, said = run(what, under=RACECHECK)
    assert code == 0, said[-6000:]
    assert "ran to its end" in said
    assert "RACECHECK SUMMARY: 0 hazards" in said, said[-6000:]


@needs_racecheck
def test_racecheck_finds_a_race_in_shared_memory() -> None:
    code, said = run("kernel", under=RACECHECK)
    assert code == FOUND, said[-6000:]
    assert "RACECHECK SUMMARY: 0 hazards" not in said, said[-6000:]
