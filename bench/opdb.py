"""PyTorch's own operator database through a compiler backend: each op against eager.

`sweep(names, ...)` checks in this process; `run(names, ...)` in worker processes that may crash.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
import re
import sys
import types
import unittest
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bench.measure import first_line, start_method

# (rtol, atol) by what the output holds. Compiled float code may reassociate and contract.
TOLERANCE = {
    torch.float16: (5e-3, 5e-3),
    torch.bfloat16: (4e-2, 4e-2),
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
}
OTHERS = (torch.int64, torch.bool, torch.complex64, torch.float64, torch.bfloat16)


@dataclass(frozen=True)
class Result:
    """How one op did with one dtype. `note` is an error's first line, or why it was skipped."""

    op: str
    dtype: str
    status: str  # passed | failed | skipped
    note: str = ""


class _Skip(Exception):
    pass


@lru_cache(maxsize=1)
def database() -> dict[str, Any]:
    """Every OpInfo by its full name, such as `linalg.norm` or `sum_to_size` or `add`."""
    if importlib.util.find_spec("expecttest") is None:
        # torch's test module derives its TestCase from it and needs nothing else of it here.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    # The import forbids `torch.backends.x = ...` in the whole process; allow it again.
    torch.backends.__allow_nonbracketed_mutation_flag = True
    return {op.full_name: op for op in op_db}


def operators(pattern: str = "", sample: int | None = None, seed: int = 0) -> list[str]:
    """Names that match the regular expression, or a seeded sample of them; sorted."""
    names = sorted(name for name in database() if re.search(pattern, name))
    if sample is not None and sample < len(names):
        names = sorted(random.Random(seed).sample(names, sample))
    return names


# ---------------------------------------------------------------- one op


def _dtype(op: Any, wanted: str, device: str) -> torch.dtype:
    """`wanted` if the op supports it; for "other", the first of OTHERS that it supports."""
    supported = op.supported_dtypes(device)
    candidates = OTHERS if wanted == "other" else (getattr(torch, wanted),)
    for dtype in candidates:
        if dtype in supported:
            return dtype
    raise _Skip("no second dtype" if wanted == "other" else f"takes no {wanted}")


def _fresh(tree: Any) -> Any:
    def clone(t: Tensor) -> Tensor:
        return t.detach().clone().requires_grad_(t.requires_grad)

    return pytree.tree_map_only(Tensor, clone, tree)


def _outcome(fn: Callable[..., Any], sample: Any, grad: bool) -> list[Any]:
    """The outputs and, with `grad`, the gradients of the inputs that want one, flat."""
    inputs = _fresh((sample.input, sample.args, sample.kwargs))
    outputs = fn(inputs[0], *inputs[1], **inputs[2])
    leaves = pytree.tree_leaves(outputs)
    if not grad:
        return leaves
    wrt = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor) and t.requires_grad]
    scalars = pytree.tree_leaves(sample.output_process_fn_grad(outputs))
    roots = [t for t in scalars if isinstance(t, Tensor) and t.requires_grad]
    if not wrt or not roots:
        raise _Skip("nothing to differentiate")
    generator = torch.Generator().manual_seed(0)
    weights = [torch.rand(t.shape, generator=generator).to(t) for t in roots]
    grads = torch.autograd.grad(roots, wrt, weights, allow_unused=True)
    return [*leaves, *grads]


def _same(actual: Sequence[Any], expected: Sequence[Any], values: bool) -> None:
    """Raises AssertionError where two flat outcomes differ; without `values`, in form only."""
    assert len(actual) == len(expected), f"{len(actual)} outputs, eager has {len(expected)}"
    for a, e in zip(actual, expected, strict=True):
        if not isinstance(e, Tensor):
            same = a == e or (_is_nan(a) and _is_nan(e))
            assert same or not values, f"{a!r}, eager has {e!r}"
            continue
        assert isinstance(a, Tensor), f"{type(a).__name__}, eager has a tensor"
        forms = [(tuple(t.shape), t.dtype, t.layout) for t in (a, e)]
        assert forms[0] == forms[1], f"{forms[0]}, eager has {forms[1]}"
        if values:
            rtol, atol = TOLERANCE.get(e.dtype, (0.0, 0.0))
            torch.testing.assert_close(a, e, rtol=rtol, atol=atol, equal_nan=True)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _is_random(op: Any, sample: Any) -> bool:
    """Whether two eager calls differ, or may: PyTorch marks the op as not comparable, or it gives
    memory as it finds it."""
    if getattr(op, "skip_correctness_check_compile_vs_eager", False) or "empty" in op.name:
        return True
    torch.manual_seed(0)
    first = _outcome(op.op, sample, False)
    torch.manual_seed(1)
    second = _outcome(op.op, sample, False)
    try:
        _same(first, second, values=True)
    except AssertionError:
        return True
    return False


