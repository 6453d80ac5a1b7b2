"""`python -m bench prototypes`: loading 1,700 prototypes, and the check of dtypes at a call."""

from __future__ import annotations

import pathlib
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch

import torchgraft as graft
from torchgraft.op import register_kernel
from torchgraft.op.header import read_header

COUNT = 1700
TYPES = "TensorType({DT_FLOAT, DT_FLOAT16, DT_BF16, DT_INT32})"


def prototype(number: int) -> str:
    """An entry with about as many inputs, attributes and comments as real ones have."""
    lines = [f"/** The operator {number}.", " * @par Inputs: two tensors", " */"]
    lines += [f"REG_OP(Bench{number})"]
    lines += [f"    .INPUT(x{i}, {TYPES})" for i in range(2)]
    lines += [f"    .OPTIONAL_INPUT(mask, {TYPES})"] * (number % 3 == 1)
    lines += [f"    .DYNAMIC_INPUT(xs, {TYPES})"] * (number % 8 == 1)
    lines += [f"    .OUTPUT(y, {TYPES})"]
    lines += [f"    .DYNAMIC_OUTPUT(ys, {TYPES})"] * (number % 14 == 1)
    lines += ["    .ATTR(eps, Float, 1e-12)"]
    lines += ['    .ATTR(mode, String, "none")', "    .REQUIRED_ATTR(axes, ListInt)"] * (number % 2)
    return "\n".join([*lines, f"    .OP_END_FACTORY_REG(Bench{number})", ""])


def call(fn: Callable[[], Any]) -> float:
    """Microseconds a call, the median of five rounds."""
    rounds = timeit.repeat(fn, number=5000, repeat=5)
    return statistics.median(rounds) / 5000 * 1e6


def run() -> None:
    """Print the seconds of loading, and microseconds a call."""
    with tempfile.TemporaryDirectory() as folder:
        header = pathlib.Path(folder, "ops.h")
        header.write_text("\n".join(map(prototype, range(COUNT))))
        start = time.perf_counter()
        read_header(header)
        read = time.perf_counter() - start
        start = time.perf_counter()
        graft.load_prototypes(header)
        load = time.perf_counter() - start
    print(f"{COUNT} prototypes: read in {read:.2f} s, read and declared in {load:.2f} s")

    def kernel(x: torch.Tensor, y: torch.Tensor, **attrs: Any) -> torch.Tensor:
        return x

    library: Any = torch.library.Library("bench_prototypes", "FRAGMENT")
    library.define("plain(Tensor x0, Tensor x1, *, float eps=1e-12) -> Tensor")
    library.impl("plain", kernel, "CPU")
    register_kernel("Bench0", kernel, "cpu")
    x = torch.ones(4)
    plain, checked = torch.ops.bench_prototypes.plain, torch.ops.ge.Bench0
    print(f"a call: {call(lambda: plain(x, x)):.2f} µs, with dtypes checked ", end="")
    print(f"{call(lambda: checked(x, x)):.2f} µs (a Python kernel that does nothing)")
