"""What Perfetto's trace processor makes of JSON trace events, by the rules of its importer.

Times become whole nanoseconds by cutting, events are taken in order of time (as they stand where
times are equal), slices of a thread nest or are dropped, and a flow event binds to the slice that
is open on its thread. What it would count as an error is a problem here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

Where = tuple[int, int]


@dataclasses.dataclass
class Slice:
    name: str
    track: Where
    start: int
    end: int


@dataclasses.dataclass
class Imported:
    tracks: dict[Where, str] = dataclasses.field(default_factory=dict)
    processes: dict[int, str] = dataclasses.field(default_factory=dict)
    slices: list[Slice] = dataclasses.field(default_factory=list)
    flows: list[tuple[Slice, Slice]] = dataclasses.field(default_factory=list)
    counters: dict[str, list[tuple[int, float]]] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)


def nanoseconds(microseconds: float) -> int:
    return int(microseconds * 1000.0) if isinstance(microseconds, float) else microseconds * 1000


def imported(data: dict[str, Any]) -> Imported:
    """The tracks, slices, flows and counters that the viewer would show."""
    found = Imported()
    stacks: dict[Where, list[Slice]] = {}
    sources: dict[tuple[Any, ...], Slice] = {}
    for event in sorted(data["traceEvents"], key=lambda e: nanoseconds(e.get("ts", 0))):
        phase, now = event["ph"], nanoseconds(event.get("ts", 0))
        where = (event["pid"], event["tid"])
        stack = stacks.setdefault(where, [])
        if 0 in where:
            found.problems.append(f"the idle thread of the kernel is {where}: {event}")
        if phase == "M" and event["name"] == "process_name":
            found.processes[event["pid"]] = event["args"]["name"]
        elif phase == "M" and event["name"] == "thread_name":
            found.tracks[where] = event["args"]["name"]
        elif phase == "X":
            made = Slice(event["name"], where, now, now + nanoseconds(event["dur"]))
            if made.end < made.start:
                found.problems.append(f"negative duration: {event}")
            while stack and stack[-1].end <= now and (stack[-1].end < now or made.end > now):
                stack.pop()
            if stack and now < stack[-1].end < made.end:
                found.problems.append(f"dropped, it overlaps {stack[-1]}: {event}")
                continue
            stack.append(made)
            found.slices.append(made)
        elif phase in "sf":
            key = (event["id"], event["cat"], event["name"])
            if not stack:
                found.problems.append(f"no enclosing slice: {event}")
            elif phase == "s":
                if key in sources:
                    found.problems.append(f"a flow's id is used twice: {event}")
                sources[key] = stack[-1]
            elif key not in sources:
                found.problems.append(f"a flow ends before it starts: {event}")
            else:
                found.flows.append((sources[key], stack[-1]))
        elif phase == "C":
            for name, value in event["args"].items():
                at = found.counters.setdefault(f"{event['name']} {name}", [])
                at.append((now, value))
        else:
            assert phase == "M", event
    return found
