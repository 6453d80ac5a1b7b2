"""`torchgraft doctor`: what this machine can do, what is missing, and what to do about it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterator

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import torchgraft as graft
from torchgraft._torch import generator
from torchgraft.errors import first_line

OLDEST, NEWEST = (2, 11), (2, 13)
"""The torch releases that torchgraft is tested with."""

OK, MISSING, BROKEN = "ok", "missing", "broken"
_SIGNS = {OK: "[green]✓[/]", MISSING: "[yellow]–[/]", BROKEN: "[red]✗[/]"}


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing looked at. `missing` can be lived without, `broken` cannot."""

    name: str
    state: str
    found: str
    advice: str = ""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of the table.")
def doctor(as_json: bool) -> None:
    """Say what this machine can do. Exits with 1 when something needed is broken."""
    checks = list(examine())
    healthy = all(check.state != BROKEN for check in checks)
    if as_json:
        rows = {c.name: {"state": c.state, "found": c.found, "advice": c.advice} for c in checks}
        click.echo(json.dumps({"ok": healthy, "checks": rows}, indent=2))
    else:
        _show(checks)
    if not healthy:
        raise SystemExit(1)


def _show(checks: list[Check]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(width=1)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        advice = f"\n[dim]{escape(check.advice)}[/]" if check.advice else ""
        table.add_row(_SIGNS[check.state], check.name, f"{escape(check.found)}{advice}")
    Console(highlight=False, emoji=False).print(table)


def examine() -> Iterator[Check]:
    """Every check in turn; the last ones compile and run a program."""
    yield Check("python", OK, platform.python_version())
    yield Check("torchgraft", OK, graft.__version__)
    yield check_torch(torch.__version__)
    yield _cpu()
    yield _cuda()
    yield _triton()
    yield _compiler()
    yield _tool("cmake")
    yield _tool("ninja")
    yield _backend()
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        for mode in ("eager", "default"):
            yield _program(mode, device)


def check_torch(version: str) -> Check:
    """Whether a torch release is one that torchgraft is tested with."""
    tested = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = tuple(map(int, numbers.groups())) if numbers else OLDEST
    if release < OLDEST:
        advice = f"torchgraft needs {tested}: pip install 'torch>={OLDEST[0]}.{OLDEST[1]}'."
        return Check("torch", BROKEN, version, advice)
    if release > NEWEST:
        return Check("torch", MISSING, f"{version}, not tested", f"Tested: {tested}.")
    return Check("torch", OK, f"{version}, in the tested range {tested}")


def _cpu() -> Check:
    capability = torch.backends.cpu.get_cpu_capability()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    return Check("cpu", OK, f"{platform.machine()}, {capability}, {threads} threads, {cores} cores")


def _cuda() -> Check:
    if torch.version.cuda is None:
        advice = "Install a CUDA build of torch to use an NVIDIA GPU."
        return Check("cuda", MISSING, "this torch is built without CUDA", advice)
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "no device visible" + (f" (CUDA_VISIBLE_DEVICES={hidden!r})" if hidden else "")
        return Check("cuda", MISSING, why, "Check that nvidia-smi lists a device.")
    driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    devices = []
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        memory = about.total_memory / 2**30
        devices.append(f"{about.name} (sm_{about.major}{about.minor}, {memory:.0f} GiB)")
    found = f"{', '.join(devices)}, CUDA {torch.version.cuda}, driver {driver or 'unknown'}"
    return Check("cuda", OK, found)


def _triton() -> Check:
    try:
        return Check("triton", OK, importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        advice = "Without it CUDA programs run on ATen, node by node: pip install triton."
        needed = torch.cuda.is_available()
        return Check("triton", MISSING, "not installed", advice if needed else "Only for CUDA.")


def _compiler() -> Check:
    found = generator.has_compiler()
    if found is None:
        advice = (
            "CPU programs run on ATen, node by node. Install g++ or clang++, or set CXX, "
            "for generated code."
        )
        return Check("c++ compiler", MISSING, "not found", advice)
    return Check("c++ compiler", OK, _said(found, "--version") or found)


def _tool(name: str) -> Check:
    if (said := _said(name, "--version")) is not None:
        return Check(name, OK, said)
    return Check(name, MISSING, "not found", f"Only to build C++ extensions: pip install {name}.")


def _said(*command: str) -> str | None:
    """The first line that a program prints, or None where it cannot be run."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.strip().splitlines()), None)


def _backend() -> Check:
    if "torchgraft" in torch.compiler.list_backends():
        return Check("torch.compile", OK, 'knows backend="torchgraft"')
    advice = (
        "The entry point of this package is not installed: pip install it again, "
        "or pass backend=graft.backend()."
    )
    return Check("torch.compile", BROKEN, 'does not know backend="torchgraft"', advice)


def _program(mode: str, device: str) -> Check:
    """Compile and run `relu(x) * 2`, and compare with what that must give."""
    name = f"{mode} on {device}"
    x = torch.linspace(-1, 1, 1024, device=device)
    start = time.perf_counter()
    try:
        with graft.Registry():  # without the passes that somebody registered
            compiled = graft.compile(lambda x: x.relu() * 2, (x,), mode=mode)
        result = compiled(x)
    except Exception as error:
        return Check(name, BROKEN, first_line(error), "The traceback of graft.compile has more.")
    took = f"{time.perf_counter() - start:.1f} s"
    if not torch.equal(result, x.clamp(min=0) * 2):
        return Check(name, BROKEN, f"wrong result, {took}", "Please report this.")
    report = compiled.report
    where = "generated code" if report.regions else "ATen, node by node"
    found = f"right, by {where}, {took}"
    if mode == "eager" or report.regions:
        return Check(name, OK, found)
    reason = report.fallbacks[0].reason
    if not reason.startswith("the code generator failed"):
        return Check(name, MISSING, found, reason)
    fix = "Check that the compiler works and that Python's headers are installed."
    return Check(name, BROKEN, found, f"{reason}\n{fix}")
