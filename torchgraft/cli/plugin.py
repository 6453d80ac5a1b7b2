"""`torchgraft op-plugin`: operators of an op-plugin project, built and kept in a folder."""

from __future__ import annotations

import collections
import json

import click

from torchgraft.op import plugin
from torchgraft.op.prototype import Note


@click.command("op-plugin")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--out", default=plugin.FOLDER, show_default=True, help="The folder to keep it in.")
@click.option("--keep-going", is_flag=True, help="Leave out entries that cannot be read.")
@click.option("--torch-version", help="Read for this version, such as v2.7.  [default: torch's]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; every note is in it.")
def op_plugin(
    files: tuple[str, ...], out: str, keep_going: bool, torch_version: str | None, as_json: bool
) -> None:
    """Declare the operators of FILES under npu:: and build their C++ kernels.

    FILES are functions (.yaml), kernels (.cpp, .py), prototypes (.h, .json), and derivatives*.yaml,
    deprecated*.yaml and atb_ops*.yaml, which are found beside functions. Only what changed is built
    again.
    Exits with 1, and keeps nothing, when an entry cannot be read or a kernel does not build.
    """
    built = plugin.build(files, out, keep_going=keep_going, version=torch_version)
    loaded = plugin.load(out)
    if as_json:
        about = {
            "ops": loaded.ops,
            "prototypes": loaded.prototypes,
            "compiled": built.compiled,
            "kept": built.kept,
            "notes": [f"{one.where}: {one.name}: {one.what}" for one in built.notes],
            "problems": built.problems,
        }
        click.echo(json.dumps(about, indent=2))
        return
    for problem in built.problems:
        click.echo(f"skipped {problem}", err=True)
    for line in summarise(built.notes):
        click.echo(f"note {line}", err=True)
    for source in built.compiled:
        click.echo(f"compiled {source}")
    for source in built.kept:
        click.echo(f"unchanged {source}")
    kinds = f"{len(loaded.ops)} operators, {len(loaded.prototypes)} prototypes"
    click.echo(f"{built.folder}: {kinds}")


def summarise(notes: tuple[Note, ...]) -> list[str]:
    """One line per kind of note, with how many there are and the first of them."""
    kinds: dict[str, list[Note]] = collections.defaultdict(list)
    for note in notes:
        kinds[note.what].append(note)
    return [
        f"{group[0].where}: {group[0].name}: {what}"
        + (f" (and {len(group) - 1} more like it)" if len(group) > 1 else "")
        for what, group in kinds.items()
    ]
