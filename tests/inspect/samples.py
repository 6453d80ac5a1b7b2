"""Programs that the tests of pages, dumps and traces look at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import torchgraft as graft

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return x + self.down(hidden * torch.sigmoid(hidden))


class Stack(nn.Module):
    def __init__(self, depth: int, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.cumsum(0)


@graft.pattern(register=False)
def gate(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


@gate.replace
def _(m: graft.Match) -> Tensor:
    return m.x / (1 + torch.exp(-m.x))


@graft.pattern(register=False)
def never(x: Tensor) -> Tensor:
    return torch.tanh(x * torch.sigmoid(x))


@never.replace
def _(m: graft.Match) -> Tensor:
    return m.x


@graft.fx_pass(register=False)
def twice(graph: graft.Graph) -> None:
    """x + y becomes y + x + 0."""
    for node in graph.all(aten.add.Tensor):
        with graph.before(node):
            swapped = graph.call(aten.add.Tensor, *reversed(node.args))
            zero = graph.call(aten.mul.Tensor, swapped, 1.0)
        graph.replace(node, zero)


@graft.converter(aten.cumsum.default, register=False)
def refuse(net: graft.Net, x: graft.Value, dim: int, *, dtype: object = None) -> graft.Value:
    raise graft.Declined("not today </script>")


def compiled(depth: int = 2, **fields: object) -> graft.Compiled:
    settings: dict[str, object] = {
        "mode": "eager", "patterns": [gate, never], "post_passes": [twice], "converters": [refuse],
    }  # fmt: skip
    return graft.compile(Stack(depth), (torch.ones(3, 4),), **{**settings, **fields})


def large(count: int, steps: int = 10) -> dict[str, Any]:
    """The data of a report on a chain of so many nodes in modules, and on passes that each change
    a tenth of them; no compile would be quick enough for a test."""
    data = compiled(depth=1).report.data()
    names = [f"node_{i}" for i in range(count)]
    every = range(count)
    data["versions"] = {
        "name": names + names[:: count // 500],
        "kind": ["call"] * (count + 500),
        "op": ["aten.sin.default"] * count + ["aten.cos.default"] * 500,
        "type": ["f32[8, 128, 768]"] * (count + 500),
        "args": [f"node_{max(i - 1, 0)}, {i}" for i in every] + ["x"] * 500,
        "inputs": [[f"node_{i - 1}"] if i else [] for i in every] + [[]] * 500,
        "module": [f"layers.{i // 100}.part.{i % 100 // 10}" for i in every] + [""] * 500,
        "line": [f"/home/user/models/model.py:{i % 700}" for i in every] + [""] * 500,
    }
    data["final"] = list(every)
    step = {**data["steps"][0], "added": 0, "removed": 0, "changed": 500}
    diff = {"added": [], "removed": [], "changed": list(range(count, count + 500))}
    data["steps"] = [{**step, "name": f"pass_{i}", "diff": diff} for i in range(steps)]
    data["plan"]["kernels"] = [
        {**data["plan"]["kernels"][0], "name": "aten.sin.default", "nodes": [name]}
        for name in names
    ]
    span = {"kernel": "aten.sin.default", "stream": "main", "critical": True}
    data["plan"]["predicted"] = {
        "streams": ["main"],
        "seconds": count * 1e-6,
        "spans": [{**span, "index": i, "start": i * 1e-6, "end": (i + 1) * 1e-6} for i in every],
        "arrows": [],
        "memory": [[i * 1e-6, 4096 + i % 2] for i in every],
    }
    return data
