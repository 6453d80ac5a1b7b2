"""`torch.npu` where another device stands for the NPU. On a CPU every call has ended when it
returns, so streams and events there are names, which a compiled model takes for marks of its
graph; on CUDA they are CUDA's own."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from torchgraft.compat import common, graphs
from torchgraft.compat import device as devices
from torchgraft.compat.common import *  # noqa: F403
from torchgraft.stream.markers import LABEL


def _cuda() -> bool:
    return devices.kind() == "cuda"


_NUMBERS = itertools.count(1)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _fresh() -> str:
    """A new name; a trace keeps the one it was given, and does not watch the counter."""
    return f"npu_stream_{next(_NUMBERS)}"


class _HostStream:
    """A stream of the host: its work is done when the call returns."""

    def __init__(self, priority: int = 0, label: str | None = None) -> None:
        self.device, self.priority = torch.device("cpu"), priority
        self.label = label or _fresh()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: _HostStream) -> None:
        """Let this stream come after what the other has been given."""
        self.wait_event(stream.record_event())

    def wait_event(self, event: _HostEvent) -> None:
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        event = event or _HostEvent()
        event.record(self)
        return event


class _HostEvent:
    """An event of the host: a moment."""

    def __init__(self, enable_timing: bool = False, **kwargs: Any) -> None:
        self._at, self._point = 0.0, None

    def record(self, stream: _HostStream | None = None) -> None:
        if torch.compiler.is_compiling():
            with _marked(stream or _current):
                self._point = torch.ops.air.record()
        else:
            self._at = time.perf_counter()

    def wait(self, stream: _HostStream | None = None) -> None:
        """Let a stream, or the current one, come after what was recorded."""
        if torch.compiler.is_compiling() and self._point is not None:
            with _marked(stream or _current):
                torch.ops.air.wait([self._point])

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _HostEvent) -> float:
        """Milliseconds from this event to another."""
        return (end._at - self._at) * 1000


def Stream(device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
    """A new stream of the device that stands for the NPU."""
    if not _cuda():
        return _HostStream(priority)
    make: Any = torch.cuda.Stream  # untyped in torch
    return make(devices.mapped(device, "cuda"), priority)


def Event(enable_timing: bool = False, **kwargs: Any) -> Any:
    """A new event of the device that stands for the NPU."""
    make: Any = torch.cuda.Event if _cuda() else _HostEvent  # the first is untyped in torch
    return make(enable_timing)


@contextlib.contextmanager
def _marked(stream: _HostStream) -> Iterator[None]:
    """Inside, nodes of a graph are on the stream."""
    torch.ops.air.scope_enter([LABEL], [stream.label])
    yield
    torch.ops.air.scope_exit()


_DEFAULT = _HostStream(label="default")
_current = _DEFAULT


@contextlib.contextmanager
def stream(stream: Any) -> Iterator[None]:
    """Inside, calls go to the stream."""
    if _cuda():
        with torch.cuda.stream(stream):
            yield
        return
    before = current_stream()
    set_stream(stream)
    try:
        with _marked(stream) if torch.compiler.is_compiling() else contextlib.nullcontext():
            yield
    finally:
        set_stream(before)


def current_stream(device: Any = None) -> Any:
    return torch.cuda.current_stream() if _cuda() else _current


def default_stream(device: Any = None) -> Any:
    return torch.cuda.default_stream() if _cuda() else _DEFAULT


def set_stream(stream: Any) -> None:
    global _current
    if _cuda():
        torch.cuda.set_stream(stream)
    else:
        _current = stream


def synchronize(device: Any = None) -> None:
    """Wait for all that was started."""
    if _cuda():
        torch.cuda.synchronize(devices.mapped(device, "cuda"))


def device_count() -> int:
    return torch.cuda.device_count() if _cuda() else 1


def current_device() -> int:
    return torch.cuda.current_device() if _cuda() else 0


def set_device(device: Any) -> None:
    """Choose the device. A CPU stands for every NPU there is."""
    if _cuda():
        torch.cuda.set_device(devices.mapped(device, "cuda"))


def get_device_name(device: Any = None) -> str:
    return f"{devices.kind()} in place of an NPU"


@dataclasses.dataclass(frozen=True)
class Properties:
    """What a device is."""

    name: str
    total_memory: int


def get_device_properties(device: Any = None) -> Any:
    if _cuda():
        return torch.cuda.get_device_properties(devices.mapped(device, "cuda"))
    return Properties(get_device_name(), mem_get_info()[1])


def device(device: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside, another device is the current one. A CPU stands for every NPU there is."""
    if _cuda():
        return torch.cuda.device(devices.mapped(device, "cuda"))
    return contextlib.nullcontext()


def device_of(obj: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Inside, the device of a tensor is the current one."""
    of: Any = torch.cuda.device_of if _cuda() else lambda obj: contextlib.nullcontext()
    return of(obj)  # type: ignore[no-any-return]


def manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


manual_seed_all = manual_seed


def seed() -> None:
    torch.seed()


seed_all = seed


def initial_seed() -> int:
    return torch.cuda.initial_seed() if _cuda() else torch.initial_seed()


def empty_cache() -> None:
    if _cuda():
        torch.cuda.empty_cache()


def memory_allocated(device: Any = None) -> int:
    """Bytes in use; a CPU does not count them."""
    return torch.cuda.memory_allocated() if _cuda() else 0


max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated


def memory_stats(device: Any = None) -> dict[str, Any]:
    """Everything that the allocator counts; a CPU counts nothing."""
    return dict(torch.cuda.memory_stats()) if _cuda() else {}


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The statistics, a line for each."""
    return "\n".join(f"{name:44} {value}" for name, value in memory_stats().items())


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free bytes and all bytes of the device, or of the host."""
    if _cuda():
        free, total = torch.cuda.mem_get_info()
        return int(free), int(total)
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def reset_peak_memory_stats(device: Any = None) -> None:
    if _cuda():
        torch.cuda.reset_peak_memory_stats()


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.cuda.get_rng_state() if _cuda() else torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    if _cuda():
        torch.cuda.set_rng_state(new_state)
    else:
        torch.set_rng_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if _cuda() else [torch.get_rng_state()]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    if _cuda():
        torch.cuda.set_rng_state_all(new_states)
    else:
        torch.set_rng_state(new_states[0])


def __getattr__(name: str) -> Any:
    theirs = "CUDAGraph" if name == "NPUGraph" else name
    if _cuda() and not name.startswith("_") and hasattr(torch.cuda, theirs):
        return getattr(torch.cuda, theirs)
    if name in graphs.__all__:
        return getattr(graphs, name)
    return common.attribute(name, [*globals(), *graphs.__all__])
