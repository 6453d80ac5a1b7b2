"""`torchgraft inspect` and `torchgraft diff`: what they show, and that they run nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import torchgraft as graft
from torchgraft.cli import main
from torchgraft.package import archive


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="torchgraft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("packages")
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    spec = graft.Input(min_shape=(2, 4), max_shape=(9, 4))
    graft.compile(model, (spec,), mode="eager").save(made / "one.graft")
    with torch.no_grad():
        model[0].bias.add_(1)
    model[1] = nn.Sigmoid()
    graft.compile(model, (spec,), mode="eager").save(made / "two.graft")
    return made


def test_inspect_shows_everything(folder: Path) -> None:
    result = run("inspect", folder / "one.graft", "--weights")
    assert result.exit_code == 0
    for part in (
        f"made by: torchgraft {graft.__version__}, torch 2.",
        "  input: float32[",
        " from 2 to 9",
        "  0.weight: float32[2, 4] (weight)",
        "relu: f32[",
        "launch('main', 'aten.relu.default'",
    ):
        assert part in result.output


def test_inspect_as_json(folder: Path) -> None:
    found = json.loads(run("inspect", "--json", folder / "one.graft").output)
    assert found["name"] == "Sequential"
    assert found["requires"]["device"] == "cpu"
    assert set(found["weights"]) == {"0.weight", "0.bias"}
    assert found["plans"][0] == str(graft.load(folder / "one.graft").plan)


def test_inspect_takes_a_package_for_another_machine(folder: Path, tmp_path: Path) -> None:
    with_head = archive.Archive(folder / "one.graft")
    head = {**with_head.manifest, "torch": "9.9.9"}
    members = {n: bytes(d) for n, d in with_head.members.items() if n != archive.MANIFEST}
    archive.write(tmp_path / "m.graft", head, members)
    result = run("inspect", tmp_path / "m.graft")
    assert result.exit_code == 0
    assert "torch 9.9.9" in result.output


def test_inspect_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    result = run("inspect", tmp_path / "x")
    assert result.exit_code == 1
    assert "not a zip archive" in result.output


def test_diff(folder: Path) -> None:
    result = run("diff", folder / "one.graft", folder / "two.graft")
    assert result.exit_code == 1
    assert "changed: 0.bias" in result.output
    assert "-relu: f32[" in result.output
    assert "+sigmoid: f32[" in result.output
    found = json.loads(run("diff", "--json", folder / "one.graft", folder / "two.graft").output)
    assert found["weights"]["changed"] == ["0.bias"]
    same = run("diff", folder / "one.graft", folder / "one.graft")
    assert (same.exit_code, same.output) == (0, "no difference\n")
