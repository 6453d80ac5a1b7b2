"""The driver of the C++ part: what needs no compiler to test."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import process
import pytest
import torch
from click.testing import CliRunner

import torchgraft as graft
from torchgraft import native
from torchgraft.cli import main
from torchgraft.errors import BadValue, NativeBuild, UnknownName
from torchgraft.native import driver, executor, frontend


def test_an_unknown_target_names_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="runtime"):
        native.build("runtim")


def test_missing_tools_are_named_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHGRAFT_NATIVE", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(driver.sysconfig, "get_path", lambda _: "")
    with pytest.raises(NativeBuild) as caught:
        native.build("runtime")
    assert "no cmake (pip install cmake" in caught.value.said
    assert "no ninja (pip install ninja) or make" in caught.value.said
    assert "no C++ compiler (g++, or what CXX names)" in caught.value.said


def test_what_a_failed_build_said_is_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('a.cpp:3:1: error: no')"]
    with pytest.raises(NativeBuild, match=r"a\.cpp:3: no") as caught:
        driver._run("runtime", command, tmp_path / "root")
    assert "a.cpp:3:1: error: no" in Path(caught.value.log).read_text()


def test_the_name_of_a_root_hangs_on_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = driver._Tools("cmake", "Ninja", sys.executable)
    (tmp_path / "runtime").mkdir()
    (tmp_path / "CMakeLists.txt").write_text("one")
    source = tmp_path / "runtime" / "a.cpp"
    source.write_text("int a;")
    monkeypatch.setattr(driver, "SOURCE", tmp_path)
    first = driver._digest("runtime", tools)
    assert driver._digest("runtime", tools) == first
    source.write_text("int b;")
    assert driver._digest("runtime", tools) != first
    source.write_text("int a;")
    monkeypatch.setattr(driver.torch, "__version__", "9.9")
    assert driver._digest("runtime", tools) != first


def test_a_root_from_elsewhere_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHGRAFT_NATIVE", str(tmp_path))
    assert CliRunner().invoke(main, ["native"]).output.strip() == str(tmp_path)
    root = native.build("runtime")
    assert root.include == tmp_path / "include"
    assert root.lib == tmp_path / "lib"
    assert root.cmake == tmp_path / "share/cmake/torchgraft"


def test_without_the_library_nothing_is_registered() -> None:
    code = "from torchgraft.native import bridge; print(bridge.converters(), bridge.patterns())"
    environment = os.environ | {"PYTHONPATH": str(Path(native.__file__).parents[2])}
    done = process.run([sys.executable, "-c", code], env=environment)
    assert done.stdout.strip() == "[] []", done.stderr


def test_every_source_is_in_the_wheel() -> None:
    """What the driver builds from is package data; a pure-Python wheel holds it."""
    root = Path(native.__file__).parents[2]
    text = (root / "pyproject.toml").read_text()
    [listed] = re.findall(r"^torchgraft = (\[.*?\])$", text, re.MULTILINE | re.DOTALL)
    patterns = re.findall(r'"(.+?)"', listed)
    found = {path for pattern in patterns for path in (root / "torchgraft").glob(pattern)}
    sources = {path for target in driver.targets() for path in driver._sources(target)}
    assert sources - found == set()


def test_which_executor_is_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHGRAFT_NATIVE", str(tmp_path))  # a root with nothing for Python
    for choice in ("auto", "python"):
        monkeypatch.setenv("TORCHGRAFT_EXECUTOR", choice)
        assert executor.module() is None
    monkeypatch.setenv("TORCHGRAFT_EXECUTOR", "native")
    with pytest.raises(NativeBuild, match="install Python's headers"):
        executor.module()
    monkeypatch.setenv("TORCHGRAFT_EXECUTOR", "c++")
    with pytest.raises(BadValue, match="one of auto, python, native"):
        executor.module()


@pytest.mark.parametrize("precision", [None, "float16"])
def test_a_module_for_cpp_computes_in_the_precision_asked_for(
    tmp_path: Path, precision: str | None
) -> None:
    class Round(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 2048.0) - 2048.0

    x = torch.full((4,), 1 / 3)
    torch.jit.trace(Round(), x).save(str(tmp_path / "given.pt"))
    request = {
        "inputs": [[{"dtype": 6, "shape": [4]}]],
        "precision": precision,
        "min_block_size": 1,
        "require_full_compilation": False,
        "torch_executed_ops": ["aten::add", "aten::sub", "aten::_to_copy"],  # no code is made
        "torch_executed_modules": [],
    }
    (tmp_path / "request.json").write_text(json.dumps(request), encoding="utf-8")
    frontend.serve(str(tmp_path))
    assert json.loads((tmp_path / "answer.json").read_text(encoding="utf-8")) == {}
    made = torch.jit.load(str(tmp_path / "module.pt"))(x)
    assert made.dtype == torch.float32
    expected = Round()(x.half()).float() if precision else Round()(x)
    assert torch.equal(made, expected)
    torch.testing.assert_close(graft.load(tmp_path / "program.graft")(x), expected)
