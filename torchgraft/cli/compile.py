"""`torchgraft compile`: a model from a file, compiled, saved, reported."""

from __future__ import annotations

import json
import pathlib
import time

import click

from torchgraft import progress
from torchgraft.cli.choice import Choice
from torchgraft.cli.model import Given, job, options
from torchgraft.config import DUMP_FORMATS


@click.command()
@options
@click.option("-o", "--output", help="Save the compiled program, such as model.graft.")
@click.option("--report", "page", help="Write the report, an HTML page.")
@click.option("--dump", help="A folder for the graph after each step.")
@click.option(
    "--dump-format", "formats", type=Choice(DUMP_FORMATS), multiple=True, default=("txt",)
)
@click.option("--full", is_flag=True, help="Fail where something would run on ATen.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def compile(
    model: str,
    inputs: tuple[Given, ...],
    mode: str,
    device: str | None,
    output: str | None,
    page: str | None,
    dump: str | None,
    formats: tuple[str, ...],
    full: bool,
    as_json: bool,
) -> None:
    """Compile MODEL: a .pt or .pt2 file, or package.module:attribute.

    Prints what was done and why. Exits with 1 where it cannot be compiled.
    """
    for file in filter(None, (output, page)):  # fails now rather than when all is done
        pathlib.Path(file).parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    work = job(model, inputs, device)  # kept until its weights are saved
    compiled = work.compile(mode, dump=dump, dump_formats=formats, require_full_compilation=full)
    took = time.perf_counter() - start
    if output:
        with progress.shown(f"saving {output}"):
            compiled.save(output)
    if page:
        compiled.report.html(page)
    if as_json:
        click.echo(json.dumps({**compiled.report.data(), "took": took}))
        return
    click.echo(str(compiled.report))
    for what, path in (("program", output), ("report", page), ("dumps", dump)):
        if path:
            click.echo(f"{what}: {path}")
    click.echo(f"compiled in {took:.1f} s")
