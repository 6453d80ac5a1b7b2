"""The simulated device, each part in a process of its own: a process can have one such device."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import process
import pytest

HERE = Path(__file__).parent
SLOW = ("check_extension.py", "check_native.py", "check_ops.py")
PARTS = sorted(path.name for path in (HERE / "npu").glob("check_*.py"))
DEBUG = {"TORCHGRAFT_NPU_DEBUG": "1", "TORCHGRAFT_NPU_DEVICES": "2"}
SETTINGS = dict.fromkeys(("check_debug.py", "check_native.py", "check_plans.py"), DEBUG)


@pytest.mark.parametrize(
    "part", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in PARTS]
)
def test_the_simulated_device(part: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += ["-o", "python_files=check_*.py", str(HERE / "npu" / part)]
    env = os.environ | {"TORCHGRAFT_DEVICE": "npu"} | SETTINGS.get(part, {})
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), env.get("PYTHONPATH", "")])
    done = process.run(command, env=env, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_there_is_something_to_check() -> None:
    assert len(PARTS) >= 5
