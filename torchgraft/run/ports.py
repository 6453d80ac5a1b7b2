"""Copies at the edge of a captured CUDA graph whose outer address can be changed before a launch.

They are nodes of the graph, so a call is one launch, and CUDA itself runs launches of one graph in
turns, on whatever stream they come. torch has no interface to a graph's nodes, so this is the CUDA
library's own (CUDA 11.3 or newer), through ctypes: about a microsecond a call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

import torch

_DEVICE_TO_DEVICE = 3
_SET_DEPENDENCIES = 1


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code} at the edge of a captured graph")


@functools.cache
def _libraries() -> tuple[Any, Any]:
    major = (torch.version.cuda or "").partition(".")[0]
    driver, runtime = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(f"libcudart.so.{major}")
    add, update = runtime.cudaGraphAddMemcpyNode1D, driver.cuStreamUpdateCaptureDependencies
    for function in (add, update, driver.cuStreamGetCaptureInfo_v2):
        function.restype = _check
    return driver, runtime


def unavailable() -> str | None:
    """Why there are none here, or None."""
    try:
        _libraries()
    except (OSError, AttributeError) as error:
        return f"the CUDA libraries cannot be called: {error}"
    return None


def add(copies: Sequence[tuple[int, int, int]]) -> list[int]:
    """Add copies (to, from, bytes) to the capture of the current stream, one after the other: to
    fork would cost the launch more than small copies take. Their nodes' handles."""
    driver, runtime = _libraries()
    stream = c_void_p(torch.cuda.current_stream().cuda_stream)
    nodes = []
    for to, origin, size in copies:
        status, number, graph, count = c_int(), c_uint64(), c_void_p(), c_size_t()
        before, node = ctypes.POINTER(c_void_p)(), c_void_p()
        found = (byref(status), byref(number), byref(graph), byref(before), byref(count))
        driver.cuStreamGetCaptureInfo_v2(stream, *found)
        where = (byref(node), graph, before, count, c_void_p(to), c_void_p(origin))
        runtime.cudaGraphAddMemcpyNode1D(*where, c_size_t(size), _DEVICE_TO_DEVICE)
        driver.cuStreamUpdateCaptureDependencies(
            stream, byref(node), c_size_t(1), c_int(_SET_DEPENDENCIES)
        )
        nodes.append(int(node.value or 0))
    return nodes


def redirect_of(
    graph: torch.cuda.CUDAGraph, node: int, to: int, origin: int, size: int, *, inward: bool
) -> Callable[[int], None]:
    """`redirect(at)`: where copies of later launches come from if they go `inward`, or go to."""
    function = _libraries()[1].cudaGraphExecMemcpyNodeSetParams1D
    outer = c_void_p(origin if inward else to)
    ends = (c_void_p(to), outer) if inward else (outer, c_void_p(origin))
    exec_, copy = c_void_p(graph.raw_cuda_graph_exec()), c_void_p(node)
    # Made once: ctypes takes a number three times as long to convert.
    args = (exec_, copy, *ends, c_size_t(size), c_int(_DEVICE_TO_DEVICE))

    def redirect(at: int) -> None:
        outer.value = at
        if code := function(*args):
            _check(code)

    return redirect
