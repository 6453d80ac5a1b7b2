"""`torchgraft new`: what it writes is tidy, builds into a wheel, and passes its tests elsewhere."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import sysconfig
import venv
import zipfile

import process
import pytest
from click.testing import CliRunner, Result

from torchgraft.cli import main

ROOT = pathlib.Path(__file__).parents[2]


def new(folder: pathlib.Path, *args: str) -> Result:
    return CliRunner().invoke(main, ["new", "--in", str(folder), *args], prog_name="torchgraft")


def names(folder: pathlib.Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


COMMON = {
    ".gitignore", ".github/workflows/ci.yml", "README.md", "pyproject.toml", "my_ops/__init__.py",
    "tests/test_softclip.py",
}  # fmt: skip
CPP = COMMON | {"MANIFEST.in", "setup.py", "csrc/softclip.cpp"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], COMMON), (["--cpp"], CPP), (["--cuda"], CPP | {"csrc/softclip_cuda.cu"})],
)
def test_what_is_written(tmp_path: pathlib.Path, flags: list[str], expected: set[str]) -> None:
    result = new(tmp_path, "my_ops", *flags)
    assert result.exit_code == 0, result.output
    project = tmp_path / "my_ops"
    assert names(project) == expected
    for path in project.rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert "@name@" not in text
            assert max(map(len, text.splitlines())) <= 110
        if path.suffix == ".py":
            compile(text, path, "exec")
    ruff = shutil.which("ruff") or str(pathlib.Path(sys.executable).with_name("ruff"))
    checked = process.run([ruff, "check", project])
    assert checked.returncode == 0, checked.stdout


def test_a_project_is_never_written_over(tmp_path: pathlib.Path) -> None:
    assert new(tmp_path, "my_ops").exit_code == 0
    again = new(tmp_path, "my_ops")
    assert again.exit_code == 1
    assert "is there already, and is not an empty folder" in again.stderr


@pytest.mark.parametrize("name", ["my-ops", "MyOps", "1ops", "class", "a.b", ""])
def test_a_name_that_cannot_be_a_package(tmp_path: pathlib.Path, name: str) -> None:
    result = new(tmp_path, name)
    assert result.exit_code == 2
    assert "cannot be a package" in result.stderr
    assert not list(tmp_path.iterdir())


# --- Built and installed ---


def pip(*args: str | pathlib.Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, args)]
    done = process.run(command)
    assert done.returncode == 0, done.stdout + done.stderr


def wheel(project: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    pip("wheel", "-q", "--no-build-isolation", "--no-deps", "-w", folder, project)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def torchgraft_wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    copy = tmp_path_factory.mktemp("torchgraft")
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "torchgraft", copy / "torchgraft", ignore=unwanted)
    return wheel(copy, copy / "wheels")


@pytest.mark.slow
def test_torchgraft_is_a_pure_wheel_with_its_templates(torchgraft_wheel: pathlib.Path) -> None:
    assert torchgraft_wheel.name.endswith("-py3-none-any.whl")
    inside = zipfile.ZipFile(torchgraft_wheel).namelist()
    assert "torchgraft/templates/new/cpp/csrc/softclip.cpp.tmpl" in inside
    assert "torchgraft/op/plugin/include/op_plugin/OpApiInterface.h" in inside


def environment(folder: pathlib.Path, *wheels: pathlib.Path) -> pathlib.Path:
    """A clean environment with these wheels, and torch from this one (to download nothing)."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip("--python", python, "install", "-q", "--no-deps", "--no-index", *wheels)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A plain path: what else is installed there in editable form is not seen.
    (packages / "torch_is_there.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def assert_stable(made: pathlib.Path, folder: pathlib.Path) -> None:
    """The library asks torch for C functions only: C++ names change with its versions."""
    (library,) = (name for name in zipfile.ZipFile(made).namelist() if name.endswith(".so"))
    path = zipfile.ZipFile(made).extract(library, folder / "inside")
    nm = process.run(["nm", "-DC", "--undefined-only", path])
    asked = [line.split(maxsplit=1)[1] for line in nm.stdout.splitlines()]
    assert "torch_call_dispatcher" in asked
    assert not [name for name in asked if name.startswith(("c10::", "at::", "torch::", "Py"))]


SAY = """\
import my_ops, torch, torchgraft
op = torch.ops.my_ops.softclip.default
print(my_ops.__file__, torchgraft.__file__, op.has_kernel_for_dispatch_key("CPU"))
"""


@pytest.mark.slow
def test_a_wheel_passes_with_another_torch(tmp_path: pathlib.Path) -> None:
    """One wheel for several versions: `TORCHGRAFT_OTHER_PYTHON` names a Python with another torch,
    pytest, and what torchgraft needs."""
    other = os.environ.get("TORCHGRAFT_OTHER_PYTHON")
    if other is None:
        pytest.skip("TORCHGRAFT_OTHER_PYTHON names no Python with another torch")
    assert new(tmp_path, "my_ops", "--cpp").exit_code == 0
    made = wheel(tmp_path / "my_ops", tmp_path / "wheels")
    zipfile.ZipFile(made).extractall(tmp_path / "installed")
    away = tmp_path / "away"
    shutil.copytree(tmp_path / "my_ops" / "tests", away)
    paths = os.pathsep.join([str(tmp_path / "installed"), str(ROOT)])
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": paths}
    done = process.run([other, "-m", "pytest", "-q", "."], cwd=away, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    said = process.run([other, "-c", SAY], cwd=away, env=env)
    mine, _, compiled = said.stdout.split()
    assert (str(tmp_path) in mine, compiled) == (True, "True"), said.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["python", "cpp"])
def test_a_project_builds_installs_and_passes(
    tmp_path: pathlib.Path, torchgraft_wheel: pathlib.Path, kind: str
) -> None:
    assert new(tmp_path, "my_ops", *(["--cpp"] if kind == "cpp" else [])).exit_code == 0
    made = wheel(tmp_path / "my_ops", tmp_path / "wheels")
    assert made.name.startswith("my_ops-0.1.0-cp310-abi3-" if kind == "cpp" else "my_ops-0.1.0-py3")
    if kind == "cpp":
        assert_stable(made, tmp_path)
    python = environment(tmp_path / "env", made, torchgraft_wheel)
    away = tmp_path / "away"  # where the source is not importable
    shutil.copytree(tmp_path / "my_ops" / "tests", away)
    env = {"PATH": "/usr/bin:/bin"}
    said = process.run([python, "-c", SAY], cwd=away, env=env)
    assert said.returncode == 0, said.stderr
    mine, theirs, compiled = said.stdout.split()
    assert str(tmp_path / "env") in mine
    assert str(tmp_path / "env") in theirs
    assert compiled == str(kind == "cpp")
    done = process.run([python, "-m", "pytest", "-q", "."], cwd=away, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
