"""`graft.simulate` against gloo ranks of this machine, and what it says about many GPUs.

The block is a transformer's, tensor parallel: every rank has some heads and some hidden units, and
two sums over the ranks join them. In two halves of the batch, one half's sum goes on while the
other half is computed.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchgraft as graft
from torchgraft.fx.cost import Cost, Machine
from torchgraft.inspect.profile import Stopwatch
from torchgraft.plan import MAIN, Buffer, Collective, Launch, Plan, Record, Wait
from torchgraft.simulate import Cluster, Link, Simulation, simulate
from torchgraft.stream.order import schedule

WARM_UP = 2
SIZES = [1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20]
"""Bytes of the sums that a link is fitted to."""


class Block(nn.Module):
    def __init__(self, width: int, head: int = 32) -> None:
        super().__init__()
        self.head = head
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out, self.up = nn.Linear(width, width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.one(x)
        parts = (p(y).view(batch, length, -1, self.head) for p in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(nn.functional.gelu(self.up(self.two(x))))


class Halves(nn.Module):
    """Blocks over parts of the batch, which need each other nowhere."""

    def __init__(self, blocks: int, width: int, parts: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.blocks(part) for part in x.chunk(self.parts)])


@dataclasses.dataclass(frozen=True)
class Size:
    """What is run: batch and length of the input, its width, how many blocks."""

    batch: int = 2
    length: int = 256
    width: int = 256
    blocks: int = 2
    mode: str = "eager"
    calls: int = 50


@dataclasses.dataclass(frozen=True)
class Run:
    """Calls of a plan on all ranks at once, by one clock: they are processes of one machine."""

    plan: str
    seconds: list[float]
    """Of each call, from the first rank's start to the last one's end."""
    launches: list[list[list[float]]]
    """Of each call, for each rank: how long each launch took. The first launch counts from the
    first rank's start."""

    def simulated(self, cluster: Cluster) -> float:
        """The mean of what the model says to the same calls: kernels as they were, links of its
        own."""
        plan = Plan.parse(self.plan)
        return statistics.mean(simulate(plan, cluster, call).seconds for call in self.launches)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What some gloo ranks did."""

    ranks: int
    sums: list[tuple[int, int, float]]
    """The ranks of an all_reduce (two of them, and all), its bytes, and its seconds since the last
    rank came: means."""
    overlap: Run
    serial: Run
    """The same plan with everything on one stream."""

    def link(self, ranks: int) -> Link:
        """What sums of so many of the ranks come down to."""
        return Link.fit([("all_reduce", n, p, took) for p, n, took in self.sums if p == ranks])

    def cluster(self, link: Link) -> Cluster:
        return Cluster(self.ranks, link, algorithm="ring")  # as gloo sums


def measure(ranks: int, size: Size = Size()) -> Measured:  # noqa: B008 (frozen)
    """Start so many gloo ranks here, and measure sums alone and a tensor-parallel block."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, folder, size), nprocs=ranks)  # type: ignore[no-untyped-call]
        data = json.loads((pathlib.Path(folder) / "measured.json").read_text())
    sums = [tuple(one) for one in data["sums"]]
    return Measured(ranks, sums, Run(**data["overlap"]), Run(**data["serial"]))  # type: ignore[arg-type]


