"""The `torchgraft` command. This file is the group; a command has a file of its own."""

from __future__ import annotations

import difflib
import errno
import importlib

import click
import torch

import torchgraft
from torchgraft.errors import GraftError

COMMANDS = {
    "bench": "torchgraft.cli.bench:bench",
    "codegen": "torchgraft.cli.codegen:codegen",
    "compile": "torchgraft.cli.compile:compile",
    "diff": "torchgraft.cli.diff:diff",
    "doctor": "torchgraft.cli.doctor:doctor",
    "inspect": "torchgraft.cli.inspect:inspect",
    "native": "torchgraft.cli.native:native",
    "explain": "torchgraft.cli.explain:explain",
    "new": "torchgraft.cli.new:new",
    "compat-path": "torchgraft.cli.run:compat_path",
    "op-plugin": "torchgraft.cli.plugin:op_plugin",
    "run": "torchgraft.cli.run:run",
    "report": "torchgraft.cli.report:report",
    "run-model": "torchgraft.cli.run_model:run_model",
}
"""Where each command is; its module is imported when the command is used."""


class Lazy(click.Group):
    """The commands of a table. A mistyped one is answered with the nearest."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            known = self.list_commands(ctx)
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"unknown command {name!r}.{hint} Known: {', '.join(known)}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; a mistake that torchgraft knows is a message and exit code 1, and so is
        a file that cannot be read or written, unless a user's own script asked for it."""
        try:
            return super().invoke(ctx)
        except GraftError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if ctx.invoked_subcommand == "run" or error.errno == errno.EPIPE:
                raise
            raise click.ClickException(str(error)) from error


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    torchgraft.__version__, message=f"torchgraft %(version)s (torch {torch.__version__})"
)
def main() -> None:
    """Graft your own operators, converters, graph rewrites and streams onto PyTorch."""
