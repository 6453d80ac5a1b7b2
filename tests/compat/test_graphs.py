"""Captured graphs where the CPU stands for the NPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import captures
import process
import pytest

ROOT = Path(__file__).parents[2]
LET_GO = """
import sys, time, torch, torch_npu
from torch import distributed
sys.setswitchinterval(1000)  # another thread gets Python's lock only where this one waits
for _ in range(20):
    distributed.init_process_group("hccl", store=distributed.HashStore(), rank=0, world_size=1)
    x, graph = torch.ones(3, device="npu"), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        distributed.all_reduce(x)
    group = distributed.group.WORLD
    distributed.destroy_process_group()
    group.allreduce([x])
    end = time.perf_counter() + 0.02
    while time.perf_counter() < end:
        pass  # it is done, and its thread wants the lock to give x back
    del group, graph
print("let go")
"""


@pytest.mark.feature(
    "torch_npu", "torch.npu.NPUGraph, graph, update, task groups: captured and replayed"
)
@pytest.mark.parametrize("name", captures.CHECKS)
def test_a_capture(ascend: Path, name: str) -> None:
    captures.CHECKS[name]()


def test_a_graph_that_is_the_last_to_hold_a_group_lets_it_go(tmp_path: Path) -> None:
    """Whoever is the last waits for the group's threads, and must not keep Python from them."""
    (tmp_path / "script.py").write_text(LET_GO)
    command = [sys.executable, "-m", "torchgraft", "run", "--device", "cpu", "script.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert process.output(command, cwd=tmp_path, env=env) == "let go\n"
