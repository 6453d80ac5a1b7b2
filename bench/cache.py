"""How long a program takes from nothing, from the cache, and from a file: `python -m bench.cache`.

CPU seconds, compiler processes counted, so that other work on the machine does not show. A row has
a process of its own whose Inductor caches are empty: they would make a miss, not a hit, cheaper.
Capture is timed by itself, because every hit begins with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its compilers are children then

import torch

import torchgraft as graft
from bench.models import build
from torchgraft.compile import captured_for


def timed(fn: Callable[[], Any]) -> tuple[float, Any]:
    start = sum(os.times()[:4])
    result = fn()
    return sum(os.times()[:4]) - start, result


def row(name: str) -> str:
    case = build(name)
    model, args = case.model, case.args
    config = graft.Config()
    with tempfile.TemporaryDirectory() as folder:
        graft.compile(lambda x: x + 1, (torch.ones(2),))  # what every process pays once
        capture, _ = timed(lambda: captured_for(model, args, None, config))
        miss, _ = timed(lambda: graft.compile(model, args, cache_dir=folder))
        hit, found = timed(lambda: graft.compile(model, args, cache_dir=folder))
        assert found.report.notes[-1].startswith("cache hit"), found.report.notes
        [path] = Path(folder).glob("*.graft")
        load, _ = timed(lambda: graft.load(path))
        cold, _ = timed(lambda: graft.compile(model, args))
        size = path.stat().st_size / 1e6
    return (
        f"| {name} | {capture:.2f} | {cold:.1f} | {miss:.1f} | {hit:.2f} | {hit / miss:.0%} | "
        f"{hit / cold:.0%} | {load:.2f} ({size:.0f} MB) |"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--row"]:
        print(row(sys.argv[2]))
        sys.exit()
    print("| model | capture | compile | miss | hit | hit/miss | hit/compile | load |")
    for name in sys.argv[1:] or ["mlp", "tiny_cnn", "resnet50", "bert"]:
        with tempfile.TemporaryDirectory() as caches:
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": caches}
            command = [sys.executable, "-m", "bench.cache", "--row", name]
            subprocess.run(command, check=True, env=environment)
