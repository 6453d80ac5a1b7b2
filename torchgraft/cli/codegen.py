"""`torchgraft codegen`: a Python module of builders from operator prototypes."""

from __future__ import annotations

from pathlib import Path

import click

from torchgraft.errors import BadFile
from torchgraft.op.builders import generate
from torchgraft.op.declare import read_prototypes
from torchgraft.op.prototype import Prototype


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("-o", "--output", default="-", help="The module to write; standard output if none.")
@click.option("--keep-going", is_flag=True, help="Leave malformed entries out, and exit with 0.")
def codegen(files: tuple[str, ...], output: str, keep_going: bool) -> None:
    """Write builder functions for the prototypes of FILES (REG_OP headers, msopgen JSON).

    What was left out goes to standard error, each with file, line and reason. Exits with 1 and
    writes nothing when an entry is malformed.
    """
    prototypes: list[Prototype] = []
    skipped = 0
    for file in files:
        parsed = read_prototypes(file)
        prototypes += parsed.prototypes
        skipped += len(parsed.skipped)
        malformed = [one.line() for one in parsed.skipped if one.malformed]
        if malformed and not keep_going:
            raise BadFile(file, malformed, "--keep-going")
        for one in parsed.skipped:
            click.echo(f"skipped {one.line()}", err=True)
        for note in parsed.notes:
            click.echo(f"note {note.where}: {note.name}: {note.what}", err=True)
    text = generate(prototypes)
    if output == "-":
        click.echo(text, nl=False)
        return
    Path(output).write_text(text, encoding="utf-8", newline="\n")
    click.echo(f"{output}: {len(prototypes)} builders, {skipped} entries skipped", err=True)
