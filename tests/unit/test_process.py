"""What the tests start programs with."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import process
import pytest

HANGS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(f"{child.pid}\\n")
def stuck():
    time.sleep(1000)
stuck()
"""


def test_a_program_that_hangs_is_ended_with_all_it_started_and_says_where(tmp_path: Path) -> None:
    program = process.start([sys.executable, "-c", HANGS, tmp_path / "child"])
    told = tmp_path / "child"
    while not (told.exists() and told.read_text().endswith("\n")):
        time.sleep(0.1)
    assert _runs(int(told.read_text()))
    with pytest.raises(AssertionError, match="not over after 1 s") as caught:
        process.finish(program, limit=1)
    assert "in stuck" in str(caught.value)
    while _runs(int(told.read_text())):  # a signal needs its time
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_program_that_fails_says_why() -> None:
    code = "import sys; sys.exit('because')"
    with pytest.raises(AssertionError, match="ended with 1\nbecause"):
        process.output([sys.executable, "-c", code])
