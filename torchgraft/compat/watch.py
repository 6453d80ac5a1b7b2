"""Programs of `torch.compile` while torch_npu's profiler runs: each call is measured, launch by
launch, and becomes tracks of the profiler's trace, as `compiled.profile` draws them."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from torchgraft.inspect.profile import Stopwatch
from torchgraft.inspect.timeline import Timeline
from torchgraft.inspect.trace import Trace, add_timeline
from torchgraft.program import Program

_FIRST = 10**9  # tracks of the trace that torch writes have numbers of processes and threads


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a program, that began at `start` (nanoseconds of the clock on the wall)."""

    process: str
    start: int
    timeline: Timeline


class Recording:
    """The calls of programs between `begin` and `end`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def begin(self) -> None:
        with _lock:
            _active.append(self)

    def end(self) -> None:
        with _lock:
            if self in _active:
                _active.remove(self)

    def add_to(self, path: str | os.PathLike[str]) -> None:
        """Put the calls into a trace that torch's profiler has written."""
        file = Path(path)
        packed = file.suffix == ".gz"
        read = gzip.decompress(file.read_bytes()) if packed else file.read_bytes()
        data: dict[str, Any] = json.loads(read)
        base = int(data.get("baseTimeNanoseconds", 0))
        trace = Trace(_FIRST)
        for call in self.calls:
            args = [{"stream": span.stream} for span in call.timeline.spans]
            add_timeline(trace, call.process, call.timeline, args, (call.start - base) / 1e9)
        data["traceEvents"] += trace.data()["traceEvents"]
        text = json.dumps(data).encode()
        file.write_bytes(gzip.compress(text) if packed else text)


_lock = threading.Lock()
_active: list[Recording] = []


def watch(program: Program) -> None:
    """From now on let a program's calls be seen by every recording that is on."""
    plain, own = program.run, threading.Lock()
    stopwatch: list[Stopwatch] = []

    def run(args: list[Any]) -> Any:
        with _lock:
            recordings = list(_active)
        if not recordings:
            return plain(args)
        with own:  # a stopwatch measures one call at a time
            if not stopwatch:
                stopwatch.append(Stopwatch(program))
            start = time.time_ns()
            result, timeline = stopwatch[0](args)
        name = f"{program.report.name} ({program.report.device})"
        for one in recordings:
            one.calls.append(Call(name, start, timeline))
        return result

    program.run = run
