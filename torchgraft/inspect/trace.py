"""Chrome trace events: what Perfetto, chrome://tracing and TensorBoard's profiler read.

The format is the one of "Trace Event Format": https://perfetto.dev/docs/getting-started/other-formats
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torchgraft.inspect.timeline import Timeline

Event = dict[str, Any]
SHORTER = 1e-9
"""Seconds off each slice. Perfetto cuts times to nanoseconds and drops a slice that then begins
before the last one on its track is over, which those that touch might."""


class Trace:
    """Events in the making. A track is a name within a process, such as a stream of a program."""

    def __init__(self, first: int = 1) -> None:
        """`first`: the number of the first process and track, where others are there already."""
        self._first = first
        self._events: list[Event] = []
        self._tracks: dict[tuple[str, str], tuple[int, int]] = {}
        self._processes: dict[str, int] = {}
        self._flows = 0

    def track(self, process: str, name: str) -> tuple[int, int]:
        """The pid and tid of a track; made when first asked for, shown in that order."""
        if (process, name) not in self._tracks:
            if process not in self._processes:
                # Not 0, and the process's own events on a thread of its number: to Perfetto
                # thread 0 is the kernel's idle one.
                pid = self._processes[process] = len(self._processes) + self._first
                self._meta(pid, pid, "process_name", name=process)
            where = (self._processes[process], len(self._tracks) + self._first)
            self._tracks[process, name] = where
            self._meta(*where, "thread_name", name=name)
            self._meta(*where, "thread_sort_index", sort_index=where[1])
        return self._tracks[process, name]

    def _meta(self, pid: int, tid: int, what: str, **args: Any) -> None:
        self._events.append({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args})

    def slice(
        self,
        track: tuple[int, int],
        name: str,
        start: float,
        end: float,
        args: Mapping[str, Any],
        category: str = "kernel",
    ) -> None:
        """Something that took from `start` to `end`, in seconds."""
        self._events.append(
            {
                "ph": "X",
                "pid": track[0],
                "tid": track[1],
                "ts": start * 1e6,
                "dur": max(end - start - SHORTER, 0) * 1e6,
                "name": name,
                "cat": category,
                "args": dict(args),
            }
        )

    def flow(
        self, name: str, source: tuple[int, int], start: float, to: tuple[int, int], end: float
    ) -> None:
        """An arrow from the slice around `start` on one track to the one around `end`."""
        self._flows += 1
        both = {"name": name, "cat": "wait", "id": self._flows + self._first - 1}
        first = {"ph": "s", "pid": source[0], "tid": source[1], "ts": start * 1e6}
        last = {"ph": "f", "bp": "e", "pid": to[0], "tid": to[1], "ts": end * 1e6}
        self._events += [{**both, **first}, {**both, **last}]

    def counter(self, process: str, name: str, at: float, value: float) -> None:
        """A number that has this value from `at` on."""
        pid = self._processes[process]
        self._events.append(
            {"ph": "C", "pid": pid, "tid": pid, "ts": at * 1e6, "name": name, "args": {name: value}}
        )

    def data(self) -> dict[str, Any]:
        """The whole as the JSON object format; events are in order of time."""
        events = sorted(self._events, key=lambda event: event.get("ts", -1.0))
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def add_timeline(
    trace: Trace,
    process: str,
    timeline: Timeline,
    args: Sequence[Mapping[str, Any]],
    offset: float = 0.0,
) -> None:
    """Put a timeline into a trace: a track a stream, an arrow a wait, memory as a counter."""
    tracks = {name: trace.track(process, f"stream {name}") for name in timeline.streams}
    for span in timeline.spans:
        start, end = offset + span.start, offset + span.end
        trace.slice(tracks[span.stream], span.kernel, start, end, args[span.index])
    for arrow in timeline.arrows:
        first, second = timeline.spans[arrow.before], timeline.spans[arrow.after]
        inside = (first.start + first.end) / 2  # an arrow binds to the slice that encloses it
        trace.flow(
            arrow.event,
            tracks[first.stream],
            offset + inside,
            tracks[second.stream],
            offset + second.start,
        )
    for at, size in timeline.memory:
        trace.counter(process, "memory", offset + at, size)


def write(path: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    """Write a trace; its name should end in `.json` for the viewers."""
    file = pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(data), encoding="utf-8")


def tensorboard_name(worker: str | None = None) -> str:
    """The file name that TensorBoard's profiler looks for in its log folder."""
    worker = worker or f"{socket.gethostname()}_{os.getpid()}"
    return f"{worker}.{time.time_ns()}.pt.trace.json"
