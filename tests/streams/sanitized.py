"""Programs over several CUDA streams for a sanitizer to watch: `python sanitized.py WHAT [torch]`.

`launched` and `captured` must be clean; `plan` (a wait is left out) and `kernel` (a race in shared
memory) are the controls, which a sanitizer must find. With `torch`, torch's own CUDA sanitizer is
switched on once everything is compiled.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import torchgraft as graft
from torchgraft.plan import MAIN, Buffer, Launch, Wait
from torchgraft.run import streams
from torchgraft.run.host import Kernel
from torchgraft.stream.order import schedule

ROWS = 64


def branches(x: Tensor) -> Tensor:
    """Three streams; each reads what another made."""
    with graft.stream("a"):
        one = x.softmax(-1)
    with graft.stream("b"):
        two = x.cumsum(0)
        three = two + one
    return three.sum(-1) * one.amax(-1) + x.sum(-1)


def written(x: Tensor) -> tuple[Tensor, Tensor]:
    """An input is read on one stream, written on another, and read through a view on a third."""
    before = x.sin()
    with graft.stream("a"):
        x.mul_(2)
        y = x.cos()
    head = x[: ROWS // 2]
    with graft.stream("b"):
        z = head.exp() + y[: ROWS // 2]
        y.add_(1)
    return before + x, z + y[ROWS // 2 :]


def views(x: Tensor) -> Tensor:
    """Views made on one stream, used on others; memory goes back and forth between streams."""
    for turn in range(3):
        with graft.stream("ab"[turn % 2]):
            left, right = (x * 2).chunk(2)
        with graft.stream("ba"[turn % 2]):
            turned = torch.cat([right, left]).t().contiguous()
        x = turned.t() + x
    return x


PROGRAMS: list[Callable[[Tensor], object]] = [branches, written, views]


def given() -> Tensor:
    return torch.linspace(-1, 1, ROWS * 32).view(ROWS, 32)


def check(fn: Callable[[Tensor], object], run: Callable[[Tensor], object]) -> None:
    """The program gives what its function does on the host, and leaves the same in its input."""
    for _ in range(3):
        there, here = given().cuda(), given()
        found = run(there)
        torch.cuda.synchronize()
        want = fn(here)
        moved = [t.cpu() for t in (found if isinstance(found, tuple) else (found,))]
        expected = list(want) if isinstance(want, tuple) else [want]
        torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(there.cpu(), here)


def launched(watch: Callable[[], None]) -> None:
    x = given().cuda()
    compiled = [graft.compile(fn, (x.clone(),), mode="eager") for fn in PROGRAMS]
    watch()
    for fn, run in zip(PROGRAMS, compiled, strict=True):
        assert len(run.plan.streams) == 3
        check(fn, run)


def captured(watch: Callable[[], None]) -> None:
    """By the program's own mode, and operator by operator in a graph of the caller's."""
    x = given().cuda()
    modes = ("reduce-overhead", "eager")
    compiled = [[graft.compile(fn, (x.clone(),), mode=mode) for mode in modes] for fn in PROGRAMS]
    watch()
    for fn, (own, eager) in zip(PROGRAMS, compiled, strict=True):
        check(fn, own)
        assert not any("not captured" in note for note in own.report.notes), own.report.notes
        static = given().cuda()
        eager(static.clone())  # kernels are loaded outside of a capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = eager(static)
        torch.cuda.synchronize()  # nobody saw the captured streams run

        def replay(
            x: Tensor, static: Tensor = static, graph: torch.cuda.CUDAGraph = graph, out=outputs
        ) -> object:
            static.copy_(x)
            graph.replay()
            torch.cuda.synchronize()
            x.copy_(static)
            return out

        check(fn, replay)


def plan(watch: Callable[[], None]) -> None:
    """Control: a plan that nobody proved, without the wait for the side stream."""
    x, y, z = map(Buffer, range(3))
    launches = [Launch("up", (x,), (), (y,), stream="side"), Launch("up", (y,), (), (z,))]
    whole = schedule((x,), (), launches, (z,))
    steps = [s for s in whole.steps if not (isinstance(s, Wait) and s.stream == MAIN)]
    streams.prove = lambda plan: None
    broken = dataclasses.replace(whole, steps=tuple(steps))
    run = streams.link_device(broken, {"up": Kernel(lambda v: v + 1)}, {}, "cuda")
    watch()
    run([given().cuda()])
    torch.cuda.synchronize()


def kernel(watch: Callable[[], None]) -> None:
    """Control: one warp reads in shared memory what another has not been waited for."""
    source = """
    extern "C" __global__ void racy(int* out) {
        __shared__ int held[128];
        held[threadIdx.x] = threadIdx.x;
        out[threadIdx.x] = held[127 - threadIdx.x];
    }
    """
    racy = torch.cuda._compile_kernel(source, "racy")
    out = torch.zeros(128, dtype=torch.int32, device="cuda")
    watch()
    racy(grid=(1, 1, 1), block=(128, 1, 1), args=[out])
    torch.cuda.synchronize()


def main() -> None:
    what, *by = sys.argv[1:]

    def watch() -> None:
        torch.cuda.synchronize()
        if by == ["torch"]:
            from torch.cuda import _sanitizer

            _sanitizer.enable_cuda_sanitizer()

    {f.__name__: f for f in (launched, captured, plan, kernel)}[what](watch)
    print("ran to its end", flush=True)


if __name__ == "__main__":
    main()
