"""CPU seconds to compile, each in a fresh process with an empty cache; children are counted.

Every process first compiles a small graph with Inductor, frozen and not, outside the clock: finding
the compiler and loading the code generator are the same for all and are not what is compared.
Like is compared with like: `graph` and `graph-live` (weights not frozen) are graft.compile of an
exported program, `inductor-frozen` and `inductor` are Inductor alone on that same graph. `graft`
and `graft-live` start from the module, so they hold what `capture` (torch.export) takes, too.
On CUDA: float16, and ours in mode reduce-overhead, its first capture included. `offline` is CUDA
without a GPU, up to the first generated kernel (`bench/offline.py`).
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench import models, offline
from bench.measure import first_line

BASE = {
    "graph": "inductor-frozen",
    "graft": "inductor-frozen",
    "graph-live": "inductor",
    "graft-live": "inductor",
}
"""What Inductor alone does of the work of ours."""
WAYS = (
    "inductor-frozen",
    "graph",
    "graft",
    "inductor",
    "graph-live",
    "graft-live",
    "capture",
    "compile",
)


@dataclass(frozen=True)
class Cost:
    """Seconds until the first answer is there; `capture` is torch.export alone, no answer."""

    model: str
    way: str
    cpu_s: float | None
    wall_s: float | None
    note: str = ""


def _inductor(model: Any, args: models.Args, frozen: bool = False) -> Callable[[], object]:
    """Inductor alone: the exported graph is made here, outside the clock."""
    from torch._inductor import compile as compile_graph
    from torch._inductor import config

    graph = torch.export.export(model, args).module()

    def go() -> object:
        with config.patch(freezing=frozen):
            return compile_graph(graph, list(args))(*args)

    return go


def _prepare(way: str, case: models.Case, device: str) -> Callable[[], object]:
    """What to time; everything that should not be counted is done by now."""
    model, args = case.model, case.args
    mode = "default" if device == "cpu" else "reduce-overhead"
    if way.startswith("inductor"):
        return _inductor(model, args, frozen=way.endswith("frozen"))
    if way == "capture":
        return lambda: torch.export.export(model, args)  # type: ignore[arg-type]
    if way == "compile":
        return lambda: torch.compile(model)(*args)
    graft = importlib.import_module("torchgraft")
    freeze = not way.endswith("live")
    if way.startswith("graph"):
        exported = torch.export.export(model, args)  # type: ignore[arg-type]
        return lambda: graft.compile(exported, freeze=freeze, mode=mode)(*args)
    return lambda: graft.compile(model, inputs=args, freeze=freeze, mode=mode)(*args)


def _cpu() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def _here(model: str, way: str, device: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    try:
        count = offline.install() if device == "offline" else None
        where = "cuda" if device == "cuda" else "cpu"
        case = models.build(model).to(where, torch.float32 if device == "cpu" else torch.float16)
        small = torch.nn.Linear(4, 4, device=where), torch.ones(2, 4, device=where)
        with torch.no_grad():
            for frozen in (False, True):
                offline.until_kernels(_inductor(small[0], small[1:], frozen))()
            go = offline.until_kernels(_prepare(way, case, device))
            sync()
            if count is not None:
                count.clear()
            cpu, wall = _cpu(), time.perf_counter()
            go()
            sync()
        note = "" if count is None else str(count)
        return {"cpu_s": _cpu() - cpu, "wall_s": time.perf_counter() - wall, "note": note}
    except Exception as failure:  # whatever it is, it is this way's result
        return {"cpu_s": None, "wall_s": None, "note": first_line(failure)}


def best(model: str, ways: Sequence[str], rounds: int, device: str = "cpu") -> list[Cost]:
    """Each way's cheapest of some rounds. The ways take turns, so that a busy machine is busy for
    all of them."""
    costs = [measure(model, way, device) for _ in range(rounds) for way in ways]
    return [
        min((c for c in costs if c.way == way), key=lambda c: c.cpu_s or math.inf) for way in ways
    ]


def measure(model: str, way: str, device: str = "cpu", patience: float = 900.0) -> Cost:
    """The cost of one way on one model, in its own process and cache folder."""
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
            # Pool workers are never waited for, so their time would not be counted.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "bench.compiletime", model, way, device]
        try:
            done = subprocess.run(
                command,
                check=False,
                env=environment,
                capture_output=True,
                text=True,
                timeout=patience,
            )
        except subprocess.TimeoutExpired:
            return Cost(model, way, None, None, f"no answer in {patience:.0f} s")
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return Cost(model, way, None, None, f"exit code {done.returncode}")
    return Cost(model, way, **json.loads(lines[-1]))


if __name__ == "__main__":
    print(json.dumps(_here(*sys.argv[1:4])))
