"""`torchgraft native`: the C++ part, built; prints where it is."""

from __future__ import annotations

import click

from torchgraft.native import build


@click.command()
def native() -> None:
    """Build the C++ runtime (or find it built), and print its root.

    The root holds include/, lib/ and share/cmake/torchgraft/, for
    `cmake -Dtorchgraft_DIR="$(torchgraft native)/share/cmake/torchgraft"`.
    """
    click.echo(build("runtime"))
