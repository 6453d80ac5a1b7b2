"""Every block of the documents is run somewhere.

Python runs in test_readme.py. Here: commands, in a folder with a small model in it; what runs on
the simulated device; that C++ and CMake are taken from examples/cpp, which test_cpp.py builds and
runs; that a JSON sample has the fields of a real one.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import sys
import zipfile

import numpy
import process
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import torchgraft as graft
from torchgraft.cli import main

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
DEVICE = 'python title="on an npu"'


def blocks(page: pathlib.Path, kind: str) -> list[str]:
    found = re.findall(r"^```(.+)\n((?:.*\n)*?)```$", page.read_text(), re.MULTILINE)
    return [text for name, text in found if name == kind]


def test_every_block_is_of_a_kind_that_is_looked_at() -> None:
    """`text` is what a program prints, a drawing or a grammar: nothing that can be run."""
    kinds = {"python", "sh", "cpp", "cmake", "json", "text", DEVICE}
    for page in PAGES:
        fences = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)
        assert set(fences[0::2]) <= kinds, page
        assert set(fences[1::2]) <= {""}, page


# --- Commands ---

HERE = ("compile", "run-model", "bench", "explain", "report", "inspect", "doctor")
ELSEWHERE = {
    "torchgraft run ": ("tests/compat/test_run.py", '"run"'),
    "PYTHONPATH=$(torchgraft compat-path) pytest": ("tests/compat/test_run.py", '"compat-path"'),
    "torchgraft native": ("tests/surfaces/test_cpp.py", "native"),
    "torchgraft codegen ": ("tests/unit/test_cli.py", '"codegen"'),
    "torchgraft op-plugin ": ("tests/unit/test_plugin.py", '"op-plugin"'),
    "torchgraft new ": ("tests/surfaces/test_scaffold.py", '"new"'),
    "cd my_ops": ("tests/surfaces/test_scaffold.py", '"new"'),
    "pip install --no-build-isolation -e '.[test]' && pytest": (
        "tests/surfaces/test_scaffold.py",
        "--no-build-isolation",
    ),
    "pip wheel ": ("tests/surfaces/test_scaffold.py", "wheel"),
    "pip install .": ("Makefile", "pip install"),
    "make demo": ("tests/surfaces/test_demo.py", "demo.py"),
    "make test": (".ci/run", "make test"),
    "eval ": ("tests/cli/test_completion.py", "bash_source"),
    "_TORCHGRAFT_COMPLETE=fish_source": ("tests/cli/test_completion.py", "fish"),
}
"""Where the commands are run that are not run here, and a word of that."""


def commands() -> list[str]:
    return [line for page in PAGES for text in blocks(page, "sh") for line in text.splitlines()]


def here(line: str) -> bool:
    return line.startswith(tuple(f"torchgraft {name}" for name in HERE))


def test_every_other_command_is_run_elsewhere() -> None:
    for line in filter(lambda line: not here(line), commands()):
        [(path, word)] = [at for start, at in ELSEWHERE.items() if line.startswith(start)]
        assert word in (ROOT / path).read_text(), line


class Net(nn.Module):
    """Takes any floating type, as the commands of the documents give it several."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 8, stride=32)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.float()).relu()


@pytest.mark.slow
def test_the_commands_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, x = Net().eval(), torch.randn(1, 3, 224, 224)
    torch.jit.script(model).save("model.pt")
    torch.export.save(torch.export.export(model, (x,)), "model.pt2")
    numpy.save("x.npy", x.numpy())
    lines = list(dict.fromkeys(filter(here, commands())))
    assert len(lines) >= 7
    for line in lines:
        _, *args = shlex.split(line, comments=True)
        done = CliRunner().invoke(main, args, prog_name="torchgraft")
        assert done.exit_code == 0, f"{line}\n{done.output}"
    made = {path.name for path in tmp_path.iterdir()}
    assert {"model.graft", "out.html", "trace.json"} <= made


# --- Other languages ---


@pytest.mark.slow
def test_the_samples_of_the_simulated_device_run(tmp_path: pathlib.Path) -> None:
    samples = [text for page in PAGES for text in blocks(page, DEVICE)]
    assert samples
    (tmp_path / "script.py").write_text("\n".join(samples))
    command = [sys.executable, "-m", "torchgraft", "run", "--device", "npu", "script.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = process.run(command, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-2000:]


def code(text: str) -> list[str]:
    """The lines of C++ or CMake without comments and spaces."""
    plain = (re.sub(r"\s|(//|#(?!include)).*", "", line) for line in text.splitlines())
    return [line for line in plain if line]


def is_taken_from(sample: list[str], source: list[str]) -> bool:
    """Whether the lines of the sample are lines of the source, in that order."""
    rest = iter(source)
    return all(line in rest for line in sample)


def test_cpp_and_cmake_are_taken_from_the_examples() -> None:
    samples = [text for page in PAGES for kind in ("cpp", "cmake") for text in blocks(page, kind)]
    assert len(samples) == 5
    sources = [code(path.read_text()) for path in (ROOT / "examples" / "cpp").iterdir()]
    for sample in samples:
        assert any(is_taken_from(code(sample), source) for source in sources), sample


def test_the_manifest_has_these_fields(tmp_path: pathlib.Path) -> None:
    [sample] = [json.loads(text) for page in PAGES for text in blocks(page, "json")]
    compiled = graft.compile(nn.ReLU(), (torch.ones(2),), mode="eager")
    compiled.save(tmp_path / "relu.graft")
    with zipfile.ZipFile(tmp_path / "relu.graft") as package:
        real = json.loads(package.read("manifest.json"))
    assert sample.keys() == real.keys()
    assert sample["requires"].keys() == real["requires"].keys()
    assert sample["members"]["program.json"].keys() == real["members"]["program.json"].keys()
