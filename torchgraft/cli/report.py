"""`torchgraft report`: what becomes of a model, as a page."""

from __future__ import annotations

import click

from torchgraft import progress
from torchgraft.cli.model import Given, job, options


@click.command()
@options
@click.option("-o", "--output", default="report.html", show_default=True, help="The page to write.")
@click.option("--measure", is_flag=True, help="Run it, too: the page then has measured times.")
@click.option("--trace", help="Measure, and write a trace for Perfetto.")
def report(
    model: str,
    inputs: tuple[Given, ...],
    mode: str,
    device: str | None,
    output: str,
    measure: bool,
    trace: str | None,
) -> None:
    """Write one HTML page with all that was done to MODEL."""
    work = job(model, inputs, device)
    compiled = work.compile(mode)
    if measure or trace:
        with progress.shown("measuring", ticks=False):
            profile = compiled.profile(work.args, work.kwargs)
        if trace:
            profile.save(trace)
            click.echo(trace)
    compiled.report.html(output)
    click.echo(output)