def _compiler(backend: str, mode: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """torch.compile for this backend; `mode` is passed on to torchgraft and to Inductor only."""
    if backend == "torchgraft":
        import torchgraft  # noqa: F401  (registers the backend in a plain checkout)

    passed = mode if backend in ("torchgraft", "inductor") and mode != "default" else None
    return lambda fn: torch.compile(fn, backend=backend, fullgraph=False, mode=passed)


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _check(op: Any, sample: Any, grad: bool, compiler: Callable[..., Any]) -> None:
    """One sample input: nothing when right, `_Skip` or the failure otherwise."""
    try:
        expected = _outcome(op.op, sample, grad)
        comparable = not _is_random(op, sample)
    except _Skip:
        raise
    except Exception as failure:
        raise _Skip(f"eager itself fails: {first_line(failure)}") from failure

    def fn(input: Any, *args: Any, **kwargs: Any) -> Any:
        return op.op(input, *args, **kwargs)

    torch._dynamo.reset()
    before = _graphs()
    actual = _outcome(compiler(fn), sample, grad)
    _same(actual, expected, comparable)
    if _graphs() == before:
        raise _Skip("Dynamo captured no graph, so nothing was compiled")


def check(
    name: str,
    dtype: str = "float32",
    mode: str = "default",
    grad: bool = False,
    backend: str = "torchgraft",
    samples: int = 2,
    device: str = "cpu",
) -> Result:
    """One op on its first sample inputs; skipped only when no sample could be judged."""
    op, label, reason = database()[name], dtype, ""
    judged = 0
    compiler = _compiler(backend, mode)
    try:
        chosen = _dtype(op, dtype, device)
        label = str(chosen).removeprefix("torch.")
        differentiable = op.supports_autograd and (chosen.is_floating_point or chosen.is_complex)
        if grad and not differentiable:
            raise _Skip("not differentiable")
        torch.manual_seed(0)
        inputs = op.sample_inputs(device, chosen, requires_grad=grad)
        for sample in itertools.islice(inputs, samples):
            try:
                _check(op, sample, grad, compiler)
                judged += 1
            except _Skip as skip:
                reason = reason or str(skip)
    except _Skip as skip:
        return Result(name, label, "skipped", str(skip))
    except Exception as failure:  # whatever it is, it is this op's result
        return Result(name, label, "failed", first_line(failure))
    finally:
        torch._dynamo.reset()
    return Result(name, label, "passed" if judged else "skipped", "" if judged else reason)


def sweep(
    names: Iterable[str],
    dtype: str = "float32",
    mode: str = "default",
    grad: bool = False,
    backend: str = "torchgraft",
    samples: int = 2,
    device: str = "cpu",
) -> list[Result]:
    """`check` for each name, in this process: for a test that runs a few."""
    return [check(name, dtype, mode, grad, backend, samples, device) for name in names]


# ---------------------------------------------------------------- many ops, in workers


def _work(link: Connection, names: list[str], options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    for name in names:
        link.send(check(name, **options))


def run(
    names: Iterable[str],
    dtypes: Iterable[str] = ("float32", "other"),
    chunk: int = 40,
    patience: float = 180.0,
    **options: Any,
) -> Iterator[Result]:
    """Results, a chunk at a time; an op that crashes its worker or takes too long is a failure."""
    database()  # before the fork, so that workers need not import it
    # That import initialises CUDA where there is any, so the device asked for does not decide.
    context = start_method(options.get("device", "cpu"))
    names = list(names)
    for dtype in dtypes:
        pending = names[:]
        while pending:
            link, far = context.Pipe()
            arguments = (far, pending[:chunk], options | {"dtype": dtype})
            worker = context.Process(target=_work, args=arguments)
            worker.start()
            far.close()
            results = _collect(link, worker, pending[:chunk], dtype, patience)
            yield from results
            pending = pending[len(results) :]


def _collect(
    link: Connection, worker: Any, names: list[str], dtype: str, patience: float
) -> list[Result]:
    """One worker's results; fewer than it was given, and a failure last, when it had to end."""
    results: list[Result] = []
    ending = ""
    while len(results) < len(names) and not ending:
        try:
            if link.poll(patience):
                results.append(link.recv())
            else:
                ending = f"no answer in {patience:.0f} s"
        except EOFError:
            worker.join()
            ending = f"the process ended, exit code {worker.exitcode}"
    if ending:
        results.append(Result(names[len(results)], dtype, "failed", ending))
    link.close()
    worker.kill()
    worker.join()
    return results
