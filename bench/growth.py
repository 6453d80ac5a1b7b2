"""How compile time and memory grow with the graph, calls from several threads, and memory over
many calls."""

from __future__ import annotations

import dataclasses
import gc
import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn

SIZES = (100, 500, 1_000, 5_000, 10_000, 50_000)


@dataclasses.dataclass(frozen=True)
class Growth:
    """One graph compiled in a fresh process, on ATen: torch.export apart, then our own part."""

    nodes: int
    export_s: float
    ours_s: float
    peak_mib: float
    launches: int

    @property
    def per_node_us(self) -> float:
        return self.ours_s / self.nodes * 1e6


class Long(nn.Module):
    """Branches of small products and light calls: `nodes` calls, four branches wide."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.count = nodes
        self.weight = nn.Parameter(torch.eye(4) * 0.5, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        done = 0
        while done < self.count:
            parts = []
            for branch in range(4):
                y = torch.mm(x, self.weight)
                for step in range(5):
                    y = torch.relu(y + float(step + branch))
                parts.append(y)
            x = (parts[0] + parts[1]) * 0.5 + (parts[2] - parts[3]) * 0.5
            done += 4 * 11 + 5
        return x


def grow(nodes: int, streams: str = "off") -> Growth:
    """Compile in this process."""
    import torchgraft as graft

    torch.set_num_threads(1)
    args = (torch.ones(2, 4),)
    start = time.process_time()
    exported = torch.export.export(Long(nodes), args)
    captured = time.process_time()
    compiled = graft.compile(exported, mode="eager", streams=streams)
    made = time.process_time()
    count = len(compiled.report.nodes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Growth(count, captured - start, made - captured, peak, len(compiled.plan.launches))


def grow_apart(nodes: int, streams: str = "off") -> Growth:
    """The same in a process of its own: peak memory is a process's."""
    command = [sys.executable, "-m", "bench.growth", str(nodes), streams]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Growth(**json.loads(done.stdout.splitlines()[-1]))


@dataclasses.dataclass(frozen=True)
class Rate:
    """Calls a second of one compiled program from several threads."""

    threads: int
    calls_per_s: float


def rate(threads: int, seconds: float = 2.0, mode: str = "default") -> Rate:
    """Each thread calls one small compiled program for some seconds; every answer is checked."""
    import torchgraft as graft

    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    x = torch.randn(1, 64)
    compiled = graft.compile(model, (x,), mode=mode)
    want = compiled(x).clone()
    counts, wrong = [0] * threads, list[str]()
    ready, end = threading.Barrier(threads + 1), threading.Event()

    def work(number: int) -> None:
        ready.wait()
        with torch.inference_mode():
            while not end.is_set():
                for _ in range(100):
                    got = compiled(x)
                counts[number] += 100
                if not torch.equal(got, want):
                    wrong.append(f"thread {number}")
                    return

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    start = time.perf_counter()
    time.sleep(seconds)
    end.set()
    for worker in workers:
        worker.join()
    took = time.perf_counter() - start
    if wrong:
        raise AssertionError(f"another answer in {', '.join(wrong)}")
    return Rate(threads, sum(counts) / took)


@dataclasses.dataclass(frozen=True)
class Held:
    """Resident memory of the process after so many calls, and what Python's collector tracks."""

    calls: int
    mib: float
    objects: int


def resident() -> float:
    """MiB of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def hold(calls: int, points: int = 10, mode: str = "default") -> list[Held]:
    """Resident memory at some points of many calls, the first after warming up."""
    import torchgraft as graft

    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    inputs = [torch.randn(1, 64) for _ in range(8)]
    compiled = graft.compile(model, (inputs[0],), mode=mode)
    found, done = list[Held](), 0
    with torch.inference_mode():
        for i in range(1000):
            compiled(inputs[i % 8])
        for point in range(points + 1):
            while done < point * calls // points:
                compiled(inputs[done % 8])
                done += 1
            gc.collect()
            found.append(Held(done, resident(), len(gc.get_objects())))
    return found


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(grow(int(sys.argv[1]), sys.argv[2]))))
