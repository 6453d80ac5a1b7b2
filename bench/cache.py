"""How long a program takes from nothing, from the cache, and from a file: `python -m bench.cache`.

One process per row; capture is timed by itself, because every hit begins with it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torchgraft as graft
from bench.models import build
from torchgraft.compile import captured_for


def timed(fn: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = fn()
    return time.perf_counter() - start, result


def row(name: str) -> str:
    case = build(name)
    model, args = case.model, case.args
    config = graft.Config()
    with tempfile.TemporaryDirectory() as folder:
        graft.compile(lambda x: x + 1, (torch.ones(2),))  # what every process pays once
        capture, _ = timed(lambda: captured_for(model, args, None, config))
        cold, _ = timed(lambda: graft.compile(model, args))
        miss, _ = timed(lambda: graft.compile(model, args, cache_dir=folder))
        hit, found = timed(lambda: graft.compile(model, args, cache_dir=folder))
        assert found.report.notes[-1].startswith("cache hit"), found.report.notes
        [path] = Path(folder).glob("*.graft")
        load, loaded = timed(lambda: graft.load(path))
        size = path.stat().st_size / 1e6
        compiled = graft.compile(model, args)
        calls = [min(timed(lambda f=f: f(*args))[0] for _ in range(10)) for f in (compiled, loaded)]
    return (
        f"| {name} | {capture:.2f} | {cold:.1f} | {miss:.1f} | {hit:.2f} | {hit / miss:.0%} | "
        f"{load:.2f} ({size:.0f} MB) | {calls[0] * 1e3:.1f} | {calls[1] * 1e3:.1f} |"
    )


if __name__ == "__main__":
    print("| model | capture | compile | miss | hit | hit/miss | load | ms compiled | ms loaded |")
    for name in sys.argv[1:] or ["resnet50", "bert"]:
        print(row(name), flush=True)
