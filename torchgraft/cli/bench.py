"""`torchgraft bench`: a compiled model against eager and torch.compile."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import torch
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from torchgraft import progress
from torchgraft.cli.choice import Choice
from torchgraft.cli.model import Given, Job, job, options

EAGER, THEIRS, OURS = "eager", "torch.compile", "torchgraft"


@click.command()
@options
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Calls of each; they take turns.",
)
@click.option("--against", type=Choice([EAGER, THEIRS]), multiple=True, help="Only these.")
@click.option("--threads", type=int, help="For operators on CPU.  [default: torch's]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of table and plot.")
def bench(
    model: str,
    inputs: tuple[Given, ...],
    mode: str,
    device: str | None,
    rounds: int,
    against: tuple[str, ...],
    threads: int | None,
    as_json: bool,
) -> None:
    """Time MODEL: eager, torch.compile and torchgraft take turns.

    Each is called a few times before the clock starts; compiling is timed apart, with the
    caches that there are.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    work = job(model, inputs, device)
    calls, compiling = _calls(work, mode, against or (EAGER, THEIRS))
    found = {name: sorted(times) for name, times in _rounds(calls, rounds, work.device).items()}
    rows = {
        name: {
            "median_us": statistics.median(times) * 1e6,
            "p20_us": times[int(0.2 * (len(times) - 1))] * 1e6,
            "compile_s": compiling.get(name),
        }
        for name, times in found.items()
    }
    if as_json:
        click.echo(json.dumps({"mode": mode, "device": str(work.device), "peers": rows}, indent=2))
    else:
        _show(rows)


def _calls(
    work: Job, mode: str, against: tuple[str, ...]
) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    args, kwargs, eager = work.args, work.kwargs, work.eager
    compiling: dict[str, float] = {}
    calls: dict[str, Callable[[], Any]] = {}
    if EAGER in against:
        calls[EAGER] = lambda: eager(*args, **kwargs)
    if THEIRS in against:
        theirs = torch.compile(work.source, mode=None if mode == EAGER else mode)
        calls[THEIRS] = lambda: theirs(*args, **kwargs)
        with progress.shown("torch.compile"), torch.no_grad():
            start = time.perf_counter()
            calls[THEIRS]()
            compiling[THEIRS] = time.perf_counter() - start
    start = time.perf_counter()
    ours = work.compile(mode)
    calls[OURS] = lambda: ours(*args, **kwargs)
    compiling[OURS] = time.perf_counter() - start
    return calls, compiling


def _rounds(
    calls: dict[str, Callable[[], Any]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each call; the calls take turns, so that noise falls on all alike."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    warm = 3
    with progress.shown("timing", ticks=False), torch.no_grad():
        for number in progress.each("round", range(rounds + warm)):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if number >= warm:
                    taken[name].append(time.perf_counter() - start)
    return taken


def _show(rows: dict[str, dict[str, Any]]) -> None:
    base = next(iter(rows.values()))["median_us"]
    longest = max(row["median_us"] for row in rows.values())
    table = Table(box=None, pad_edge=False)
    for title in ("", "us", "p20 us", f"times {next(iter(rows))}", "compile s"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    table.add_column("", width=24)
    for name, row in rows.items():
        took = row["compile_s"]
        table.add_row(
            name,
            f"{row['median_us']:.1f}",
            f"{row['p20_us']:.1f}",
            f"{base / row['median_us']:.2f}",
            "" if took is None else f"{took:.1f}",
            Bar(longest, 0, row["median_us"]),
        )
    Console(highlight=False).print(table)
