"""A race that looks like good code, and how it is found: `python examples/race.py [cuda]`.

mm and abs move to a side stream, and sub is told to wait for abs. Nobody told add, which reads abs
as well. Lowered as it is written, add reads memory that abs has not filled; torchgraft finds the
pair at compile time, names both lines, and adds the wait. It exits with 1 when a number is wrong.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

import torchgraft as graft

aten, air = torch.ops.aten, torch.ops.air
CALLS = 100


def model(x: Tensor) -> tuple[Tensor, Tensor]:
    mm = torch.mm(x, x)
    absolute = torch.abs(mm)
    add = torch.add(absolute, 1)
    sub = torch.sub(x, mm)
    return add, sub


def two_streams(gm: GraphModule, example_inputs: Any, config: Any) -> None:
    """The pass: mm and abs on a stream of their own, sub after abs."""
    graph = gm.graph
    calls = {node.target: node for node in graph.nodes if node.op == "call_function"}
    with graph.inserting_before(calls[aten.mm.default]):
        graph.call_function(air.scope_enter.default, (["_user_stream_label"], ["side"]))
    with graph.inserting_after(calls[aten.abs.default]):
        done = graph.call_function(air.record.default)
    with graph.inserting_after(done):
        graph.call_function(air.scope_exit.default)
    with graph.inserting_before(calls[aten.sub.Tensor]):
        graph.call_function(air.wait.default, ([done],))


# --- What the pass says and no more, lowered by hand ---


def naive_threads(x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """A stream is a thread; the buffers are there from the start, as in a captured graph."""
    rng = random.Random(seed)
    mm, absolute, add, sub = (torch.zeros_like(x) for _ in range(4))
    recorded = threading.Event()

    def side() -> None:
        time.sleep(rng.choice((0, 0.001)))
        torch.mm(x, x, out=mm)
        torch.abs(mm, out=absolute)
        recorded.set()

    worker = threading.Thread(target=side)
    worker.start()
    torch.add(absolute, 1, out=add)
    recorded.wait()
    torch.sub(x, mm, out=sub)
    worker.join()
    return add, sub


def naive_graph(x: Tensor) -> Any:
    """The same as one CUDA graph: fork, the wait that was asked for, join."""
    mm, absolute, add, sub = (torch.zeros_like(x) for _ in range(4))
    side = torch.cuda.Stream()
    torch.mm(x, x, out=mm)  # so that cuBLAS is set up before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.mm(x, x, out=mm)
            torch.abs(mm, out=absolute)
            recorded = side.record_event()
        torch.add(absolute, 1, out=add)
        main.wait_event(recorded)
        torch.sub(x, mm, out=sub)

    def call(x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        absolute.zero_()
        graph.replay()
        return add, sub

    return call


def wrong(call: Any, x: Tensor, want: Tensor) -> int:
    """How many calls give another `add`."""
    return sum(not torch.allclose(call(x, seed)[0], want, rtol=1e-3) for seed in range(CALLS))


def main() -> int:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    x = torch.randn(256, 256, device=device)
    want, _ = model(x)
    naive = naive_graph(x) if device == "cuda" else naive_threads
    print(f"as written: `add` is wrong in {wrong(naive, x, want)} of {CALLS} calls")

    mode = "reduce-overhead" if device == "cuda" else "default"
    bad = 0
    for seed in range(4):  # an adversary delays whatever the plan leaves open
        config = graft.Config(mode=mode, pre_passes=[two_streams], adversary=seed)
        compiled = graft.compile(model, (x,), config=config)
        bad += wrong(lambda x, _: compiled(x), x, want)  # noqa: B023
    print(f"torchgraft: `add` is wrong in {bad} of {4 * CALLS} calls, because")
    print("\n".join(f"  {n}" for n in compiled.report.notes if n.startswith("a wait was added")))
    print(f"\n{compiled.plan.timeline()}")
    return int(bad > 0 or bool(compiled.plan.hazards()))


if __name__ == "__main__":
    sys.exit(main())
