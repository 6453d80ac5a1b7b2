"""What a call must move and compute, by its shapes alone, and what a device can do at best."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F
from torch.utils.flop_counter import flop_registry

from torchgraft import _torch
from torchgraft.fx.dialect import is_view
from torchgraft.run.pages import Pages


@dataclasses.dataclass(frozen=True)
class Machine:
    """Peaks of a device: bytes and floating-point operations a second, and a launch's own time."""

    bandwidth: float
    flops: float
    launch: float
    measured: bool = False
    units: int = 1  # multiprocessors or threads: what one kernel is spread over
    wait: float = 60e-6  # until a stream that waits for another one goes on

    def seconds(self, cost: Cost) -> float:
        """The least time that a cost takes: the roofline."""
        return max(cost.bytes / self.bandwidth, cost.flops / self.flops)

    def alone(self, cost: Cost) -> float:
        """The time of a kernel that has the device to itself: a small one does not fill it."""
        moved = cost.bytes / self.bandwidth / self._filled(cost.bytes, _BYTES)
        computed = cost.flops / self.flops / self._filled(cost.outputs, _OUTPUTS)
        return max(moved, computed) + self.launch

    def _filled(self, amount: int, each: int) -> float:
        return min(1.0, max(1, amount / each) / self.units)


_BYTES, _OUTPUTS = 1 << 15, 1 << 13
"""What keeps one multiprocessor (or thread) busy: bytes to move, elements to compute."""

NOMINAL = {
    "cpu": Machine(20e9, 100e9, 2e-6),
    "cuda": Machine(2e12, 50e12, 4e-6, units=132, wait=1.5e-6),
}
"""Round numbers for a prediction without a measurement; only their ratios matter."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes that are read and written once, and floating-point operations."""

    bytes: int
    flops: int
    nodes: tuple[str, ...] = ()
    outputs: int = 1  # elements that are written


def bytes_of(value: Any) -> int:
    """How much memory a value takes; symbolic sizes count as in the example they came from."""
    if isinstance(value, (tuple, list)):
        return sum(map(bytes_of, value))
    if not isinstance(value, Tensor):
        return 0
    count = value.element_size()
    for size in value.shape:
        count *= int(_torch.hint(size))
    return count


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
        return elements(node.meta.get("val"))
    return max((elements(n.meta.get("val")) for n in node.all_input_nodes), default=0)


def has_formula(target: Any) -> bool:
    """Whether an operator does much more than one operation an element: products and the like."""
    return _formula(target) is not None


def _formula(target: Any) -> Callable[..., Any] | None:
    packet = getattr(target, "overloadpacket", None)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        packet = torch.ops.aten._scaled_dot_product_flash_attention
    return flop_registry.get(packet)


def elements(value: Any) -> int:
    """How many floating-point numbers a value has."""
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


_CONVOLUTION = (2, 256, 28, 28), (256, 256, 3, 3)


def measure(device: torch.device, dtype: torch.dtype = torch.float32) -> Machine:
    """The peaks of a device as a copy, and a matrix product or a convolution, reach them; a
    fraction of a second."""
    on_cuda = device.type == "cuda"
    side = 4096 if on_cuda else 512
    a, b = (torch.rand(side, side, device=device).to(dtype) for _ in range(2))
    pages = Pages()  # what a program reads most lies in such
    source = pages.settle(torch.ones(2**28 if on_cuda else 2**24, device=device))
    target = pages.settle(torch.zeros_like(source))
    small = torch.ones(1, device=device)
    rates = [2 * side**3 / _best(lambda: a @ b, device, repeat=20)]
    if (
        not on_cuda and dtype == torch.float32
    ):  # MKL, for one, multiplies at half of what some processors can do
        image, kernel = (torch.rand(size, device=device).to(dtype) for size in _CONVOLUTION)
        image = image.to(memory_format=torch.channels_last)
        flops = 2 * kernel.numel() * image[:, 0].numel()
        rates.append(flops / _best(lambda: F.conv2d(image, kernel, padding=1), device))
    copy = _best(lambda: target.copy_(source), device)
    return Machine(
        bandwidth=2 * source.numel() * 4 / copy,
        flops=max(rates),
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
