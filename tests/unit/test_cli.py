"""The `torchgraft` command: help, version, doctor, and what it says to a typo."""

from __future__ import annotations

import json
import pathlib
import sys

import process
import pytest
import torch
from click.testing import CliRunner, Result

import torchgraft as graft
from torchgraft.cli import main
from torchgraft.cli.doctor import BROKEN, MISSING, OK, Check, check_torch

doctor = sys.modules["torchgraft.cli.doctor"]


def run(*args: str) -> Result:
    return CliRunner().invoke(main, args, prog_name="torchgraft")


def test_help_lists_the_commands() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert result.output.startswith("Usage: torchgraft ")
    assert "doctor" in result.output


def test_version_names_torch_too() -> None:
    assert run("--version").output == (
        f"torchgraft {graft.__version__} (torch {torch.__version__})\n"
    )


def test_python_m_torchgraft_is_the_command() -> None:
    done = process.run([sys.executable, "-m", "torchgraft", "--version"])
    assert (done.returncode, done.stdout) == (0, run("--version").output)


def test_a_mistyped_command_suggests_the_nearest() -> None:
    result = run("docter")
    assert result.exit_code == 2
    assert "unknown command 'docter'. Did you mean 'doctor'?" in result.output
    assert "Did you mean" not in run("zzz").output


# --- doctor ---


@pytest.mark.slow
def test_doctor_gives_json() -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["ok"] is True
    checks = found["checks"]
    assert {
        "python", "torchgraft", "torch", "cpu", "cuda", "triton", "c++ compiler", "cmake", "ninja",
        "torch.compile", "eager on cpu", "default on cpu",
    } <= checks.keys()  # fmt: skip
    assert all(set(check) == {"state", "found", "advice"} for check in checks.values())
    assert checks["eager on cpu"]["found"].startswith("right, by ATen, node by node")
    assert checks["torch.compile"]["state"] == OK


def test_doctor_fails_only_for_what_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check("one", OK, "1.0"), Check("two", MISSING, "not [found]", "Install it.")]
    monkeypatch.setattr(doctor, "examine", lambda: iter(checks))
    result = run("doctor")
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines()]
    assert rows == [["✓", "one", "1.0"], ["–", "two", "not", "[found]"], ["Install", "it."]]
    checks.append(Check("three", BROKEN, "wrong"))
    result = run("doctor")
    assert result.exit_code == 1
    assert "✗  three  wrong" in result.output


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("2.10.1", BROKEN),
        ("2.11.0", OK),
        ("2.13.0+cpu", OK),
        ("2.14.0a0+git1234", MISSING),
        ("3.0", MISSING),
    ],
)
def test_the_tested_range_of_torch(version: str, state: str) -> None:
    assert check_torch(version).state == state


def test_a_compiler_that_fails_is_broken_and_none_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("g++ said no")

    monkeypatch.setattr("torchgraft.codegen.inductor.generate", fail)
    check = doctor._program("default", "cpu")
    assert check.state == BROKEN
    assert "g++ said no" in check.advice
    monkeypatch.setattr("torchgraft.codegen.inductor._compiler", lambda: None)
    check = doctor._program("default", "cpu")
    assert (check.state, check.advice) == (MISSING, "no C++ compiler on this machine")


# --- codegen ---

ENTRY = "REG_OP(CliAdd).INPUT(x, DT_INT8).OUTPUT(y, DT_INT8).OP_END_FACTORY_REG(CliAdd)\n"
GRAPH = "REG_OP(CliIf).GRAPH(body).OP_END_FACTORY_REG(CliIf)\n"
BROKEN_ENTRY = "REG_OP(CliBad).INPUTT(x).OP_END_FACTORY_REG(CliBad)\n"


def test_codegen_writes_a_module_and_says_what_it_skipped(tmp_path: pathlib.Path) -> None:
    header, module = tmp_path / "ops.h", tmp_path / "generated.py"
    header.write_text(ENTRY + GRAPH)
    result = run("codegen", str(header), "-o", str(module))
    assert result.exit_code == 0
    assert f"skipped {header}:2: CliIf: found .GRAPH(body)" in result.stderr
    assert result.stderr.endswith(f"{module}: 1 builders, 1 entries skipped\n")
    first = module.read_bytes()
    assert b"def CliAdd(" in first
    run("codegen", str(header), "-o", str(module))
    assert module.read_bytes() == first == run("codegen", str(header)).stdout.encode()


def test_codegen_writes_nothing_for_a_malformed_header(tmp_path: pathlib.Path) -> None:
    header, module = tmp_path / "ops.h", tmp_path / "generated.py"
    header.write_text(ENTRY + BROKEN_ENTRY)
    result = run("codegen", str(header), "-o", str(module))
    assert result.exit_code == 1
    assert f"{header}:2: CliBad: found .INPUTT" in result.stderr
    assert "--keep-going" in result.stderr
    assert not module.exists()
    result = run("codegen", str(header), "-o", str(module), "--keep-going")
    assert result.exit_code == 0
    assert b"CliAdd" in module.read_bytes()
    assert run("codegen", str(tmp_path / "none.h")).exit_code == 2
