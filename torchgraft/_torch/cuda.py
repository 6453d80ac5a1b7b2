"""What torch keeps private about CUDA graphs and streams; torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator

import torch

is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", lambda: False
)
"""Whether the current stream is being captured."""

raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
"""The address of a device's current stream, without a Stream object being made."""


def launch_of(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """`graph.replay` without the Python around it."""
    return functools.partial(torch._C._CUDAGraph.replay, graph)


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture the current stream's work, other threads undisturbed.

    torch (to 2.13) leaves a failed capture half open: its memory pool stays in use, and the random
    number generator believes for ever that it is captured. Here both are put right. A capture that
    fails in between, and can still be ended, is not half open: its graph gives the pool back when
    it goes, and a pool that was given back before would end the process there.
    """
    device, pool = torch.cuda.current_device(), torch.cuda.graph_pool_handle()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
        graph.capture_end()
    except BaseException:
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        if _ended(device, pool):
            torch._C._cuda_releasePool(device, pool)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that nothing is in it
                empty = torch.cuda.CUDAGraph()
                empty.capture_begin(capture_error_mode="thread_local")
                empty.capture_end()
        raise


def _ended(device: int, pool: tuple[int, int]) -> bool:
    """Whether memory was still taken from a pool; it is not any more."""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return False
    return True
