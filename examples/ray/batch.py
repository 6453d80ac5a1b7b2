"""Batch inference on Ray: every row of some Parquet files through a saved program.

    python examples/ray/batch.py model.graft rows.parquet results/ --workers 4

Ray Data reads, spreads, shows progress and writes. A worker loads the program once. One that dies
is replaced and its batches are run again: each row is written once. Without arguments it makes a
small program and rows of its own.
"""

from __future__ import annotations

import pathlib
import tempfile

import click
import numpy as np
import ray
import torch

import torchgraft as graft


def infer(
    rows: ray.data.Dataset,
    program: str,
    workers: int,
    batch_size: int,
    gpus: float = 0,
    worker: type = graft.Rows,
) -> ray.data.Dataset:
    """The rows with the program's results; nothing runs until they are read or written."""
    return rows.map_batches(
        worker,
        fn_constructor_args=(program,),
        batch_size=batch_size,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=workers),
        num_cpus=0 if gpus else 1,
        num_gpus=gpus,
    )


def sample(folder: pathlib.Path) -> tuple[str, str]:
    """A program for up to 64 rows and 1,000 rows to run it on."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    declared = graft.Input(min_shape=(1, 16), max_shape=(64, 16))
    graft.compile(model, (declared,)).save(folder / "model.graft")
    values = np.random.default_rng(0).normal(size=(1000, 16)).astype(np.float32)
    made = ray.data.from_numpy(values).rename_columns({"data": "input"})
    made.write_parquet(str(folder / "rows"))
    return str(folder / "model.graft"), str(folder / "rows")


@click.command()
@click.argument("program", required=False)
@click.argument("rows", required=False)
@click.argument("results", required=False)
@click.option("--workers", default=2, show_default=True, help="At most; Ray starts what fits.")
@click.option("--batch-size", default=64, show_default=True)
@click.option("--gpus", default=0.0, help="Of each worker; a part of one is fine.")
def main(program: str, rows: str, results: str, workers: int, batch_size: int, gpus: float) -> None:
    """Run PROGRAM on the Parquet files ROWS and write them with its results to RESULTS."""
    with tempfile.TemporaryDirectory() as folder:
        if results is None:
            program, rows = sample(pathlib.Path(folder))
            results = f"{folder}/results"
        found = infer(ray.data.read_parquet(rows), program, workers, batch_size, gpus)
        found.write_parquet(results)
        click.echo(f"{ray.data.read_parquet(results).count()} rows with results")


if __name__ == "__main__":
    main()