def _rank(rank: int, ranks: int, folder: str, size: Size) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    method = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    model = Halves(size.blocks, size.width, parts=2)
    layout: Any = {}
    for i in range(size.blocks):
        layout |= {f"blocks.{i}.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
        layout |= {f"blocks.{i}.{name}": RowwiseParallel() for name in ("out", "down")}
    x = torch.randn(size.batch, size.length, size.width)
    split = parallelize_module(model, mesh, layout)
    with torch.no_grad():
        compiled = graft.compile(split, (x,), mode=size.mode)
        torch.testing.assert_close(compiled(x), split(x), atol=1e-3, rtol=1e-3)
        program, values = compiled.program_for((x,))
        programs = [program, dataclasses.replace(program, plan=_serial(program.plan))]
        watches = [Stopwatch(one) for one in programs]
        groups = {2: dist.new_group([0, 1]), ranks: dist.group.WORLD}
        sums = [(count, torch.ones(nbytes // 4)) for count in groups for nbytes in SIZES]
        work = torch.ones(512, 512)
        own: list[list[tuple[float, list[float]]]] = [[] for _ in (*watches, *sums)]
        for _ in range(WARM_UP + size.calls):  # in turns: load falls on all alike
            for i, watch in enumerate(watches):
                dist.barrier()
                spans = watch(list(values))[1].spans
                times = [span.end - span.start for span in spans]
                own[i].append((watch.clock.start, [*times, max(span.end for span in spans)]))
            for i, (count, given) in enumerate(sums, len(watches)):
                dist.barrier()
                if rank < count:
                    work @ work  # a program has computed when it comes to a sum
                    start = time.perf_counter()
                    _sum(given, groups[count])
                    own[i].append((start, [time.perf_counter() - start]))
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, own)
    if rank == 0:
        runs = [_run(one.plan, _calls(every, i)) for i, one in enumerate(programs)]
        means = [
            (count, given.nbytes, statistics.mean(map(_last, _calls(every[:count], i))))
            for i, (count, given) in enumerate(sums, len(runs))
        ]
        text = json.dumps(dataclasses.asdict(Measured(ranks, means, *runs)))
        (pathlib.Path(folder) / "measured.json").write_text(text)
    dist.barrier()
    dist.destroy_process_group()


Call = tuple[tuple[float, list[float]], ...]
"""For each rank: when it began, and the seconds of each launch and of the whole."""


def _calls(every: Sequence[Any], way: int) -> list[Call]:
    """What each rank measured of one way, call by call."""
    return list(zip(*(own[way][WARM_UP:] for own in every), strict=True))


def _run(plan: Plan, calls: Sequence[Call]) -> Run:
    seconds, launches = [], []
    for call in calls:
        begin = min(start for start, _ in call)
        seconds.append(max(start + times[-1] for start, times in call) - begin)
        launches.append([[times[0] + start - begin, *times[1:-1]] for start, times in call])
    return Run(str(plan), seconds, launches)


def _last(call: Call) -> float:
    """A sum, from when the last rank has come to it."""
    return max(start + times[-1] for start, times in call) - max(start for start, _ in call)


def _sum(given: Tensor, group: Any) -> Tensor:
    made = functional.all_reduce(given, "sum", group)
    return functional.wait_tensor(made)


def _serial(plan: Plan) -> Plan:
    """A plan with everything on the caller's stream."""
    steps = [
        dataclasses.replace(step, stream=MAIN)
        for step in plan.steps
        if not isinstance(step, (Record, Wait))
    ]
    return dataclasses.replace(plan, steps=tuple(steps))


# ---------------------------------------------------------------- on paper


GPU = Machine(bandwidth=0.7 * 4.8e12, flops=0.6 * 989e12, launch=3e-6)
NEAR = Link(alpha=2e-6, beta=1 / (0.8 * 450e9))
FAR = Link(alpha=6e-6, beta=1 / (0.8 * 50e9))
"""Vendors' figures of an H200, NVLink and a 400 Gb/s card for each GPU, times the share that
programs commonly reach; alphas are assumed. docs/scale.md says more."""


@dataclasses.dataclass(frozen=True)
class Paper:
    """A tensor-parallel block, and the machine that it runs on. Nothing of it is measured."""

    sequences: int
    new: int  # tokens of each that are computed
    context: int  # tokens that each of them looks at, at most
    width: int = 8192
    blocks: int = 4
    gpu: Machine = GPU
    link: Link = NEAR
    node: int = 8
    between: Link = FAR

    def cluster(self, ranks: int) -> Cluster:
        return Cluster(ranks, self.link, min(self.node, ranks), self.between)

    def simulated(self, ranks: int, parts: int) -> Simulation:
        """The blocks on so many GPUs, the batch in so many parts."""
        launches = list(self._launches(ranks, parts))
        outputs = tuple(launch.outputs[0] for launch, _ in launches[-parts:])
        inputs = tuple(Buffer(i) for i in range(parts))
        plan = schedule(inputs, (), [launch for launch, _ in launches], outputs)
        return simulate(plan, self.cluster(ranks), [seconds for _, seconds in launches])

    def _launches(self, ranks: int, parts: int) -> Iterator[tuple[Launch, float]]:
        """In the order that a plan has them: the parts take turns."""
        sequences, width = self.sequences // parts, self.width
        tokens = sequences * self.new
        rows = 2 * tokens * width  # bytes of the activations, bfloat16
        seen = tokens * (self.context - self.new / 2)  # causal: of the new ones, half
        kept = 2 * 2 * sequences * self.context * width / ranks  # keys and values
        work = {
            "norm": [Cost(4 * rows, 0)],
            "attention": [
                self._product(tokens, width, 3 * width / ranks),
                Cost(int(kept + 2 * rows / ranks), int(4 * seen * width / ranks)),
                self._product(tokens, width / ranks, width),
            ],
            "mlp": [
                self._product(tokens, width, 4 * width / ranks),
                self._product(tokens, 4 * width / ranks, width),
            ],
        }
        took = {
            name: sum(max(self.gpu.launch, self.gpu.seconds(cost)) for cost in costs)
            for name, costs in work.items()
        }
        now = [Buffer(i) for i in range(parts)]
        count = parts
        for _ in range(self.blocks):
            for stage in ("attention", "mlp"):
                for part in range(parts):
                    for kernel in ("norm", stage):
                        made = Buffer(count)
                        yield Launch(kernel, (now[part],), (), (made,)), took[kernel]
                        now[part], count = made, count + 1
                    made = Buffer(count)
                    args = (now[part], "sum", "tp")
                    kind = {"kind": "all_reduce", "nbytes": rows}
                    yield Collective("sum", args, (), (made,), stream="comm:tp", **kind), 0.0
                    now[part], count = made, count + 1

    @staticmethod
    def _product(rows: int, inner: float, columns: float) -> Cost:
        moved = 2 * (rows * inner + inner * columns + rows * columns)
        return Cost(int(moved), int(2 * rows * inner * columns))


CASES = {
    "prefill": Paper(sequences=4, new=2048, context=2048),
    "decode": Paper(sequences=64, new=1, context=2049),
}
RANKS = [8, 16, 32, 64, 128, 256, 512, 1024]


@dataclasses.dataclass(frozen=True)
class Row:
    """A block on so many GPUs, in microseconds."""

    ranks: int
    kernels: float
    sums: float
    whole: float
    """The batch in one part: nothing can overlap."""
    halves: float
    """In two, with overlap."""
    hidden: float

    @property
    def best(self) -> float:
        return min(self.whole, self.halves)


def rows(paper: Paper, ranks: Sequence[int] = RANKS) -> list[Row]:
    found = []
    for count in ranks:
        one, two = paper.simulated(count, 1), paper.simulated(count, 2)
        scale = 1e6 / paper.blocks
        times = [one.kernels, one.collectives, one.seconds, two.seconds]
        found.append(Row(count, *(t * scale for t in times), hidden=two.hidden or 0.0))
    return found


def table(found: Sequence[Row]) -> str:
    """The rows as Markdown, as docs/scale.md has them."""
    lines = [
        "| GPUs | kernels | sums | no overlap | two halves, overlap | hidden | against 8 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        numbers = [row.kernels, row.sums, row.whole, row.halves]
        cells = [f"{row.ranks:,}", *(f"{n:,.0f}" for n in numbers), f"{row.hidden:.0%}"]
        lines.append(f"| {' | '.join(cells)} | {found[0].best / row.best:.2f} |")
    return "\n".join(lines)


def _faster(link: Link, alpha: float = 1, beta: float = 1) -> Link:
    return Link(link.alpha * alpha, link.beta * beta)


VARIANTS: dict[str, dict[str, Any]] = {
    "as above": {},
    "half the latency": {"link": _faster(NEAR, alpha=0.5), "between": _faster(FAR, alpha=0.5)},
    "twice the latency": {"link": _faster(NEAR, alpha=2), "between": _faster(FAR, alpha=2)},
    "a network twice as fast": {"between": _faster(FAR, beta=0.5)},
    "64 GPUs in a node": {"node": 64},
    "blocks twice as wide": {"width": 16384},
}


def variants() -> str:
    """Where the time of a block is least when an assumption changes, as Markdown."""
    lines = [f"| | {' | '.join(CASES)} |", "|---|---|---|"]
    for name, changes in VARIANTS.items():
        cells = []
        for case in CASES.values():
            found = rows(dataclasses.replace(case, **changes))
            least = min(found, key=lambda row: row.best)
            gain = found[0].best / least.best
            cells.append(f"{least.ranks} GPUs, {gain:.2f} times as fast as 8")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
