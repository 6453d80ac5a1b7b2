"""The report as one HTML page: data in it, nothing fetched, opens from disk.

The page itself is built from `web/` into `assets/`; this file gathers what it shows.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import html
import json
import os
import pathlib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from torchgraft.errors import NoProgram
from torchgraft.fx import edit, meta
from torchgraft.fx.cost import NOMINAL
from torchgraft.inspect.cost import costs
from torchgraft.inspect.graph import Row, row
from torchgraft.inspect.profile import Profile, buffer_sizes
from torchgraft.inspect.timeline import Timeline, predict
from torchgraft.report import Report

if TYPE_CHECKING:
    from torchgraft.program import Program

ASSETS = pathlib.Path(__file__).parent / "assets"


def write(path: str | os.PathLike[str], report: Report) -> None:
    """Write the page of a report."""
    file = pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page(data(report)), encoding="utf-8", newline="\n")


def write_into(folder: str, report: Report) -> pathlib.Path:
    """Write the page under the program's name, with a number where that is taken."""
    home = pathlib.Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"\W+", "_", report.name).strip("_") or "program"
    number = 1
    while True:
        path = home / (f"{stem}.html" if number == 1 else f"{stem}_{number}.html")
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            number += 1
            continue
        write(path, report)
        return path


_COUNTED = "it was loaded: a package keeps how much each pass changed, not what"


def page(content: dict[str, Any]) -> str:
    """The page that shows this data. It travels compressed, as text that no parser can mistake."""
    packed = gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 6, mtime=0)
    template = (ASSETS / "page.html").read_text("utf-8")
    parts = {
        "title": html.escape(f"{content['name']} · torchgraft"),
        "style": (ASSETS / "report.css").read_text("utf-8"),
        "script": (ASSETS / "report.js").read_text("utf-8"),
        "data": base64.b64encode(packed).decode("ascii"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found.group(1)], template)


def data(report: Report) -> dict[str, Any]:
    """Everything that the page shows, as plain data."""
    from torchgraft import __version__

    program = report.program()
    if program is None:
        raise NoProgram(report.name)
    program.view(program)
    versions, steps = _steps(program)
    return {
        "name": report.name,
        "front_end": report.front_end,
        "mode": report.mode,
        "device": report.device,
        "torchgraft": __version__,
        "torch": torch.__version__,
        "seconds": dict(report.seconds),
        "coverage": report.coverage,
        "compiled": len(report.compiled),
        "regions": len(report.regions),
        "notes": [*report.notes, *([] if program.history.changes else [_COUNTED])],
        "versions": versions.packed(),
        **steps,
        "placed": [dataclasses.asdict(node) for node in report.nodes],
        "streams": _streams(program),
        "trials": [dataclasses.asdict(one) for one in report.trials],
        "branches": _branches(program),
        "conversions": [dataclasses.asdict(one) for one in report.conversions],
        "plan": _plan(program, program.profile),
    }


class Versions:
    """Nodes as they were at some time: equal ones are kept once."""

    def __init__(self) -> None:
        self._rows: dict[Row, int] = {}

    def number(self, one: Row) -> int:
        return self._rows.setdefault(one, len(self._rows))

    def packed(self) -> dict[str, list[Any]]:
        """A column for each field: smaller than a row for each node."""
        names = [field.name for field in dataclasses.fields(Row)]
        return {name: [getattr(one, name) for one in self._rows] for name in names}


def _steps(program: Program) -> tuple[Versions, dict[str, Any]]:
    """The final graph and each step's change, from which every earlier graph follows.

    A step that ran before the graph changed again is shown with what it made, as it made it: the
    page walks backwards and puts removed and changed nodes back.
    """
    versions = Versions()
    final = [versions.number(row(node)) for node in program.gm.graph.nodes]
    report = program.report
    known = [dataclasses.asdict(step) for step in report.steps]
    count = program.history.changes[-1] if program.history.changes else None
    if count is not None and len(program.history.changes) > len(known):
        known.append(
            {
                "name": count.step,
                "stage": "convert",
                "seconds": None,
                "added": len(count.added),
                "removed": len(count.removed),
                "changed": len(count.changed),
                "nodes": len(program.gm.graph.nodes),
                "hits": None,
                "miss": "",
            }
        )
    if not program.history.changes:  # a package keeps what was counted
        known = [{**step, "diff": {"added": [], "removed": [], "changed": []}} for step in known]
        return versions, {"final": final, "steps": known}
    for step, change in zip(known, program.history.changes, strict=True):
        step["diff"] = {
            "added": sorted(node.name for node in change.added),
            "removed": _old(versions, change.removed.items()),
            "changed": _old(versions, change.changed.items()),
        }
    return versions, {"final": final, "steps": known}


def _old(versions: Versions, calls: Iterable[tuple[Any, Any]]) -> list[int]:
    return [versions.number(row(node, call)) for node, call in calls]


def _streams(program: Program) -> dict[str, str]:
    """The stream of each node that has one of its own: the launch's that runs it."""
    found: dict[str, str] = {}
    for launch, cost in zip(program.plan.launches, costs(program), strict=True):
        found.update(dict.fromkeys(cost.nodes, launch.stream))
    return found


def _branches(program: Program) -> dict[str, str]:
    """The graphs that control flow chooses from, as text, by the node that holds each."""
    found = {}
    for node in program.gm.graph.find_nodes(op="get_attr"):
        held = meta.attribute(program.gm, str(node.target))
        if isinstance(held, GraphModule):
            found[node.name] = edit.text(held)
    return found


def _plan(program: Program, profile: Profile | None) -> dict[str, Any]:
    """The plan's text, its timelines and its kernels."""
    machine = (
        profile.machine
        if profile is not None
        else NOMINAL.get(program.report.device, NOMINAL["cpu"])
    )
    prices = costs(program)
    durations = [machine.launch + machine.seconds(cost) for cost in prices]
    predicted = predict(program.plan, durations, buffer_sizes(program))
    kernels = [
        {"name": launch.kernel, "stream": launch.stream, **dataclasses.asdict(cost)}
        for launch, cost in zip(program.plan.launches, prices, strict=True)
    ]
    for i, one in enumerate(kernels):
        one["predicted"] = durations[i]
        if profile is not None:
            one["seconds"] = profile.kernels[i].seconds
            one["share"] = profile.kernels[i].share
    return {
        "text": str(program.plan),
        "machine": dataclasses.asdict(machine),
        "kernels": kernels,
        "predicted": _timeline(predicted),
        "measured": _timeline(profile.timeline) if profile is not None else None,
        "call": profile.seconds if profile is not None else None,
    }


def _timeline(timeline: Timeline) -> dict[str, Any]:
    return {
        "streams": timeline.streams,
        "seconds": timeline.seconds,
        "spans": [dataclasses.asdict(span) for span in timeline.spans],
        "arrows": [dataclasses.asdict(arrow) for arrow in timeline.arrows],
        "memory": timeline.memory,
    }
