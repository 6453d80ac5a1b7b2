"""`torchgraft run-model`: run a compiled model and compare it with the model itself."""

from __future__ import annotations

import json
from typing import Any

import click
import torch
from torch import Tensor

import torchgraft as graft
from torchgraft import _torch, progress
from torchgraft.cli.model import Given, job, options
from torchgraft.verify.compare import unlike


@click.command("run-model")
@options
@click.option("--seed", default=0, show_default=True, help="For random inputs.")
@click.option("--program", help="Run this saved program (.graft) in place of compiling.")
@click.option("--save", help="Write the outputs as .npy files: SAVE_0.npy, SAVE_1.npy, ...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of the table.")
def run_model(
    model: str,
    inputs: tuple[Given, ...],
    mode: str,
    device: str | None,
    seed: int,
    program: str | None,
    save: str | None,
    as_json: bool,
) -> None:
    """Run MODEL, compiled, on random or given inputs, and check the results.

    Exits with 1 where a result is not what the model itself gives.
    """
    torch.manual_seed(seed)
    work = job(model, inputs, device)
    args, kwargs = work.args, work.kwargs
    if program is not None:
        compiled = graft.load(program)
    else:
        compiled = work.compile(mode)
    with progress.shown("running"), torch.no_grad():
        want = _leaves(work.eager(*_copies(args), **_copies(kwargs)))
        got = _leaves(compiled(*_copies(args), **_copies(kwargs)))
    rows = [_row(i, *pair) for i, pair in enumerate(zip(want, got, strict=True))]
    if save is not None:
        _save(save, got)
    if as_json:
        click.echo(json.dumps({"ok": all(row["ok"] for row in rows), "outputs": rows}, indent=2))
    else:
        for row in rows:
            said = "same" if row["ok"] else f"WRONG: {row['difference']}"
            click.echo(f"output {row['output']}: {row['type']}, {said}")
    if not all(row["ok"] for row in rows):
        raise SystemExit(1)


def _row(number: int, want: Any, got: Any) -> dict[str, Any]:
    difference = unlike(want, got, depth=64)
    kind = f"{want.dtype} {tuple(want.shape)}" if isinstance(want, Tensor) else repr(want)
    return {"output": number, "type": kind, "ok": difference is None, "difference": difference}


def _leaves(tree: Any) -> list[Any]:
    return _torch.flatten(tree)[0]


def _copies(tree: Any) -> Any:
    return _torch.map_leaves(lambda x: x.clone() if isinstance(x, Tensor) else x, tree)


def _save(stem: str, outputs: list[Any]) -> None:
    import numpy

    for i, value in enumerate(outputs):
        if isinstance(value, Tensor):
            numpy.save(f"{stem}_{i}.npy", value.cpu().numpy())
