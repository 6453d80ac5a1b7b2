"""Progress is for a terminal: bars there, not a byte anywhere else."""

from __future__ import annotations

import os
import subprocess
import sys

import process
import pytest

from torchgraft import progress

pty = pytest.importorskip("pty", reason="there are no terminals of this kind here")

CODE = """
from torchgraft import progress
with progress.shown("compiling", ticks=False):
    with progress.shown("inside"):  # one display is enough
        for number in progress.each("pass", [10, 20], name=str):
            print("at", number)
for number in progress.each("later", [30]):
    print("at", number)
"""


def test_a_terminal_gets_bars() -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=theirs, env=env, text=True
    ) as child:
        os.close(theirs)
        seen = b""
        while True:
            try:
                if not (more := os.read(ours, 4096)):
                    break
            except OSError:  # how Linux says that the other side is closed
                break
            seen += more
        assert child.stdout is not None
        said = child.stdout.read()
    os.close(ours)
    assert child.returncode == 0, seen
    assert said == "at 10\nat 20\nat 30\n"  # the program's own output is as it was
    shown = seen.decode()
    for text in ("compiling", "pass 10", "pass 20", "0/2", "1/2", "━"):
        assert text in shown
    assert "inside" not in shown
    assert "later" not in shown


def test_nothing_else_gets_a_byte() -> None:
    done = process.run([sys.executable, "-c", CODE])
    assert (done.stdout, done.stderr) == ("at 10\nat 20\nat 30\n", "")


def test_work_that_stops_early_leaves_no_bar() -> None:
    for number in progress.each("looking", [1, 2, 3]):
        if number == 2:
            break
    assert number == 2
