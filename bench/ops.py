"""What a call of an operator costs: declared here, and the same by hand. `python -m bench ops`

One-element tensors, so that the call is all there is. The two take turns; the ratio is of the
medians of the fastest half of the rounds, since load only ever adds.
"""

from __future__ import annotations

import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils import cpp_extension

import torchgraft as graft

FUNCTION = """
at::Tensor scale_add_cpp(const at::Tensor& x, const at::Tensor& y, double alpha) {
  return at::add(x, y, alpha);
}
"""
BY_HAND = f"""
#include <ATen/ATen.h>
#include <torch/library.h>
{FUNCTION}
TORCH_LIBRARY(by_hand, m) {{
  m.def("scale_add_cpp(Tensor x, Tensor y, float alpha=1.0) -> Tensor");
}}
TORCH_LIBRARY_IMPL(by_hand, CPU, m) {{ m.impl("scale_add_cpp", &scale_add_cpp); }}
"""


def reference(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
    return x + alpha * y


def python_kernel(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
    return torch.add(x, y, alpha=alpha)


def declare() -> None:
    """The operators: `bench_ops::*` by torchgraft, `by_hand::*` without it."""
    in_cpp = graft.op("bench_ops::scale_add_cpp")(reference)
    in_cpp.kernel("cpu", cpp=FUNCTION)
    in_cpp.build()
    in_python = graft.op("bench_ops::scale_add_python")(reference)
    in_python.kernel("cpu")(python_kernel)
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "by_hand.cpp")
        source.write_text(BY_HAND)
        cpp_extension.load(
            "by_hand", [str(source)], extra_cflags=["-O3"], is_python_module=False, verbose=False
        )
    custom = torch.library.custom_op("by_hand::scale_add_python", mutates_args=())(python_kernel)
    custom.register_fake(reference)

    def setup(ctx: object, inputs: tuple[object, ...], output: Tensor) -> None:
        ctx.alpha = inputs[2]  # type: ignore[attr-defined]

    custom.register_autograd(lambda ctx, g: (g, g * ctx.alpha, None), setup_context=setup)


def measure(functions: Sequence[Callable[[], object]], rounds: int = 60) -> list[float]:
    """Microseconds a call of each, taking turns."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for fn, series in zip(functions, times, strict=True):
            for _ in range(20):
                fn()
            start = time.perf_counter()
            for _ in range(500):
                fn()
            series.append((time.perf_counter() - start) / 500 * 1e6)
    return [statistics.median(sorted(series)[: rounds // 2]) for series in times]


def run() -> None:
    """Print microseconds a call and the ratios."""
    torch.set_num_threads(1)
    declare()
    ours, theirs = torch.ops.bench_ops, torch.ops.by_hand
    x, y = torch.randn(1), torch.randn(1)
    watched = torch.randn(1, requires_grad=True)
    print(f"{'a call of an operator, µs':38}{'by hand':>9}{'torchgraft':>12}{'ratio':>8}")
    for label, name, a in (
        ("C++ kernel (TORCH_LIBRARY)", "scale_add_cpp", x),
        ("Python kernel (custom_op)", "scale_add_python", x),
        ("Python kernel, gradient recorded", "scale_add_python", watched),
    ):
        hand, graft_ = measure([partial(getattr(o, name), a, y, 2.0) for o in (theirs, ours)])
        print(f"{label:38}{hand:9.2f}{graft_:12.2f}{graft_ / hand:8.2f}")
