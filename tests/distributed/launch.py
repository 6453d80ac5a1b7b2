"""Starting programs under torchrun."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import process

PROGRAMS = pathlib.Path(__file__).parent / "programs"


def torchrun(name: str, ranks: int, out: pathlib.Path, **more: str) -> str:
    """Run a program on so many gloo ranks; what it printed, also where it had to be ended: one
    start is for many tests, and must not be waited for again by each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(PROGRAMS / f"{name}.py")]
    env = {**os.environ, "OUT": str(out), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    try:
        done = process.run(command, env={**env, **more}, stderr=subprocess.STDOUT)
    except AssertionError as error:
        return str(error)
    return f"{done.stdout}\n(torchrun ended with {done.returncode})"


def results(out: pathlib.Path, ranks: int) -> list[dict[str, str]]:
    """What each rank wrote of its checks."""
    files = [out / f"rank{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]
