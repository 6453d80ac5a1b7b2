"""Conversion by size of the graph: `python -m bench converters`. It should be a straight line."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.fx import Graph, GraphModule

import torchgraft as graft
from torchgraft import _torch
from torchgraft.convert.run import convert

aten = torch.ops.aten
SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)


def chain(count: int) -> GraphModule:
    """A graph of `count` calls, half of them for a converter, in our dialect."""
    mode = _torch.fake_mode_of([])
    graph, fake = Graph(), _torch.fake_of(mode, torch.ones(4))
    node = graph.placeholder("x")
    node.meta["val"] = fake
    for i in range(count):
        node = graph.call_function(aten.sin.default if i % 2 else aten.cos.default, (node,))
        node.meta["val"] = fake
    graph.output((node,))
    gm = GraphModule(torch.nn.Module(), graph)
    gm.meta["fake_mode"] = mode
    return gm


def seconds(count: int) -> float:
    """CPU seconds that the conversion of every second call takes."""
    with graft.Registry():

        @graft.converter(aten.sin.default)
        def sin(net: graft.Net, x: graft.Value) -> Any:
            return net.add(aten.cos.default, net.add(aten.sub.Tensor, x, torch.pi / 2))

        gm, config = chain(count), graft.Config()
        start = time.process_time()
        convert(gm, config)
        return time.process_time() - start


def run() -> None:
    """Print the CPU seconds for graphs of up to 50,000 nodes."""
    seconds(100)
    print("| nodes | seconds | µs a node |\n|---|---|---|")
    for count in SIZES:
        took = seconds(count)
        print(f"| {count:,} | {took:.2f} | {took / count * 1e6:.0f} |")
