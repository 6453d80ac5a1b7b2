"""`torchgraft native`: the C++ part, built; prints where it is."""

from __future__ import annotations

import click

from torchgraft.cli.choice import Choice
from torchgraft.native import build
from torchgraft.native.driver import targets


@click.command()
@click.argument("target", type=Choice(targets()), default="runtime")
def native(target: str) -> None:
    """Build the C++ runtime (or find it built), and print its root.

    The root holds include/, lib/ and share/cmake/torchgraft/, for
    `cmake -Dtorchgraft_DIR="$(torchgraft native)/share/cmake/torchgraft"`. `torchgraft native npu`
    builds the simulated device, which is otherwise built when it is first used.
    """
    click.echo(build(target))
