"""How long a program takes from nothing, from the cache, and from a file: `python -m bench.cache`.

CPU seconds, compiler processes counted, so that other work on the machine does not show. A row has
a process of its own whose Inductor caches are empty: they would make a miss, not a hit, cheaper.
Capture is timed by itself, because every hit begins with it, and so is hashing the file, because
every load ends with it. What takes little time is done several times, and its median counts.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import resource
import statistics
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
    start = cpu()
    result = fn()
    return cpu() - start, result


def cpu() -> float:
    """CPU seconds of this process and of the compilers that it waited for."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def median(fn: Callable[[], Any], rounds: int = 5) -> float:
    return statistics.median(timed(fn)[0] for _ in range(rounds))


def hashed(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.sha256(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).hexdigest()


def row(name: str) -> str:
    case = build(name)
    model, args = case.model, case.args
    config = graft.Config()
    with tempfile.TemporaryDirectory() as folder:
        graft.compile(lambda x: x + 1, (torch.ones(2),))  # what every process pays once
        capture = median(lambda: captured_for(model, args, None, config))
        miss, _ = timed(lambda: graft.compile(model, args, cache_dir=folder))
        hit = median(lambda: graft.compile(model, args, cache_dir=folder))
        found = graft.compile(model, args, cache_dir=folder)
        assert found.report.notes[-1].startswith("cache hit"), found.report.notes
        [path] = Path(folder).glob("*.graft")
        load, plain = median(lambda: graft.load(path)), median(lambda: hashed(path))
        cold, _ = timed(lambda: graft.compile(model, args))
        size = path.stat().st_size / 1e6
    return (
        f"| {name} | {capture:.2f} | {cold:.1f} | {miss:.1f} | {hit:.2f} | {hit / cold:.0%} | "
        f"{hit / miss:.0%} | {load:.3f} ({size:.0f} MB) | {plain:.3f} |"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--row"]:
        print(row(sys.argv[2]))
        sys.exit()
    print(
        "| model | capture | compile | miss | hit | hit/compile | hit/miss | load | its SHA-256 |"
    )
    for name in sys.argv[1:] or ["mlp", "tiny_cnn", "resnet50", "bert"]:
        with tempfile.TemporaryDirectory() as caches:
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": caches}
            command = [sys.executable, "-m", "bench.cache", "--row", name]
            subprocess.run(command, check=True, env=environment)
