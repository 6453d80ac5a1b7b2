"""`torchgraft run`: an Ascend script as it is, on another device. `torchgraft compat-path`."""

from __future__ import annotations

import os
import re
import runpy
import sys
import traceback
from pathlib import Path

import click

from torchgraft import compat
from torchgraft.cli.choice import Choice
from torchgraft.compat import check as checks
from torchgraft.compat import device as devices
from torchgraft.compat import settings
from torchgraft.config import MODES
from torchgraft.op import plugin

_force = click.option("--force", is_flag=True, help="Hide Ascend packages that are installed.")


@click.command(
    "run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option(
    "--device",
    type=Choice(devices.CHOICES),
    default="auto",
    show_default=True,
    help="What stands for the NPU; npu: the simulated one.",
)
@click.option("--mode", type=Choice(MODES), help="Compile everything in this mode.")
@click.option("--ops", type=click.Path(file_okay=False), help="The folder of op-plugin operators.")
@click.option("--check", is_flag=True, help="List what will not work, and run nothing.")
@_force
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    device: str,
    mode: str | None,
    ops: str | None,
    check: bool,
    force: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT, written for an Ascend NPU, with none.

    torchair, npugraph_ex, torch_aie, mindietorch and torch_npu are importable; "npu" means the
    device chosen. Operators kept in .torchgraft (or --ops) are loaded first. With --check the exit
    code is 1 when something will not work.
    """
    if check:
        found = checks.check(Path(script))
        for problem in found:
            click.echo(str(problem))
        if any(problem.fatal for problem in found):
            raise SystemExit(1)
        return
    os.environ[devices.VARIABLE] = device
    if mode is not None:
        os.environ[settings.MODE] = mode
    compat.install(force=force)
    devices.activate()
    folder = ops or plugin.FOLDER
    if ops is not None or os.path.isdir(folder):
        plugin.load(folder)
    sys.argv = [script, *args]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    _for_children()
    try:
        made = runpy.run_path(script, run_name="__main__")
    except Exception as error:
        _show(error, script)
        sys.last_value = error
        raise SystemExit(1) from None
    # As under Python itself, what the script made lives until the interpreter ends. DDP that goes
    # right behind its last collective waits for a thread of gloo, which waits for Python's lock.
    vars(sys.modules["__main__"]).update(made)


def _for_children() -> None:
    """Let processes that the script starts find the packages: `torch.multiprocessing.spawn` hands
    on `sys.path`, and `torchrun` the environment."""
    ours = compat.python_path(force=True).split(os.pathsep)
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*ours, *filter(None, known)])
    sys.path[1:1] = ours


def _show(error: Exception, script: str) -> None:
    """Print an exception as Python does, from the script's own first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)
    if devices.is_mapped() and re.search(r"^PrivateUse1: registered .*kernel\]", str(error), re.M):
        click.echo("Kernels for PrivateUse1 run on the simulated device: --device npu", err=True)


@click.command("compat-path")
@_force
def compat_path(force: bool) -> None:
    """Print what PYTHONPATH needs for a process to find the Ascend packages.

    PYTHONPATH=$(torchgraft compat-path) pytest runs a test suite with them.
    """
    click.echo(compat.python_path(force=force))
