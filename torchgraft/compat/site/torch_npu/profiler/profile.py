"""The profiler of torch: operators as work of the CPU, on their threads (and of CUDA, where that
stands for the NPU); and programs of `torch.compile` with a track for each of their streams and an
arrow for each wait."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerAction

from torch_npu.profiler.experimental import _ExperimentalConfig
from torchgraft.compat import device
from torchgraft.compat.notes import without_effect
from torchgraft.compat.watch import Recording

__all__ = [
    "ProfilerAction",
    "ProfilerActivity",
    "Schedule",
    "_KinetoProfile",
    "analyse",
    "profile",
    "schedule",
    "supported_activities",
    "tensorboard_trace_handler",
]


class ProfilerActivity(enum.Enum):
    """What is recorded."""

    CPU = "CPU"
    NPU = "NPU"


def supported_activities() -> set[ProfilerActivity]:
    return set(ProfilerActivity)


def schedule(
    wait: int, active: int, warmup: int = 0, repeat: int = 0, skip_first: int = 0
) -> Callable[[int], ProfilerAction]:
    """Which steps are recorded: see `torch.profiler.schedule`."""
    make: Any = torch.profiler.schedule  # untyped in torch
    made: Callable[[int], ProfilerAction] = make(
        wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first
    )
    return made


Schedule = schedule


def analyse(
    profiler_path: str, max_process_number: int | None = None, export_type: Any = None
) -> None:
    """Read what the NPU wrote; traces are written whole here."""
    without_effect("torch_npu.profiler.", {"analyse": "traces are written whole"})


def tensorboard_trace_handler(
    dir_name: str | None = None,
    worker_name: str | None = None,
    analyse_flag: bool = True,
    async_mode: bool = False,
) -> Callable[[Any], None]:
    """What to do with a finished trace: write it to a folder, where TensorBoard finds it."""
    make: Any = torch.profiler.tensorboard_trace_handler  # untyped in torch
    handler: Callable[[Any], None] = make(dir_name or "./", worker_name)
    return handler


class profile(torch.profiler.profile):
    """`torch.profiler.profile`, with the activities and settings of the NPU's."""

    def __init__(
        self,
        *,
        activities: Iterable[ProfilerActivity] | None = None,
        schedule: Callable[[int], ProfilerAction] | None = None,
        on_trace_ready: Callable[..., Any] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        with_modules: bool = False,
        experimental_config: _ExperimentalConfig | None = None,
        use_cuda: bool | None = None,
        **kwargs: Any,
    ) -> None:
        wanted = supported_activities() if activities is None else set(activities)
        if not wanted <= supported_activities():
            raise TypeError(f"activities are {wanted}; they must be of torch_npu's own kind")
        watched = [torch.profiler.ProfilerActivity.CPU]
        if ProfilerActivity.NPU in wanted and device.kind() == "cuda":
            watched.append(torch.profiler.ProfilerActivity.CUDA)
        parent: Any = super()
        parent.__init__(
            activities=watched,
            schedule=schedule,
            on_trace_ready=on_trace_ready,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=with_flops,
            with_modules=with_modules,
            **kwargs,
        )
        self._over, self._recording = False, Recording()

    def start_trace(self) -> None:
        """Begin to record."""
        self._recording = Recording()
        self._recording.begin()
        start: Any = super().start_trace  # untyped in torch
        start()

    def stop_trace(self) -> None:
        """Cease to record."""
        self._recording.end()
        stop: Any = super().stop_trace
        stop()

    def export_chrome_trace(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Write the trace."""
        export: Any = super().export_chrome_trace
        export(path, *args, **kwargs)
        self._recording.add_to(path)

    def stop(self) -> None:
        """End the trace."""
        self._over = True
        stop: Any = super().stop
        stop()

    def step(self) -> None:
        """The next step. After the end it does nothing; torch's own would crash there."""
        if not self._over:
            step: Any = super().step
            step()


_KinetoProfile = profile
