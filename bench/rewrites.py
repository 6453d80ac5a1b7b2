"""`python -m bench rewrites`: what matching patterns costs on a large graph."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import torchgraft as graft
from torchgraft import _torch
from torchgraft.passes import pipeline
from torchgraft.passes.pattern import trace

_STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "cos": torch.cos,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "scale": lambda x: x * 0.5,
    "shift": lambda x: x + 1.25,
}


def large(nodes: int) -> torch.fx.GraphModule:
    """A graph of about that many calls: the steps above in a fixed, irregular order."""
    mode = _torch.new_fake_mode()
    with mode:
        x = torch.empty(4, 8)
    order = [list(_STEPS.values())[(i * i + 3 * i) // 2 % len(_STEPS)] for i in range(nodes)]

    def body(x: Tensor) -> Tensor:
        for step in order:
            x = step(x)
        return x

    gm, _ = trace.graph(body, {"x": x}, mode)
    return gm


def patterns(count: int) -> list[Any]:
    """So many patterns of four calls; each has the graph's own operators, few occur."""
    made = []
    for chain in itertools.islice(itertools.product(_STEPS, repeat=4), 0, None, 19):
        if len(made) == count:
            break

        made.append(_pattern(f"chain{len(made)}", chain))
    return made


def _pattern(name: str, steps: Sequence[str]) -> Any:
    def chain(x: Tensor) -> Tensor:
        for step in steps:
            x = _STEPS[step](x)
        return x

    return graft.pattern(chain, name=name)


def run(nodes: int, count: int) -> None:
    """Print the CPU seconds of each part."""
    gm = large(nodes)
    with graft.Registry() as registry:
        start = time.process_time()
        patterns(count)
        registered = time.process_time() - start
        config = graft.Config(mode="eager", registry=registry)
        start = time.process_time()
        bare = pipeline.run(gm, (), config.replace(registry=graft.Registry()))
        without = time.process_time() - start
        start = time.process_time()
        steps = pipeline.run(gm, (), config)
        took = time.process_time() - start
    hits = sum(len(step.hits or ()) for step in steps)
    print(
        f"{bare[-1].nodes} nodes, {count} patterns, {hits} matches: {took:.2f} CPU s with them, "
        f"{without:.2f} s without; registering took {registered:.2f} s"
    )
