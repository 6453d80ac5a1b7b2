"""Tables and files: what `python -m bench` prints."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.compiletime import BASE, Cost
from bench.growth import Growth
from bench.measure import Timing
from bench.opdb import Result
from bench.plan import Cost as Planned
from bench.scale import Measured

PACKAGES = ("torchgraft", "torch", "triton", "transformers", "onnxruntime", "openvino", "numpy")
BASELINE = "compile"

console = Console(width=None if os.isatty(1) else 140)


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine() -> dict[str, str]:
    """Versions, processor, load and commit: what a number means nothing without."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "checkout" if name == "torchgraft" else "-"
    info = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (info.read_text().splitlines() if info.exists() else [])
        if line.startswith("model name")
    ]
    found["processor"] = f"{names[0] if names else platform.machine()} × {os.cpu_count()}"
    found["load"] = " ".join(f"{value:.1f}" for value in os.getloadavg())
    # Asked of the driver's tool: torch.cuda here would spoil this process for forking.
    gpu = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    commit = _output("git", "rev-parse", "--short", "HEAD")
    return found | ({"gpu": gpu} if gpu else {}) | ({"commit": commit} if commit else {})


def show_machine(about: dict[str, str]) -> None:
    console.print("  ".join(f"{key} {value}" for key, value in about.items()), style="dim")


def _number(value: float | None, digits: int = 1) -> str:
    if value is None:
        return "-"
    return f"{value:,.{digits}f}" if value < 1000 else f"{value:,.0f}"


def show_timings(model: str, timings: Sequence[Timing], device: str) -> None:
    """One model's table. Speed-up is the baseline's p20 over this peer's: more is faster.

    Of the 20th percentiles, because on a loaded machine samples fall into two heaps and the median
    into either: two runs in a row gave 1.19 and 1.54 by medians where p20 gave 1.34 and 1.41.
    """
    ranked, other = ("wall", "device") if device == "cuda" else ("cpu", "wall")
    title = {"cpu": "CPU µs", "wall": "wall µs", "device": "events µs"}
    table = Table(title=model, title_justify="left")
    headers = (title[ranked], "p20", "spread", title[other], "× compile", "error", "build s")
    table.add_column("peer")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    base = next((t.p20(ranked) for t in timings if t.peer == BASELINE and t.status == "ok"), None)
    for t in timings:
        low, spread = t.p20(ranked), t.spread(ranked)
        faster = f"{base / low:.2f}" if base and low and t.status == "ok" else "-"
        style = {"WRONG": "bold red", "failed": "red", "skipped": "dim"}.get(t.status)
        table.add_row(
            t.peer,
            _number(t.median(ranked)),
            _number(low),
            "-" if spread is None else f"{spread:.0%}",
            _number(t.median(other)),
            faster,
            "-" if t.error is None else f"{t.error:.0e}",
            _number(t.build_s),
            _said(t),
            style=style,
        )
    console.print(table)


def _said(t: Timing) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in t.facts.items())
    return ", ".join(filter(None, (facts, t.note))) if t.status == "ok" else f"{t.status}: {t.note}"


