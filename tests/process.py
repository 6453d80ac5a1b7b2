"""Programs that tests start: none outlives its test, and one that hangs says where."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

LIMIT = 400.0
"""Seconds for one program, on a machine much slower than this one. A test has more from pytest."""
_LAST = 10.0
"""Seconds for a program to say where it is."""


def run(command: Sequence[object], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; what it said is text.

    Takes the options of `subprocess.Popen`. What it has started ends with it: a process that holds
    its output open is not waited for after `LIMIT`.
    """
    return finish(start(command, **options))


def output(command: Sequence[object], **options: Any) -> str:
    """What a program printed; one that fails raises with what it said of it."""
    done = run(command, **options)
    assert done.returncode == 0, f"{done.args} ended with {done.returncode}\n{done.stderr}"
    return done.stdout


def start(command: Sequence[object], **options: Any) -> subprocess.Popen[str]:
    """Start a program, to be waited for by `finish`."""
    env = {**(options.pop("env", None) or os.environ), "PYTHONFAULTHANDLER": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [*map(str, command)], env=env, text=True, start_new_session=True, **(pipes | options)
    )


def finish(
    program: subprocess.Popen[str], limit: float = LIMIT
) -> subprocess.CompletedProcess[str]:
    """Wait for a program. One that takes too long fails with the stacks of its threads."""
    try:
        out, err = program.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _signal(program, signal.SIGABRT)  # Python writes all stacks
        try:
            out, err = program.communicate(timeout=_LAST)
        except subprocess.TimeoutExpired:
            _signal(program, signal.SIGKILL)
            out, err = program.communicate()
        said = f"{out or ''}\n{err or ''}"[-8000:]
        raise AssertionError(f"not over after {limit:g} s: {program.args}\n{said}") from None
    finally:
        _signal(program, signal.SIGKILL)
    return subprocess.CompletedProcess(program.args, program.returncode, out, err)


def _signal(program: subprocess.Popen[str], number: int) -> None:
    """To the program and all it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, number)
