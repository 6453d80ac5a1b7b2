"""Convolutions on CPU by generated code and by oneDNN, in turns, with bias and ReLU."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import torchgraft as graft
from bench.measure import error
from torchgraft.codegen import own


@dataclass(frozen=True)
class Shape:
    """A convolution, and the side of its image."""

    depth: int
    outs: int
    side: int
    kernel: tuple[int, int] = (1, 1)
    step: int = 1
    groups: int = 1

    def __str__(self) -> str:
        high, wide = self.kernel
        step = f", step {self.step}" if self.step > 1 else ""
        alone = ", alone" if self.groups == self.depth else f", {self.groups} groups"
        return (
            f"{self.depth} to {self.outs}, {self.side} × {self.side}, {high} × {wide}{step}"
            f"{alone if self.groups > 1 else ''}"
        )

    def layer(self) -> nn.Module:
        pads = tuple(size // 2 for size in self.kernel)
        layer = nn.Conv2d(self.depth, self.outs, self.kernel, self.step, pads, groups=self.groups)
        return nn.Sequential(layer, nn.ReLU()).eval().requires_grad_(False)


SHAPES = [
    Shape(64, 256, 56), Shape(256, 64, 56), Shape(512, 128, 28), Shape(1024, 256, 14),
    Shape(512, 2048, 7), Shape(2048, 512, 7), Shape(16, 96, 112), Shape(144, 24, 56),
    Shape(128, 128, 56, (3, 3), 2), Shape(512, 512, 14, (3, 3), 2), Shape(192, 192, 17, (1, 7)),
    Shape(48, 64, 35, (5, 5)), Shape(3, 64, 224, (7, 7), 2), Shape(64, 64, 56, (3, 3)),
    Shape(160, 160, 28, (3, 3), groups=10), Shape(32, 32, 112, (3, 3), groups=32),
    Shape(144, 144, 56, (3, 3), 2, groups=144), Shape(240, 240, 28, (5, 5), groups=240),
    Shape(672, 672, 14, (5, 5), groups=672), Shape(96, 96, 56, (7, 7), groups=96),
]  # fmt: skip


def run(seconds: float) -> None:
    """A row for each shape."""
    torch.set_num_threads(1)
    head = "channels, image, kernel", "million operations", "oneDNN", "generated", "gain"
    print(f"| {' | '.join([*head, 'error, oneDNN', 'generated'])} |")
    print("|---" * 7 + "|")
    for shape in SHAPES:
        layer, x = shape.layer(), torch.randn(1, shape.depth, shape.side, shape.side)
        ways = graft.compile(layer, (x,)), _by_library(layer, x)
        exact = copy.deepcopy(layer).double()(x.double())
        off = [error(way(x), [exact]) for way in ways]
        ours, theirs = _times(ways, x, seconds)
        flops = 2 * exact.numel() * shape.depth // shape.groups * shape.kernel[0] * shape.kernel[1]
        print(
            f"| {shape} | {flops / 1e6:,.0f} | {theirs:,.0f} | **{ours:,.0f}** "
            f"| {theirs / ours:.2f} | {off[1]:.1e} | {off[0]:.1e} |",
            flush=True,
        )


def _by_library(layer: nn.Module, x: Tensor) -> Callable[..., Tensor]:
    ahead, own.is_ahead = own.is_ahead, lambda *vendors: False
    try:
        return graft.compile(layer, (x,))
    finally:
        own.is_ahead = ahead


def _times(ways: tuple[Callable[..., Tensor], ...], x: Tensor, seconds: float) -> list[float]:
    """Microseconds of CPU time a call, of each way: 20th percentiles of calls in turns."""
    found: list[list[float]] = [[] for _ in ways]
    end = time.perf_counter() + seconds
    with torch.inference_mode():
        while time.perf_counter() < end or len(found[0]) < 20:
            for way, times in zip(ways, found, strict=True):
                way(x)
                start = time.thread_time_ns()
                for _ in range(5):
                    way(x)
                times.append((time.thread_time_ns() - start) / 5e3)
    return [sorted(times)[len(times) // 5] for times in found]
