"""The commands on models: compile, run-model, bench, explain, report."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import sys

import click
import numpy
import process
import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn

import torchgraft as graft
from torchgraft.cli import COMMANDS, main
from torchgraft.cli.model import Given, InputType, job
from torchgraft.errors import UnknownName
from torchgraft.inspect import logs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [*map(str, args)], prog_name="torchgraft")


@pytest.fixture
def script(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "net.pt"
    torch.jit.script(Net()).save(path)
    return path


@pytest.fixture
def exported(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(Net(), (torch.ones(2, 4),)), path)
    return path


def test_every_command_is_there_and_has_help() -> None:
    context = click.Context(main)
    assert main.list_commands(context) == sorted(COMMANDS)
    for name in COMMANDS:
        result = run(name, "--help")
        assert result.exit_code == 0
        assert result.output.startswith(f"Usage: torchgraft {name} ")
        command = main.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert command.help


def test_a_command_is_imported_when_it_is_used() -> None:
    code = (
        "import sys, torchgraft.cli as cli; cli.main(['doctor', '--help'], standalone_mode=False);"
        "assert 'torchgraft.cli.doctor' in sys.modules;"
        "assert 'torchgraft.cli.bench' not in sys.modules"
    )
    process.output([sys.executable, "-c", code])


@pytest.mark.parametrize(
    ("typed", "meant"), [("complie", "compile"), ("reprot", "report"), ("run-modle", "run-model")]
)
def test_a_typo_suggests(typed: str, meant: str) -> None:
    result = run(typed)
    assert result.exit_code == 2
    assert f"Did you mean {meant!r}?" in result.output


def test_an_option_with_a_typo_suggests(script: pathlib.Path) -> None:
    result = run("compile", script, "--inptu", "2x4")
    assert result.exit_code == 2
    assert "--input" in result.output


@pytest.mark.parametrize(
    ("option", "typed", "meant"), [("--mode", "eagre", "eager"), ("--dump-format", "pbtx", "pbtxt")]
)
def test_a_value_with_a_typo_suggests(
    script: pathlib.Path, option: str, typed: str, meant: str
) -> None:
    result = run("compile", script, "--input", "2x4", option, typed)
    assert result.exit_code == 2
    assert f"there is no {typed!r}. Did you mean {meant!r}? Known: " in result.output
    assert "Did you mean" not in run("compile", script, option, "zzz").output


# --- Inputs as text ---


def parsed(text: str) -> Given:
    return InputType().convert(text, None, None)


def test_inputs_as_text() -> None:
    assert repr(parsed("1x3x8:f16").spec) == "Input((1, 3, 8), dtype=torch.float16)"
    assert repr(parsed("8").spec) == "Input((8,), dtype=torch.float32)"
    assert repr(parsed("1..32x64:bf16").spec) == (
        "Input(min_shape=(1, 64), max_shape=(32, 64), dtype=torch.bfloat16)"
    )
    spec = parsed("2..x4").spec
    assert spec is not None
    assert spec.ranges == ((2, None), (4, 4))
    assert parsed("mask=8:bool").name == "mask"
    assert parsed(":i64").example(torch.device("cpu")).shape == ()
    assert parsed("5:i64").example(torch.device("cpu")).dtype == torch.int64


@pytest.mark.parametrize("text", ["1x3y", "3x..", "axb", "1x-2", "x.npz", "1.5x2"])
def test_what_is_no_input(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is no (input|size)"):
        parsed(text)


def test_an_unknown_dtype_suggests() -> None:
    with pytest.raises(click.BadParameter, match="Did you mean 'f32'"):
        parsed("2:f23")
    result = run("explain", "some.pt", "--input", "2:f23")
    assert result.exit_code == 2
    assert "Did you mean 'f32'" in result.output
    assert "Traceback" not in result.output


# --- The commands ---


def test_compile_writes_what_it_is_asked_for(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    page, dump = tmp_path / "out.html", tmp_path / "dump"
    result = run(
        "compile", script, "--input", "2x4", "--mode", "eager", "--report", page,
        "--dump", dump, "--dump-format", "json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Net (script, mode eager, cpu): ")
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert list(dump.glob("000_Net/000_captured.json"))


def test_a_model_goes_through_the_commands(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    saved, page = tmp_path / "net.graft", tmp_path / "out.html"
    result = run(
        "compile", script, "--input", "2x4:f32", "--mode", "eager", "-o", saved, "--report", page
    )
    assert result.exit_code == 0, result.output
    assert page.stat().st_size > 1000
    result = run("run-model", script, "--input", "2x4", "--program", saved)
    assert result.exit_code == 0, result.output
    assert "same" in result.output
    about = json.loads(run("inspect", saved, "--json").stdout)
    assert (about["mode"], len(about["weights"])) == ("eager", 2)
    assert run("diff", saved, saved).output == "no difference\n"
    other = tmp_path / "other.graft"
    assert run("compile", script, "--input", "3x4", "--mode", "eager", "-o", other).exit_code == 0
    result = run("diff", saved, other, "--json")
    assert result.exit_code == 1
    assert "gears" in json.loads(result.stdout)


def test_compile_gives_json_and_exit_codes(script: pathlib.Path) -> None:
    result = run("compile", script, "--input", "2x4", "--mode", "eager", "--json")
    data = json.loads(result.stdout)
    assert data["name"] == "Net"
    assert data["took"] > 0
    result = run("compile", script, "--input", "2x4", "--mode", "eager", "--full")
    assert result.exit_code == 1
    assert "aten.addmm.default" in result.output
    result = run("compile", script)
    assert result.exit_code == 2
    assert "--input" in result.output
    result = run("compile", "missing.pt", "--input", "2x4")
    assert result.exit_code == 1
    assert "there is no such file" in result.output
    assert run("compile", script, "--input", "2x4", "--mode", "fast").exit_code == 2


@pytest.mark.parametrize(
    ("code", "said", "args"),
    [
        (2, "Expected one of cpu", ["--device", "gpu"]),
        (2, "torchgraft doctor", ["--device", "cuda:99"]),
        (1, "net.pt", ["-o", "{script}/m.graft"]),
        (1, "net.pt", ["--report", "{script}/out.html"]),
        (1, "net.pt", ["--dump", "{script}/dump"]),
    ],
)
def test_what_cannot_be_done_is_a_message(
    code: int, said: str, args: list[str], script: pathlib.Path
) -> None:
    asked = [arg.format(script=script) for arg in args]
    result = run("compile", script, "--input", "2x4", "--mode", "eager", *asked)
    assert result.exit_code == code
    assert said in result.output
    assert isinstance(result.exception, SystemExit)  # no traceback


def test_a_package_is_no_model(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    package = tmp_path / "net.graft"
    assert run("compile", script, "--input", "2x4", "--mode", "eager", "-o", package).exit_code == 0
    result = run("explain", package)
    assert result.exit_code == 1
    assert "it is a compiled program already" in result.output


def test_explain(exported: pathlib.Path) -> None:
    result = run("explain", exported, "--mode", "eager")
    assert result.exit_code == 0, result.output
    assert all(part in result.output for part in ("inputs:", "graph:", "plan:", "aten.addmm"))
    data = json.loads(run("explain", exported, "--mode", "eager", "--json").stdout)
    assert data["plan"]["text"].startswith("def plan(")


def test_report_with_times_and_a_trace(exported: pathlib.Path, tmp_path: pathlib.Path) -> None:
    page, trace = tmp_path / "out.html", tmp_path / "trace.json"
    result = run("report", exported, "--mode", "eager", "-o", page, "--trace", trace)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [str(trace), str(page)]
    assert json.loads(trace.read_text())["traceEvents"]


def test_run_model_checks_against_eager(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    result = run("run-model", script, "--input", "2x4", "--mode", "eager")
    assert (result.exit_code, result.output) == (0, "output 0: torch.float32 (2, 3), same\n")
    x = tmp_path / "x.npy"
    numpy.save(x, numpy.full((2, 4), 2.0, dtype="float32"))
    out = tmp_path / "got"
    result = run("run-model", script, "--input", x, "--mode", "eager", "--json", "--save", out)
    assert json.loads(result.stdout)["ok"] is True
    want = torch.jit.load(script)(torch.full((2, 4), 2.0)).detach()
    torch.testing.assert_close(torch.from_numpy(numpy.load(f"{out}_0.npy")), want)


def test_run_model_fails_on_another_result(script: pathlib.Path) -> None:
    with graft.Registry():

        @graft.fx_pass
        def wrong(graph: graft.Graph) -> None:
            relu = graph.one(torch.ops.aten.relu.default)
            graph.replace(relu, graph.call(torch.ops.aten.neg.default, relu.args[0]))

        result = run("run-model", script, "--input", "2x4", "--mode", "eager")
        assert result.exit_code == 1
        assert "output 0: torch.float32 (2, 3), WRONG: " in result.output


def test_a_model_by_name(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_net_for_cli.py").write_text(
        "import torch\nclass Twice(torch.nn.Module):\n    def forward(self, x, *, y):\n"
        "        return x * 2 + y\n"
    )
    monkeypatch.chdir(tmp_path)
    args = ("--input", "3", "--input", "y=3", "--mode", "eager")
    result = run("run-model", "my_net_for_cli:Twice", *args)
    assert result.exit_code == 0, result.output
    assert "same" in result.output
    page = tmp_path / "out.html"
    result = run("report", "my_net_for_cli:Twice", *args, "--measure", "-o", page)
    assert result.exit_code == 0, result.output
    result = run("run-model", "my_net_for_cli:Thrice", *args)
    assert result.exit_code == 1
    assert "Thrice" in result.output


def test_bench_takes_turns(script: pathlib.Path) -> None:
    args = ("bench", script, "--input", "2x4", "--mode", "eager", "--rounds", "3")
    result = run(*args, "--against", "eager", "--json")
    assert result.exit_code == 0, result.output
    peers = json.loads(result.stdout)["peers"]
    assert list(peers) == ["eager", "torchgraft"]
    assert all(row["median_us"] >= row["p20_us"] > 0 for row in peers.values())
    assert peers["eager"]["compile_s"] is None
    table = run(*args, "--against", "eager").output.splitlines()
    assert table[0].split() == ["us", "p20", "us", "times", "eager", "compile", "s"]
    assert [line.split()[0] for line in table[1:]] == ["eager", "torchgraft"]
    assert "█" in table[1]


def test_torch_compile_gets_what_it_can_take(script: pathlib.Path) -> None:
    work = job(str(script), [parsed("2x4")], None)
    theirs = torch.compile(work.source, backend="eager")
    torch.testing.assert_close(theirs(*(x := work.args)), work.eager(*x))


# --- Logs ---


CODE = """
import torch, torchgraft as graft
@graft.pattern
def twice(x: torch.Tensor) -> torch.Tensor:
    return x + x
@twice.replace
def _(m):
    return m.x * 2
graft.compile(lambda x: x + x, (torch.ones(2),), mode="eager")
"""


def test_logs_by_name() -> None:
    env = {**os.environ, "TORCHGRAFT_LOGS": "passes,match"}
    done = process.run([sys.executable, "-c", CODE], env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert any(line.startswith("[torchgraft passes] pattern twice: +1 -1 ~1") for line in lines)
    assert any(line.startswith("[torchgraft match] twice: matched at ") for line in lines)
    assert not any("plan" in line for line in lines)


def test_logs_are_pythons() -> None:
    seen: list[str] = []

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    logger, handler = logging.getLogger("torchgraft.plan"), Seen()
    logger.addHandler(handler)
    try:
        graft.compile(lambda x: x + 1, (torch.ones(2),), mode="eager")
        assert seen == []
        logger.setLevel(logging.INFO)
        compiled = graft.compile(lambda x: x + 1, (torch.ones(2),), mode="eager")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    [text] = seen
    assert text.endswith(str(compiled.plan))


def test_an_unknown_log_suggests() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'passes'"):
        logs.configure("pases")
