"""A rank that never comes, one that stalls and one that dies: what the other one says.

torchrun's own processes only watch over the ranks, because torchrun would end the survivor before
it can say anything.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys

OUT, RANK = pathlib.Path(os.environ["OUT"]), int(os.environ["RANK"])
LONG, SHORT = datetime.timedelta(minutes=10), datetime.timedelta(seconds=3)


def watch() -> None:
    """Run the rank itself; torchrun hears of an unexpected end only."""
    ended = subprocess.call([sys.executable, __file__], env={**os.environ, "ITSELF": "1"})
    sys.exit(0 if ended == (-signal.SIGKILL if RANK == 1 else 0) else 1)


def itself() -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch.distributed import distributed_c10d as c10d

    from torchgraft.errors import CollectiveFailed

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LONG)
    store = c10d._get_default_store()
    x = torch.ones(4)
    said: dict[str, object] = {}
    for how in ("never comes", "stalls", "dies"):
        group = dist.new_group([0, 1], timeout=LONG, group_desc=how)

        def fn(x: torch.Tensor, group: object = group) -> torch.Tensor:
            return functional.all_reduce(x * 2, "sum", group).sum()

        run = torch.compile(fn, backend="torchgraft", mode="eager")
        if how != "never comes":
            assert run(x) == 16
        dist.barrier()
        if RANK == 1:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            store.wait([how], LONG)
            continue
        if how != "dies":  # nothing but the failure itself is to happen in a short time
            c10d._set_pg_timeout(SHORT, group)
        try:
            run(x)
        except CollectiveFailed as error:
            said[how] = {**vars(error), "message": str(error)}
        store.set(how, "reported")
    (OUT / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    itself() if "ITSELF" in os.environ else watch()
