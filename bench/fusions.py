"""`python -m bench fusions`: each fusion on a module it was made for, with it and without.

Both programs are timed in turns, in CPU time of the process, so that a slow moment of the machine
hits both; a row is the median of the ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchgraft as graft
from torchgraft.passes import fusions


class Norm(nn.Module):
    """RMSNorm of a residual sum, or of an input."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1024))
        self.residual = residual

    def forward(self, x: Tensor) -> Any:
        total = x + x.roll(1, 0) if self.residual else x
        wide = total.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        normed = self.weight * wide.to(x.dtype)
        return (normed, total) if self.residual else normed


class Rotary(nn.Module):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Projections(nn.Module):
    """Three projections of one input, gated, or plain."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(512, 512, bias=bias) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(x), self.k(x), self.v(x)


class Swiglu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(512, 1408, bias=False), nn.Linear(512, 1408, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)


class Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        inner = 0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-2, -1) * 0.125, -1) @ v


class Dequantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 127, (1024, 1024), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(1024, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.softmax(x, -1), 0.1, True)


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())


HEADS = (1, 8, 256, 64)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "rms_norm": (lambda: Norm(residual=False), ((1, 256, 1024),)),
    "residual_norm": (lambda: Norm(residual=True), ((4, 64, 1024),)),
    "rotary": (Rotary, (HEADS, (1, 1, 256, 64), (1, 1, 256, 64))),
    "swiglu": (Swiglu, ((1, 32, 512),)),
    "qkv": (lambda: Projections(bias=False), ((1, 32, 512),)),
    "qkv_bias": (lambda: Projections(bias=True), ((1, 32, 512),)),
    "gelu_tanh": (Gelu, ((256, 1024),)),
    "attention": (Attention, (HEADS,) * 3),
    "dequantize_matmul": (Dequantized, ((1, 8, 1024),)),
    "conv_bn": (conv, ((1, 32, 56, 56),)),
    "patches": (lambda: nn.Conv2d(3, 384, 16, 16), ((1, 3, 224, 224),)),
    "softmax_dropout": (Dropped, ((8, 256, 256),)),
}


def programs(name: str, mode: str) -> Iterator[Any]:
    """The program without and with the fusion, and its inputs."""
    torch.manual_seed(0)
    make, shapes = CASES[name]
    model, args = make().eval(), tuple(torch.randn(shape) for shape in shapes)
    for patterns in ((), (fusions.ALL[name],)):
        config = graft.Config(
            mode=mode, patterns=patterns, fusions=False, registry=graft.Registry()
        )
        yield graft.compile(model, args, config=config)
    yield args


def measure(name: str, mode: str, seconds: float) -> tuple[float, float]:
    """Microseconds without the fusion, and the ratio of the times with it to those without."""
    before, after, args = programs(name, mode)
    assert sum(after.report.matches.values()) == 1, str(after.report)
    calls = 1
    while _time(before, args, calls) < 0.02:
        calls *= 2
    pairs = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(pairs) < 7:
        pairs.append((_time(before, args, calls), _time(after, args, calls)))
    ratio = statistics.median(two / one for one, two in pairs)
    return statistics.median(one for one, _ in pairs) / calls * 1e6, ratio


def _time(run: Any, args: tuple[Tensor, ...], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        run(*args)
    return time.process_time() - start


def run(only: str | None, seconds: float) -> None:
    """Print a row for each fusion."""
    torch.set_num_threads(1)
    print("| fusion | default, µs | ratio | eager, µs | ratio |\n|---|---|---|---|---|")
    for name in [only] if only else CASES:
        cells = [measure(name, mode, seconds) for mode in ("default", "eager")]
        shown = " | ".join(f"{took:.0f} | {ratio:.2f}" for took, ratio in cells)
        print(f"| `{name}` | {shown} |", flush=True)
