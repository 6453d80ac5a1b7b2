"""`torchgraft diff`: how two packages differ. Nothing in them is run."""

from __future__ import annotations

import json
from typing import Any

import click

from torchgraft.package.describe import describe, differences


@click.command()
@click.argument("old", type=click.Path())
@click.argument("new", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diff(old: str, new: str, as_json: bool) -> None:
    """Show how the package NEW differs from OLD. Exits with 1 where it does."""
    found = differences(describe(old), describe(new))
    click.echo(json.dumps(found, indent=2) if as_json else _text(found))
    if found:
        raise SystemExit(1)


def _text(found: dict[str, Any]) -> str:
    if not found:
        return "no difference"
    lines = []
    for part, what in found.items():
        lines.append(f"{part}:")
        if isinstance(what, list):
            lines += [f"  {line}" for line in what]
        elif set(what) == {"old", "new"}:
            lines += [f"  - {_plain(what['old'])}", f"  + {_plain(what['new'])}"]
        else:
            lines += [f"  {word}: {', '.join(names)}" for word, names in what.items() if names]
    return "\n".join(lines)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