def show_growth(rows: Iterable[Growth]) -> None:
    table = Table(box=None)
    for column in ("nodes", "torch.export s", "ours s", "ours µs a node", "peak MiB"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = (row.export_s, row.ours_s, row.per_node_us, row.peak_mib)
        table.add_row(str(row.nodes), *(_number(value) for value in numbers))
    console.print(table)


_CPU = {
    "graft": "torchgraft",
    "eager": "eager",
    "aoti-boxed": "AOTInductor",
    "ort": "ONNX Runtime",
    "openvino": "OpenVINO",
}
_CUDA = {
    "graft-reduce": "torchgraft",
    "eager": "eager",
    "compile-reduce": "reduce-overhead",
    "compile-max": "max-autotune",
    "compile-frozen": "reduce-overhead, frozen",
}
"""The columns of a table, after the baseline's time."""


def markdown(rows: Sequence[dict[str, Any]], kind: str = "cpu") -> str:
    """Results (rows of `--json` files) as the README's table: times faster than the baseline."""
    by_model: dict[str, dict[str, float]] = {}
    for row in rows:
        low = row["summary"][kind]["p20"] if row["status"] == "ok" else None
        if low:
            by_model.setdefault(row["model"], {})[row["peer"]] = low
    columns = _CPU if kind == "cpu" else _CUDA
    head = ["model", "torch.compile", *columns.values()]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for model, times in by_model.items():
        if BASELINE not in times:
            continue
        base = times[BASELINE]
        shown = f"{base:.0f} µs" if base < 1e4 else f"{base / 1e3:.1f} ms"
        cells = [f"{base / times[peer]:.2f}" if peer in times else "-" for peer in columns]
        cells[0] = f"**{cells[0]}**"
        lines.append(f"| {model} | {shown} | {' | '.join(cells)} |")
    return "\n".join(lines)


MARKS = "<!-- speed -->", "<!-- /speed -->"
"""Where the README's table stands."""


def put(path: Path, table: str) -> None:
    """Write the table between the marks of a file."""
    text = path.read_text("utf-8")
    before, mark, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not mark or not end:
        raise ValueError(f"{path} has no {MARKS[0]} and {MARKS[1]} to write between")
    path.write_text(f"{before}{mark}\n{table}\n{end}{after}", "utf-8")


def show_costs(costs: Iterable[Cost]) -> None:
    """Compile times by model, with what each way costs over Inductor alone."""
    table = Table(title="until the first answer, fresh process and caches", title_justify="left")
    table.add_column("model")
    table.add_column("way")
    for header in ("CPU s", "wall s", "÷ inductor"):
        table.add_column(header, justify="right")
    table.add_column("note", overflow="fold")
    costs = list(costs)
    cpu = {(cost.model, cost.way): cost.cpu_s for cost in costs}
    for cost in costs:
        alone = cpu.get((cost.model, BASE.get(cost.way, "")))
        ratio = f"{cost.cpu_s / alone:.2f}" if cost.cpu_s and alone else "-"
        numbers = (_number(cost.cpu_s), _number(cost.wall_s), ratio)
        table.add_row(cost.model, cost.way, *numbers, cost.note)
    console.print(table)


def show_results(results: Sequence[Result]) -> None:
    """Failures one by one, reasons for skipping counted, then the totals."""
    for result in results:
        if result.status == "failed":
            line = f"FAILED {result.op} [{result.dtype}] {result.note}"
            console.print(line, style="red", markup=False, highlight=False)
    reasons = Counter(result.note.split(":")[0] for result in results if result.status == "skipped")
    for reason, count in reasons.most_common():
        console.print(f"skipped {count}: {reason}", style="dim", markup=False)
    totals = Counter(result.status for result in results)
    counts = ", ".join(f"{totals[status]} {status}" for status in ("passed", "failed", "skipped"))
    console.print(f"{counts} of {len(results)}")


def show_plans(costs: Iterable[Planned]) -> None:
    table = Table(box=None)
    for column in ("launches", "streams", "steps", "waits", "schedule s", "prove s"):
        table.add_column(column, justify="right")
    for cost in costs:
        counts = (cost.launches, cost.streams, cost.steps, cost.waits)
        table.add_row(*map(str, counts), _number(cost.schedule_s, 2), _number(cost.prove_s, 2))
    console.print(table)


def show_scale(found: Sequence[Measured]) -> None:
    """Each number of ranks: what was measured, and how far off the model is, in percent."""
    table = Table(title="a tensor-parallel block, ms", title_justify="left")
    headers = ("ranks", "link of", "alpha us", "GB/s", "run", "measured", "simulated", "off by")
    for header in headers:
        table.add_column(header, justify="right")
    for one in found:
        for other in dict.fromkeys((one.ranks, 2)):
            link = one.link(other)
            for name, run in (("overlap", one.overlap), ("one stream", one.serial)):
                real = statistics.mean(run.seconds)
                model = run.simulated(one.cluster(link))
                table.add_row(
                    str(one.ranks),
                    f"{other} ranks",
                    _number(link.alpha * 1e6),
                    _number(1e-9 / link.beta if link.beta else None, 2),
                    name,
                    _number(real * 1e3, 2),
                    _number(model * 1e3, 2),
                    f"{model / real - 1:+.0%}",
                )
    console.print(table)


def write(path: str | None, about: dict[str, str], rows: Iterable[Any]) -> None:
    """The machine and every row as JSON; nothing without a path."""
    if path:
        plain = [row.as_json() if isinstance(row, Timing) else asdict(row) for row in rows]
        Path(path).write_text(json.dumps({"machine": about, "rows": plain}, indent=1) + "\n")
