"""What every program of these tests is made of: checks that run in order on each rank.

Each rank writes what became of its checks to a file of its own. It stops at the first that fails,
so that torchrun ends the others instead of letting them wait.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

from torchgraft.errors import GraftError

CHECKS: dict[str, Callable[[], None]] = {}
TIMEOUT = datetime.timedelta(seconds=int(os.environ.get("GROUP_TIMEOUT", "300")))


def check(fn: Callable[[], None]) -> Callable[[], None]:
    CHECKS[fn.__name__] = fn
    return fn


def raised(fn: Callable[[], object], kind: type[Exception] = GraftError) -> Exception:
    try:
        fn()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    results: dict[str, str] = {}
    try:
        for name, fn in CHECKS.items():
            torch.manual_seed(0)
            torch._dynamo.reset()
            fn()
            results[name] = "ok"
            dist.barrier()
    except BaseException:
        results[name] = traceback.format_exc()
        traceback.print_exc()
        raise
    finally:
        out = pathlib.Path(os.environ["OUT"]) / f"rank{os.environ['RANK']}.json"
        out.write_text(json.dumps(results))
    dist.destroy_process_group()
    sys.stdout.flush()
