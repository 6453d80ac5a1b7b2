"""`torchgraft explain`: what becomes of a model, as text."""

from __future__ import annotations

import json

import click

from torchgraft.cli.model import Given, job, options


@click.command()
@options
@click.option("--json", "as_json", is_flag=True, help="Print the report's data as JSON.")
def explain(
    model: str, inputs: tuple[Given, ...], mode: str, device: str | None, as_json: bool
) -> None:
    """Show inputs, passes, reasons, graph and plan of MODEL."""
    compiled = job(model, inputs, device).compile(mode)
    click.echo(json.dumps(compiled.report.data()) if as_json else compiled.explain())
