"""`torch.npu` on the simulated device: streams, events, memory, random numbers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchgraft.compat import common, simulated
from torchgraft.compat.common import *  # noqa: F403
from torchgraft.compat.graphs import *  # noqa: F403
from torchgraft.errors import NotOnThisDevice

Where = torch.device | str | int | None
_accelerator = torch.accelerator
_SPARE_DEVICE = 20  # the number of torch's spare device type, in every release


def _index(device: Where) -> int:
    """The number of a device; the current one where none is said."""
    if isinstance(device, int) and not isinstance(device, bool):
        return current_device() if device < 0 else device
    where = torch.device("npu" if device is None else device)
    if where.type != "npu":
        raise ValueError(f"Expected an npu device, but got: {where}")
    return current_device() if where.index is None else where.index


# --- devices ---


_initialized = True  # torch.utils.checkpoint looks here before it keeps random states


_lazy_init = common.init


def _is_in_bad_fork() -> bool:
    return bool(simulated.library().graft_npu_forked())


def device_count() -> int:
    """How many devices this process simulates: `TORCHGRAFT_NPU_DEVICES`, otherwise one."""
    return int(simulated.library().graft_npu_device_count())


def current_device() -> int:
    return int(_accelerator.current_device_index())


def set_device(device: Where) -> None:
    """Make a device the current one of this thread."""
    _accelerator.set_device_index(_index(device))


class device:
    """Inside, another device is the current one."""

    def __init__(self, device: Where) -> None:
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> device:
        self.prev_idx = current_device()
        set_device(self.idx)
        return self

    def __exit__(self, *error: object) -> None:
        set_device(self.prev_idx)


class device_of(device):
    """Inside, the device of a tensor is the current one; a tensor elsewhere changes nothing."""

    def __init__(self, obj: Tensor) -> None:
        super().__init__(obj.device if obj.device.type == "npu" else current_device())


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


def get_device_name(device: Where = None) -> str:
    return f"simulated NPU {_index(device)}"


def get_device_properties(device: Where = None) -> Properties:
    return Properties(get_device_name(device), mem_get_info(device)[1])


def get_device_capability(device: Where = None) -> tuple[int, int] | None:
    """None, as an NPU has no such number."""
    _index(device)
    return None


def can_device_access_peer(device: Where, peer_device: Where) -> bool:
    return _index(device) != _index(peer_device)


def synchronize(device: Where = None) -> None:
    """Wait for every stream of a device. Raises what a kernel raised since the last wait."""
    _accelerator.synchronize(_index(device))


# --- streams and events ---


class Stream(torch.Stream):
    """A stream: a thread that runs what it is given, in order."""

    def __new__(cls, device: Where = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:  # one that exists, by its number
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, device=torch.device("npu", _index(device)), priority=priority)

    @property
    def npu_stream(self) -> int:
        return int(self.stream_id)

    def set_data_preprocess_stream(self, is_data_preprocess_stream: bool = False) -> None:
        """Data is not prepared by a thread of its own here."""

    def record_event(self, event: Any = None) -> Any:
        """Record an event here; a new one where none is given."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_stream(self, stream: torch.Stream) -> None:
        """What comes next here waits for all that the other stream has been given."""
        event = Event()
        event.record(stream)
        self.wait_event(event)


class _EventType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Event) and value.device.type == "npu"


class Event(metaclass=_EventType):
    """A point in the work of a stream: a `torch.Event`, which torch does not let us derive from."""

    def __new__(  # type: ignore[misc]
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        if interprocess:
            raise NotOnThisDevice("Event(interprocess=True)", "Use an event in each process.")
        return torch.Event("npu", enable_timing=enable_timing, blocking=blocking)


ExternalStream = SyncLaunchStream = Stream


def _wrapped(stream: torch.Stream) -> Stream:
    index = stream.device.index
    return Stream(stream_id=stream.stream_id, device_index=index, device_type=_SPARE_DEVICE)


def current_stream(device: Where = None) -> Stream:
    """The stream that calls of this thread go to."""
    return _wrapped(_accelerator.current_stream(_index(device)))


def default_stream(device: Where = None) -> Stream:
    """The stream that calls go to where none is chosen."""
    return Stream(stream_id=0, device_index=_index(device), device_type=_SPARE_DEVICE)


def set_stream(stream: torch.Stream | None) -> None:
    """Let calls of this thread go to a stream."""
    if stream is not None:
        common.check_stream(stream, torch.Stream)
        _accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[torch.Stream | None]:
    """Inside, calls go to a stream, on its device; with None, nothing changes."""
    if stream is None:
        yield None
        return
    common.check_stream(stream, torch.Stream)
    outer, before = current_device(), current_stream(stream.device)
    set_stream(stream)
    try:
        yield stream
    finally:
        set_stream(before)
        set_device(outer)


StreamContext = stream


# --- memory ---


def _statistic(name: str) -> Callable[..., int]:
    def read(device: Where = None) -> int:
        return int(getattr(_accelerator, name)(_index(device)))

    read.__name__ = read.__qualname__ = name
    read.__doc__ = f"Bytes: see torch.cuda.{name}."
    return read


memory_allocated = _statistic("memory_allocated")
max_memory_allocated = _statistic("max_memory_allocated")
memory_reserved = memory_cached = _statistic("memory_reserved")
max_memory_reserved = max_memory_cached = _statistic("max_memory_reserved")


def memory_stats(device: Where = None) -> dict[str, Any]:
    """Everything that the allocator counts."""
    return dict(_accelerator.memory_stats(_index(device)))


def memory_summary(device: Where = None, abbreviated: bool = False) -> str:
    """The statistics, a line for each."""
    stats = memory_stats(device)
    names = [name for name in stats if ".all." in name or "." not in name]
    return "\n".join(f"{name:44} {stats[name]}" for name in names)


def reset_peak_memory_stats(device: Where = None) -> None:
    _accelerator.reset_peak_memory_stats(_index(device))


reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Where = None) -> None:
    _accelerator.reset_accumulated_memory_stats(_index(device))


def empty_cache() -> None:
    """Give memory that no tensor uses back; waits for the devices."""
    simulated.library().graft_npu_empty_cache()


def mem_get_info(device: Where = None) -> tuple[int, int]:
    """Free bytes and all bytes of a device."""
    free, total = _accelerator.get_memory_info(_index(device))
    return int(free), int(total)


# --- random numbers ---


def _generator(device: Where = None) -> torch.Generator:
    made: torch.Generator = torch.ops.torchgraft_npu.default_generator(_index(device))
    return made


def _each() -> list[torch.Generator]:
    return [_generator(index) for index in range(device_count())]


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    _generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed every device; torch.manual_seed does it too."""
    for one in _each():
        one.manual_seed(seed)


def seed() -> None:
    _generator().seed()


def seed_all() -> None:
    for one in _each():
        one.seed()


def initial_seed() -> int:
    return int(_generator().initial_seed())


def get_rng_state(device: Where = "npu") -> Tensor:
    """The state of a device's generator: 16 bytes, its seed and how many operators drew."""
    return _generator(device).get_state()


def set_rng_state(new_state: Tensor, device: Where = "npu") -> None:
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[Tensor]:
    return [one.get_state() for one in _each()]


def set_rng_state_all(new_states: list[Tensor]) -> None:
    for one, state in zip(_each(), new_states, strict=True):
        one.set_state(state)


def __getattr__(name: str) -> Any:
    if name == "default_generators":
        return tuple(_each())
    return common.attribute(name, globals())
