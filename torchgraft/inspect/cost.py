"""What a launch must move and compute, by the shapes alone, and what a machine can do at best."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from torchgraft import _torch
from torchgraft.fx.dialect import is_view
from torchgraft.inspect.graph import bytes_of
from torchgraft.plan import Buffer, Launch
from torchgraft.program import Program


@dataclasses.dataclass(frozen=True)
class Machine:
    """Peaks of a device: bytes and floating-point operations a second, and a launch's own time."""

    bandwidth: float
    flops: float
    launch: float
    measured: bool = False

    def seconds(self, cost: Cost) -> float:
        """The least time that a cost takes: the roofline."""
        return max(cost.bytes / self.bandwidth, cost.flops / self.flops)


NOMINAL = {
    "cpu": Machine(20e9, 100e9, 2e-6),
    "cuda": Machine(2e12, 50e12, 4e-6),
}
"""Round numbers for a prediction without a measurement; only their ratios matter."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes that are read and written once, and floating-point operations."""

    bytes: int
    flops: int
    nodes: tuple[str, ...] = ()


def costs(program: Program) -> list[Cost]:
    """The cost of each launch of a program's plan, in order."""
    linker = program.linker
    values = {buffer: node.meta.get("val") for node, buffer in linker.numbers.items()}
    regions = {unit.name: unit.nodes for unit in linker.units}
    makers = {buffer: node for node, buffer in linker.numbers.items()}
    found = []
    for launch in program.plan.launches:
        nodes = regions.get(launch.kernel) or _node(launch, makers, program)
        touched = {*launch.reads, *(out for out in launch.outputs if out is not None)}
        moved = sum(bytes_of(values.get(buffer)) for buffer in touched)
        if launch.kernel in regions:  # its code holds the constants
            used = {held for node in nodes for held in node.all_input_nodes}
            moved += sum(bytes_of(n.meta.get("val")) for n in used if n.op == "get_attr")
        if len(nodes) == 1 and is_view(nodes[0]):
            moved = 0
        found.append(Cost(moved, sum(map(flops_of, nodes)), tuple(n.name for n in nodes)))
    return found


def _node(launch: Launch, makers: dict[Buffer, Node], program: Program) -> list[Node]:
    """The node of a single call: the one that made its output, or that takes its arguments."""
    for out in launch.outputs:
        if out is not None:
            node = makers[out]
            source = node.args[0] if launch.unpack else node
            return [source if isinstance(source, Node) else node]
    reads = launch.reads
    numbers = program.linker.numbers
    for node in program.gm.graph.nodes:
        used = {numbers.get(n) for n in node.all_input_nodes}
        if node.op == "call_function" and not node.users and used == reads:
            return [node]
    return []


def flops_of(node: Node) -> int:
    """Floating-point operations of a call: torch's own formulas; else one for each element."""
    target = node.target
    if node.op != "call_function" or is_view(node):
        return 0
    if (formula := _formula(target)) is not None:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), _meta_of)
        try:
            return int(formula(*args, **kwargs, out_val=_plain(node.meta.get("val"))))
        except (TypeError, ValueError, AssertionError, IndexError):
            return 0  # a call that the formula does not know, such as one with other arguments
    tags = getattr(target, "tags", ())
    if torch.Tag.pointwise in tags:
        return _elements(node.meta.get("val"))
    return max((_elements(n.meta.get("val")) for n in node.all_input_nodes), default=0)


def _formula(target: Any) -> Callable[..., Any] | None:
    packet = getattr(target, "overloadpacket", None)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        packet = torch.ops.aten._scaled_dot_product_flash_attention
    return flop_registry.get(packet)


def _elements(value: Any) -> int:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return 0
    return math.prod(int(_torch.hint(size)) for size in value.shape)


def _meta_of(node: Node) -> Any:
    return _plain(node.meta.get("val"))


def _plain(value: Any) -> Any:
    """A value with plain sizes: the formulas must not ask about symbols."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value))
    if not isinstance(value, Tensor):
        return _torch.hint(value)
    sizes = [int(_torch.hint(size)) for size in value.shape]
    return torch.empty(sizes, dtype=value.dtype, device="meta")


def measure(device: torch.device, dtype: torch.dtype = torch.float32) -> Machine:
    """The peaks of a device as a copy and a matrix product reach them; a fraction of a second."""
    on_cuda = device.type == "cuda"
    side = 4096 if on_cuda else 512
    a, b = (torch.rand(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.ones(2**28 if on_cuda else 2**24, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    small = torch.ones(1, device=device)
    matmul = _best(lambda: a @ b, device, repeat=20)
    copy = _best(lambda: target.copy_(source), device)
    return Machine(
        bandwidth=2 * source.numel() * 4 / copy,
        flops=2 * side**3 / matmul,
        launch=_best(lambda: small.add_(1), device, repeat=20),
        measured=True,
    )


def _best(call: Callable[[], object], device: torch.device, repeat: int = 5) -> float:
    times = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main_dtype(values: Iterable[Any]) -> torch.dtype:
    """The floating dtype that most bytes of a program have."""
    counts: dict[torch.dtype, int] = {}
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            counts[value.dtype] = counts.get(value.dtype, 0) + bytes_of(value)
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)
