"""The `torchgraft` command. This file is the group; a command has a file of its own."""

from __future__ import annotations

import difflib

import click
import torch

import torchgraft
from torchgraft.cli.codegen import codegen
from torchgraft.cli.diff import diff
from torchgraft.cli.doctor import doctor
from torchgraft.cli.inspect import inspect
from torchgraft.cli.native import native
from torchgraft.cli.new import new
from torchgraft.cli.plugin import op_plugin
from torchgraft.errors import GraftError


class Suggesting(click.Group):
    """A group that answers a mistyped command with the nearest one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            known = self.list_commands(ctx)
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"unknown command {name!r}.{hint} Known: {', '.join(known)}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; a mistake that torchgraft knows is a message and exit code 1."""
        try:
            return super().invoke(ctx)
        except GraftError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Suggesting, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    torchgraft.__version__, message=f"torchgraft %(version)s (torch {torch.__version__})"
)
def main() -> None:
    """Graft your own operators, converters, graph rewrites and streams onto PyTorch."""


for command in (codegen, diff, doctor, inspect, native, new, op_plugin):
    main.add_command(command)
