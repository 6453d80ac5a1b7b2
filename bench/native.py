"""What a saved program costs to load and to call: `python -m bench native --model bert`."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import torchgraft as graft
from bench.models import build
from torchgraft.native import driver

SIZES = (4, 64)


def region(x: Tensor) -> Tensor:
    return (x * 2 + 1).relu().softmax(1)


def operators(x: Tensor) -> Tensor:
    return (x @ x).cumsum(0).sort()[0].softmax(1)


PROGRAMS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "region": (region, "default"),
    "operators": (operators, "eager"),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """Microseconds of a call: in C++, of its kernels alone, and in Python by either executor."""

    program: str
    size: int
    kernels_us: float
    cpp_us: float
    native_us: float
    python_us: float


def call(name: str, size: int, folder: Path) -> Call:
    """Time one program four ways, which take turns."""
    fn, mode = PROGRAMS[name]
    x = torch.rand(size, size)
    package = folder / f"{name}{size}.graft"
    graft.compile(fn, (x,), mode=mode).save(package)
    kernels = "operators"
    if mode != "eager":
        with zipfile.ZipFile(package) as archive:
            [member] = [n for n in archive.namelist() if n.endswith(".so")]
            kernels = archive.extract(member, folder)
    found = json.loads(_out([str(_forward(folder)), str(package), kernels, str(size)]))
    loaded = [_loaded(package, executor) for executor in ("native", "python")]
    best = [float("inf")] * 2
    for _ in range(200):
        best = [min(b, _microseconds(p, x)) for b, p in zip(best, loaded, strict=True)]
    return Call(name, size, found["kernels_us"], found["forward_us"], *best)


def _loaded(package: Path, executor: str) -> graft.Compiled:
    before = os.environ.get("TORCHGRAFT_EXECUTOR", "auto")
    os.environ["TORCHGRAFT_EXECUTOR"] = executor
    try:
        return graft.load(package)
    finally:
        os.environ["TORCHGRAFT_EXECUTOR"] = before


def _microseconds(program: Callable[[Tensor], Any], x: Tensor, calls: int = 100) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        program(x)
    return (time.perf_counter() - start) / calls * 1e6


def _forward(folder: Path) -> Path:
    """The program that times C++, built once."""
    if not (made := folder / "forward").exists():
        root, tools = driver.build("runtime"), driver._tools("runtime")
        torch_root = driver._torch_root()
        command = [tools.cxx, *driver.FLAGS, "-include", str(driver._header(tools))]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        for path in ("include", "include/torch/csrc/api/include"):
            command += ["-isystem", str(torch_root / path)]
        command += ["-I", str(root.include), str(Path(__file__).with_name("forward.cpp"))]
        for place in (root.lib, torch_root / "lib"):
            command += [f"-L{place}", f"-Wl,-rpath,{place}"]
        _out([*command, "-ltorchgraft", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(made)])
    return made


def _out(command: list[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@dataclasses.dataclass(frozen=True)
class Load:
    """Seconds to load a saved model, and to do no more than read its file."""

    model: str
    megabytes: float
    load_s: float
    read_s: float


def load(name: str, folder: Path) -> Load:
    """Save a model and load it, its file in the page cache as after a copy."""
    case = build(name)
    package = folder / f"{name}.graft"
    graft.compile(case.model, case.args).save(package)
    graft.load(package)  # what every process pays once
    size = package.stat().st_size / 1e6
    return Load(name, size, _best(lambda: graft.load(package)), _best(package.read_bytes))


def _best(fn: Callable[[], Any], rounds: int = 5) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        fn()
        best = min(best, time.perf_counter() - start)
    return best


def run(models: Sequence[str]) -> list[Call | Load]:
    """Print a row for each program and each model, and give them."""
    rows: list[Call | Load] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in PROGRAMS:
            for size in SIZES:
                rows.append(made := call(name, size, Path(folder)))
                click.echo(
                    f"{name} {size}x{size}: kernels {made.kernels_us:.2f} us, "
                    f"C++ {made.cpp_us:.2f} ({made.cpp_us / made.kernels_us:.2f}x), "
                    f"Python {made.native_us:.2f}, Python's own {made.python_us:.2f}"
                )
        for name in models:
            rows.append(found := load(name, Path(folder)))
            click.echo(
                f"{name}: load {found.load_s:.2f} s, reading its {found.megabytes:.0f} MB "
                f"{found.read_s:.2f} s"
            )
    return rows
