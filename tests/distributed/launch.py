"""Starting programs under torchrun."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

PROGRAMS = pathlib.Path(__file__).parent / "programs"
LIMIT = 900
"""Seconds for a whole program, on a machine much slower than this one."""


def torchrun(name: str, ranks: int, out: pathlib.Path, **more: str) -> str:
    """Run a program on so many gloo ranks; what it printed. Its children never outlive it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(PROGRAMS / f"{name}.py")]
    env = {**os.environ, "OUT": str(out), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        command,
        env={**env, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return f"{printed}\n(torchrun ended with {process.returncode})"


def results(out: pathlib.Path, ranks: int) -> list[dict[str, str]]:
    """What each rank wrote of its checks."""
    files = [out / f"rank{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]
