"""Programs that tests start: none outlives its test, and one that hangs says where."""

from __future__ import annotations

import contextlib
import os
import pathlib
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

    Takes the options of `subprocess.Popen`. Its end is also that of whoever has its output: one
    that it has started and left is ended after `LIMIT`, too.
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
        said = _last_words(program)
        raise AssertionError(f"not over after {limit:g} s: {program.args}\n{said}") from None
    finally:
        _signal(signal.SIGKILL, _started_by(program.pid))
    return subprocess.CompletedProcess(program.args, program.returncode, out, err)


def finish_all(programs: Sequence[subprocess.Popen[str]]) -> list[subprocess.CompletedProcess[str]]:
    """Wait for programs that run beside each other; where one fails to end, none goes on."""
    try:
        return [finish(program) for program in programs]
    finally:
        for program in programs:
            _signal(signal.SIGKILL, _started_by(program.pid))


def _last_words(program: subprocess.Popen[str]) -> str:
    """End a program and all it has started. Those in Python write the stacks of their threads."""
    family = _started_by(program.pid)
    for number in (signal.SIGABRT, signal.SIGKILL):
        _signal(number, family)
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, err = program.communicate(timeout=_LAST)
            return f"{out or ''}\n{err or ''}"[-12000:]
    return "and did not end when it was killed"


def _started_by(pid: int) -> set[int]:
    """A process, its group, and whoever descends from these: torchrun puts each of its ranks in a
    group of its own."""
    parents: dict[int, tuple[int, int]] = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parent, group = path.read_text().rpartition(")")[2].split()[1:3]
            parents[int(path.parent.name)] = int(parent), int(group)
    family = {one for one, (_, group) in parents.items() if pid in (one, group)}
    while more := {one for one, (up, _) in parents.items() if up in family} - family:
        family |= more
    return family


def _signal(number: int, pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
