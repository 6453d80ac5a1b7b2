"""`torchgraft inspect`: what is in a package. Nothing in it is run."""

from __future__ import annotations

import json
from typing import Any

import click

from torchgraft.package.describe import describe


@click.command()
@click.argument("file", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--weights", is_flag=True, help="List every weight.")
def inspect(file: str, as_json: bool, weights: bool) -> None:
    """Show what a .graft FILE holds and needs, without running anything.

    Every hash is checked. The package may be for another machine or another torch.
    """
    found = describe(file)
    click.echo(json.dumps(found, indent=2) if as_json else _text(found, weights))


def _text(found: dict[str, Any], weights: bool) -> str:
    made, needs = found["made_by"], found["requires"]
    lines = [
        f"{found['name']} ({found['front_end']}, mode {found['mode']}), {_size(found['bytes'])}",
        f"made by: torchgraft {made['torchgraft']}, torch {made['torch']}"
        + (f", CUDA {made['cuda']}" if made["cuda"] else ""),
        f"needs: {needs['device']}, {needs['machine']}"
        + (f", compute capability {needs['capability']}" if needs["capability"] else "")
        + (f", {' '.join(needs['cpu'])}" if needs["cpu"] else ""),
    ]
    for library in found["libraries"]:
        lines.append(f"operators: {', '.join(library['ops'])} from {library['name'] or 'Python'}")
    for i, gear in enumerate(found["gears"]):
        title = f"inputs of gear {i}" if len(found["gears"]) > 1 else "inputs"
        lines += [f"{title}:", *(f"  {name}: {kind}" for name, kind in gear["inputs"].items())]
        lines += [f"  {name} from {low} to {high}" for name, (low, high) in gear["sizes"].items()]
    held = found["weights"]
    lines.append(f"weights: {len(held)}")
    if weights:
        lines += [f"  {name}: {one['type']} ({one['kind']})" for name, one in held.items()]
    lines += [f"region {name}: {member}" for name, member in found["regions"].items()]
    for title, texts in (("graph", found["graphs"]), ("plan", found["plans"])):
        for text in texts:
            lines += [f"{title}:", *(f"  {line}" for line in text.splitlines())]
    return "\n".join(lines)


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"
