"""The main job, start to end, on a small transformer encoder: `python examples/demo.py`.

A pass of our own merges the three projections of each attention layer into one. The demo shows
what came in, what every pass changed, what runs, how exact it is and how long a call takes, trains
through torch.compile, and declares an operator. It exits with 1 when a number is wrong.
"""

from __future__ import annotations

import collections
import copy
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import torchgraft as graft

aten = torch.ops.aten
console = Console(width=100, highlight=False, markup=False)


# --- The model: plain PyTorch, random weights ---


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(p(x)) for p in (self.query, self.key, self.value))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.one(x))
        return x + self.down(F.silu(self.up(self.two(x))))


class Clip(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.demo.soft_clip(x, 0.5)


# --- Our pass: three matrix products of one input are one product of three times the width ---


@graft.fx_pass(register=False)
def merge_projections(graph: graft.Graph) -> None:
    """Linear layers that read the same input become one; the results are slices of it."""
    readers: dict[object, list[torch.fx.Node]] = collections.defaultdict(list)
    for node in graph.all(aten.addmm.default):
        readers[node.args[1]].append(node)
    for shared, nodes in readers.items():
        weights = [arg for node in nodes for arg in (node.args[0], node.args[2])]
        if len(nodes) < 2 or any(weight.op != "get_attr" for weight in weights):
            continue
        with graph.before(nodes[0]):
            bias = graph.call(aten.cat.default, [node.args[0] for node in nodes])
            weight = graph.call(aten.cat.default, [node.args[2] for node in nodes], 1)
            merged = graph.call(aten.addmm.default, bias, shared, weight)
            ends = [0, *itertools.accumulate(node.meta["val"].shape[1] for node in nodes)]
            parts = [
                graph.call(aten.slice.Tensor, merged, 1, start, end)
                for start, end in itertools.pairwise(ends)
            ]
        for node, part in zip(nodes, parts, strict=True):
            graph.replace(node, part)


# --- Our operator: its body is all there is to write ---


@graft.op("demo::soft_clip")
def soft_clip(x: Tensor, limit: float = 1.0) -> Tensor:
    """x, bent smoothly so that it stays between -limit and limit."""
    return limit * torch.tanh(x / limit)


@soft_clip.kernel("cpu")
def _(x: Tensor, limit: float = 1.0) -> Tensor:
    return (x / limit).tanh_().mul_(limit)


# --- What we show ---


def heading(text: str) -> None:
    console.print(f"\n{text}", style="bold")


def show(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    table = Table(box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


def counts(graph: graft.Graph) -> collections.Counter[str]:
    return collections.Counter(str(node.target.__name__) for node in graph.nodes)


def times(calls: dict[str, Callable[[], object]], rounds: int = 60) -> dict[str, float]:
    """Median milliseconds of each call; the calls take turns, so that noise hits all alike."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 5):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number >= 5:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) * 1e3 for name, each in taken.items()}


def worst(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs().max())


def main() -> int:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(Layer(128, 4) for _ in range(2))).eval()
    x = torch.randn(1, 32, 128)
    wrong: list[str] = []

    def check(what: str, error: float, limit: float) -> str:
        if not error <= limit:
            wrong.append(f"{what}: {error:.1e} is more than {limit:.1e}")
        return f"{error:.1e}"

    heading("1. The program as it came in: which operators, how often")
    first: list[collections.Counter[str]] = []

    @graft.fx_pass(register=False)
    def look(graph: graft.Graph) -> None:
        first.append(counts(graph))

    start = time.perf_counter()
    compiled = graft.compile(
        model,
        (x,),
        pre_passes=[look],
        post_passes=[merge_projections],
        merge_branches=False,  # a built-in pass of the same kind would leave ours nothing to do
    )
    took = time.perf_counter() - start
    show(("operator", "came in", "runs"), operator_rows(first[0], counts(compiled.graph)))

    heading("2. What each pass changed")
    show(
        ("pass", "stage", "added", "removed", "changed", "nodes after"),
        [
            (s.name, s.stage, s.added, s.removed, s.changed, s.nodes)
            for s in compiled.report.steps
            if s.added or s.removed or s.changed
        ],
    )

    heading(f"3. What runs: the plan, compiled in {took:.1f} s")
    console.print(str(compiled.plan))

    with torch.no_grad():
        heading("4. How exact: the largest difference from the same model in float64")
        exact = copy.deepcopy(model).double()(x.double())
        limit = 64 * torch.finfo(torch.float32).eps * float(exact.abs().max())
        theirs, plain = torch.compile(model), graft.compile(model, (x,))
        calls = {
            "PyTorch, eager": lambda: model(x),
            "torch.compile": lambda: theirs(x),
            "torchgraft": lambda: plain(x),
            "torchgraft, our pass": lambda: compiled(x),
        }
        errors = {name: check(name, worst(call(), exact), limit) for name, call in calls.items()}
        show(("", "largest difference"), errors.items())
        console.print(f"Allowed: {limit:.1e}. The largest result is {exact.abs().max():.2f}.")

        heading("5. How long a call takes: median of 60, one thread, the calls take turns")
        medians = times(calls)
        base = medians["PyTorch, eager"]
        show(
            ("", "ms a call", "against eager"),
            [(n, f"{ms:.3f}", f"{base / ms:.2f}x") for n, ms in medians.items()],
        )
        console.print("torchgraft has a copy of the weights; torch.compile reads the module's.")

    heading('6. Training: torch.compile(model, backend="torchgraft") against eager gradients')
    twin = copy.deepcopy(model)
    torch.compile(model, backend="torchgraft")(x).square().mean().backward()
    twin(x).square().mean().backward()
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    largest = max(float(b.grad.abs().max()) for _, b in pairs)
    error = max(worst(a.grad, b.grad) for a, b in pairs)
    shown = check("gradients", error, 64 * torch.finfo(torch.float32).eps * largest)
    console.print(f"{len(pairs)} gradients, largest {largest:.1e}, largest difference {shown}.")
    for report in graft.reports()[-2:]:
        console.print(str(report).splitlines()[0], soft_wrap=True)

    heading("7. An operator of our own: one body, checked on every surface of torch")
    result = graft.check(soft_clip)
    show(("surface", "demo::soft_clip"), [(c.surface, c.status) for c in result.cells[1:]])
    wrong += [f"{miss.surface}: {miss.reason}" for miss in result.misses]
    clipped = graft.compile(nn.Sequential(model, Clip()), (x,))
    launched = [node for node in clipped.report.nodes if node.op == "demo.soft_clip.default"]
    console.print(f"In a compiled program: {launched[0].reason.partition(' at ')[0]}.")
    shown = check("clip", worst(clipped(x), exact.div(0.5).tanh().mul(0.5)), limit)
    console.print(f"Largest difference from float64 behind the encoder: {shown}.")

    heading("Wrong: " + "; ".join(wrong) if wrong else "All results agree.")
    return 1 if wrong else 0


def operator_rows(
    before: collections.Counter[str], after: collections.Counter[str]
) -> list[tuple[str, int, int]]:
    names = sorted(before | after, key=lambda op: -max(before[op], after[op]))
    rows = [(op, before[op], after[op]) for op in names]
    return [*rows, ("all", before.total(), after.total())]


if __name__ == "__main__":
    raise SystemExit(main())
