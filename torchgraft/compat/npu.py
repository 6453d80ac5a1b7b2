"""`torch.npu` where a CPU stands for the NPU. Every call has ended when it returns, so streams and
events are names, which a compiled model takes for marks of its graph."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from torchgraft.compat import common
from torchgraft.compat.common import *  # noqa: F403
from torchgraft.compat.graphs import *  # noqa: F403
from torchgraft.stream.markers import LABEL

_NUMBERS = itertools.count(1)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _fresh() -> str:
    """A new name; a trace keeps the one it was given, and does not watch the counter."""
    return f"npu_stream_{next(_NUMBERS)}"


def _check(device: Any) -> None:
    """Refuse what names no NPU. A CPU stands for every number: each rank of a job has its own."""
    if device is None or type(device) is int:
        return
    where = torch.device(device)  # of an NPU, that is the CPU already
    if where.type != "cpu":
        raise ValueError(f"Expected an npu device, but got: {where}")


class Stream:
    """A stream of the host: its work is done when the call returns."""

    def __init__(self, device: Any = None, priority: int = 0, label: str | None = None) -> None:
        _check(device)
        self.device, self.priority = torch.device("cpu"), priority
        self.label = label or _fresh()
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Stream) -> None:
        """Let this stream come after what the other has been given."""
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def set_data_preprocess_stream(self, is_data_preprocess_stream: bool = False) -> None:
        """Data is not prepared by a thread of its own here."""

    def __enter__(self) -> Stream:
        self._entered.append(stream(self))
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._entered.pop().__exit__(*raised)


ExternalStream = SyncLaunchStream = Stream


class Event:
    """An event of the host: a moment."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self._at, self._point = 0.0, None

    def record(self, stream: Stream | None = None) -> None:
        if torch.compiler.is_compiling():
            with _marked(stream or _current):
                self._point = torch.ops.air.record()
        else:
            self._at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream, or the current one, come after what was recorded."""
        if torch.compiler.is_compiling() and self._point is not None:
            with _marked(stream or _current):
                torch.ops.air.wait([self._point])

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to another."""
        return (end._at - self._at) * 1000


@contextlib.contextmanager
def _marked(stream: Stream) -> Iterator[None]:
    """Inside, nodes of a graph are on the stream."""
    torch.ops.air.scope_enter([LABEL], [stream.label])
    yield
    torch.ops.air.scope_exit()


_DEFAULT = Stream(label="default")
_current = _DEFAULT


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Inside, calls go to the stream; with None, nothing changes."""
    if stream is None:
        yield
        return
    before = current_stream()
    set_stream(stream)
    try:
        with _marked(stream) if torch.compiler.is_compiling() else contextlib.nullcontext():
            yield
    finally:
        set_stream(before)


StreamContext = stream


def current_stream(device: Any = None) -> Stream:
    return _current


def default_stream(device: Any = None) -> Stream:
    return _DEFAULT


def set_stream(stream: Stream | None) -> None:
    """Let calls go to the stream; with None, nothing changes."""
    global _current
    if stream is not None:
        common.check_stream(stream, Stream)
        _current = stream


def synchronize(device: Any = None) -> None:
    """Wait for all that was started."""


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    """Choose the device. A CPU stands for every NPU there is."""
    _check(device)


def get_device_name(device: Any = None) -> str:
    return "cpu in place of an NPU"


@dataclasses.dataclass(frozen=True)
class Properties:
    """What a device is."""

    name: str
    total_memory: int
    multi_processor_count: int = 1
    cube_core_num: int = 1
    vector_core_num: int = 1
    major: int = 0
    minor: int = 0


def get_device_properties(device: Any = None) -> Properties:
    return Properties(get_device_name(), mem_get_info()[1])


def get_device_capability(device: Any = None) -> tuple[int, int] | None:
    """None, as an NPU has no such number."""
    return None


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    return True


class device(contextlib.nullcontext[None]):
    """Inside, another device is the current one. A CPU stands for every NPU there is."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        _check(device)


class device_of(contextlib.nullcontext[None]):
    """Inside, the device of a tensor is the current one."""

    def __init__(self, obj: Any) -> None:
        super().__init__()


# --- Random numbers: the CPU's ---


def manual_seed(seed: int) -> None:
    # Not torch.manual_seed, which seeds `torch.cuda` too: that may be this module.
    torch.default_generator.manual_seed(seed)


def seed() -> None:
    torch.seed()


manual_seed_all, seed_all, initial_seed = manual_seed, seed, torch.initial_seed


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "npu") -> None:
    torch.set_rng_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [torch.get_rng_state()]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    torch.set_rng_state(new_states[0])


# --- Memory: a CPU does not count it ---


def memory_allocated(device: Any = None) -> int:
    """Bytes in use; a CPU does not count them."""
    return 0


max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated
memory_cached = max_memory_cached = memory_allocated


def memory_stats(device: Any = None) -> dict[str, Any]:
    """Everything that the allocator counts; a CPU counts nothing."""
    return {}


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The statistics, of which there are none."""
    return ""


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free bytes and all bytes of the host."""
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def empty_cache() -> None:
    """There is none."""


def reset_peak_memory_stats(device: Any = None) -> None:
    """There are none."""


reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats
reset_accumulated_memory_stats = reset_peak_memory_stats


def __getattr__(name: str) -> Any:
    if name == "default_generators":
        return (torch.default_generator,)
    return common.attribute(name, globals())
