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
ADD = """
at::Tensor BenchAdd(const at::Tensor& x, const at::Tensor& y) { return at::add(x, y); }
"""
PROTOTYPE = """
REG_OP(BenchAdd)
    .INPUT(x, TensorType({DT_FLOAT, DT_BF16}))
    .INPUT(y, TensorType({DT_FLOAT, DT_BF16}))
    .OUTPUT(z, TensorType({DT_FLOAT, DT_BF16}))
    .OP_END_FACTORY_REG(BenchAdd)
"""
BY_HAND = f"""
#include <ATen/ATen.h>
#include <torch/library.h>
{FUNCTION}{ADD}
TORCH_LIBRARY(by_hand, m) {{
  m.def("BenchAdd(Tensor x, Tensor y) -> Tensor");
  m.def("scale_add_cpp(Tensor x, Tensor y, float alpha=1.0) -> Tensor");
}}
TORCH_LIBRARY_IMPL(by_hand, CPU, m) {{
  m.impl("scale_add_cpp", &scale_add_cpp);
  m.impl("BenchAdd", &BenchAdd);
}}
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
        header = pathlib.Path(folder, "ops.h")
        header.write_text(PROTOTYPE)
        graft.load_prototypes(header)
        checked = graft.op("ge::BenchAdd(Tensor x, Tensor y) -> Tensor")(lambda x, y: x + y)
        checked.kernel("cpu", cpp=ADD)
        checked.build()
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
    """Microseconds of CPU time a call of each, taking turns."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for fn, series in zip(functions, times, strict=True):
            for _ in range(20):
                fn()
            start = time.process_time()
            for _ in range(500):
                fn()
            series.append((time.process_time() - start) / 500 * 1e6)
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
    hand, graft_ = measure([partial(op.BenchAdd, x, y) for op in (theirs, torch.ops.ge)])
    print(f"{'C++ kernel, dtypes of a prototype':38}{hand:9.2f}{graft_:12.2f}{graft_ / hand:8.2f}")
