"""What the tests start programs with."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import process
import pytest

HANGS = """
import pathlib, subprocess, sys, time
code = "import sys, time; open(sys.argv[1], 'w'); time.sleep(1000)"
subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], start_new_session=True)
def stuck():
    time.sleep(1000)
stuck()
"""


def test_a_program_that_hangs_is_ended_with_all_it_started_and_says_where(tmp_path: Path) -> None:
    program = process.start([sys.executable, "-c", HANGS, tmp_path / "child"])
    while not (tmp_path / "child").exists():
        time.sleep(0.1)
    with pytest.raises(AssertionError, match="not over after 1 s") as caught:
        process.finish(program, limit=1)
    assert "in stuck" in str(caught.value)
    assert str(caught.value).count("Fatal Python error: Aborted") == 2  # its child's, too


def test_a_program_that_fails_says_why() -> None:
    code = "import sys; sys.exit('because')"
    with pytest.raises(AssertionError, match="ended with 1\nbecause"):
        process.output([sys.executable, "-c", code])
