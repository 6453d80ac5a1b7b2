"""Shell completion: what a shell is told to do, and what it is answered."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys

import process
import pytest
from click.shell_completion import BashComplete, get_completion_class

from torchgraft.cli import main

VARIABLE = "_TORCHGRAFT_COMPLETE"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(shell: str, tmp_path: pathlib.Path) -> None:
    kind = get_completion_class(shell)
    assert kind is not None
    told = kind.source_template % kind(main, {}, "torchgraft", VARIABLE).source_vars()
    assert f"{VARIABLE}={shell}_complete" in told
    if (program := shutil.which(shell)) is not None:
        (tmp_path / "complete").write_text(told)
        process.output([program, "-n", tmp_path / "complete"])


def answers(*words: str) -> set[str]:
    found = BashComplete(main, {}, "torchgraft", VARIABLE)
    return {item.value for item in found.get_completions(list(words[:-1]), words[-1])}


def test_commands_options_and_choices() -> None:
    assert answers("comp") == {"compile", "compat-path"}
    assert {"--input", "--mode", "--report", "--json"} <= answers("compile", "model.pt", "--")
    assert answers("bench", "model.pt", "--against", "t") == {"torch.compile"}
    assert "reduce-overhead" in answers("compile", "model.pt", "--mode", "")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_completes_a_command(tmp_path: pathlib.Path) -> None:
    command = tmp_path / "torchgraft"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m torchgraft "$@"\n')
    command.chmod(0o755)
    script = (
        'eval "$(_TORCHGRAFT_COMPLETE=bash_source torchgraft)"\n'  # as docs/cli.md has it
        "COMP_WORDS=(torchgraft run-m) COMP_CWORD=1\n"
        '_torchgraft_completion torchgraft; echo "${COMPREPLY[@]}"\n'
    )
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = process.run(["bash", "-c", script], env=env)
    assert done.stdout == "run-model\n", done.stderr
