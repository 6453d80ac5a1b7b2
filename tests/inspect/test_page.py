"""The data of a report and its page: every graph in it is the one that was."""

from __future__ import annotations

import base64
import copy
import gc
import gzip
import json
import pathlib
import re
import sys
from typing import Any

import process
import pytest
import torch
from samples import Stack, compiled, gate, large, twice
from torch import Tensor
from torch.fx import GraphModule

import torchgraft as graft
from torchgraft.errors import BadValue, NoProgram, UnknownName
from torchgraft.inspect.graph import rows
from torchgraft.inspect.page import page
from torchgraft.passes.history import Change, History


def graphs(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of the graph before each step and of the last one, as the page works them out."""
    fields = data["versions"]
    all_rows = [
        {field: values[i] for field, values in fields.items()} for i in range(len(fields["name"]))
    ]
    graph = {all_rows[i]["name"]: all_rows[i] for i in data["final"]}
    found = [graph]
    for step in reversed(data["steps"]):
        graph = {name: row for name, row in graph.items() if name not in step["diff"]["added"]}
        for i in (*step["diff"]["changed"], *step["diff"]["removed"]):
            graph[all_rows[i]["name"]] = all_rows[i]
        found.insert(0, graph)
    return found


def calls(graph: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {name: (row["op"], row["args"]) for name, row in graph.items()}


def test_every_earlier_graph_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, tuple[str, str]]] = []
    add = History.add

    def watch(self: History, change: Change, gm: GraphModule) -> None:
        seen.append({row.name: (row.op, row.args) for row in rows(gm)})
        add(self, change, gm)

    monkeypatch.setattr(History, "add", watch)
    program = compiled()
    data = program.report.data()
    told = [calls(graph) for graph in graphs(data)]
    assert told[1:] == seen
    assert [step["name"] for step in data["steps"]][-2:] == ["twice", "converters"]
    assert told[0] != told[-1]
    assert any(op == "aten.sigmoid.default" for op, _ in told[0].values())
    assert not any(op == "aten.sigmoid.default" for op, _ in told[-1].values())


def test_what_the_page_is_told() -> None:
    program = compiled()
    program.profile((torch.ones(3, 4),), repeat=2)
    data = json.loads(json.dumps(program.report.data()))
    steps = {step["name"]: step for step in data["steps"]}
    assert len(steps["gate"]["hits"]) == 2
    assert "tanh" in steps["never"]["miss"]
    assert (steps["twice"]["added"], steps["twice"]["removed"]) == (8, 4)
    assert data["conversions"][0]["reason"] == "not today </script>"
    assert {p["runs"] for p in data["placed"]} == {"aten"}
    assert set(data["streams"].values()) == {"main"}
    assert len(data["plan"]["kernels"]) == len(data["plan"]["measured"]["spans"])
    assert all(k["seconds"] > 0 and 0 <= k["share"] <= 1 for k in data["plan"]["kernels"])
    modules = set(data["versions"]["module"])
    assert {"blocks.0", "blocks.1.up"} <= modules
    assert any(
        __file__.replace("test_page", "samples") in line for line in data["versions"]["line"]
    )


def unpacked(page: str) -> dict[str, Any]:
    [packed] = re.findall(r'id="data">([^<]*)</script>', page)
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return found


def test_the_page_stands_alone(tmp_path: pathlib.Path) -> None:
    program = compiled()
    program.report.html(tmp_path / "deep" / "out.html")
    text = (tmp_path / "deep" / "out.html").read_text("utf-8")
    assert unpacked(text) == json.loads(json.dumps(program.report.data()))
    assert text.count("</script>") == 2  # nothing in the data or the program ends a script early
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", text)
    assert "default-src 'none'" in text


def test_a_name_is_no_markup(tmp_path: pathlib.Path) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    model.__name__ = "<b>&"
    program = graft.compile(model, (torch.ones(2),), mode="eager")
    program.report.html(tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text("utf-8")
    assert "<title>&lt;b&gt;&amp; · torchgraft</title>" in text


def test_a_folder_gets_a_page_for_each_program(tmp_path: pathlib.Path) -> None:
    home = tmp_path / "reports"
    compiled(report=home)
    compiled(report=str(home))
    assert sorted(path.name for path in home.iterdir()) == ["Stack.html", "Stack_2.html"]
    run = torch.compile(Stack(1), backend=graft.backend(graft.Config(mode="eager", report=home)))
    run(torch.ones(3, 4)).sum().backward()
    names = [path.name for path in home.iterdir()]
    assert len(names) == 4
    assert sum("backward" in name for name in names) == 1


def test_a_report_keeps_no_program(tmp_path: pathlib.Path) -> None:
    program = compiled()
    report = graft.reports()[-1]
    assert report == program.report
    del program
    gc.collect()
    with pytest.raises(NoProgram, match="its program is gone"):
        report.html(tmp_path / "out.html")
    assert copy.deepcopy(report).steps == report.steps


def test_mistakes_in_the_config() -> None:
    with pytest.raises(BadValue, match=r"Config\.report"):
        graft.Config(report=1)  # type: ignore[arg-type]
    with pytest.raises(BadValue, match=r"Config\.dump_formats"):
        graft.Config(dump_formats="txt")  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="Did you mean 'txt'"):
        graft.Config(dump_formats=("text",))


@pytest.mark.slow
def test_the_example_writes_pages(tmp_path: pathlib.Path) -> None:
    example = pathlib.Path(__file__).parents[2] / "examples" / "report.py"
    command = [sys.executable, str(example), str(tmp_path)]
    done = process.run(command)
    assert done.returncode == 0, done.stderr
    found = {path.stem: unpacked(path.read_text("utf-8")) for path in tmp_path.glob("*.html")}
    assert set(found) == {"merge_projections", "side_projections"}
    assert found["side_projections"]["plan"]["measured"]["streams"] == ["main", "query", "key"]


def test_verification_may_undo_a_pass() -> None:
    @graft.fx_pass(register=False)
    def wrong(graph: graft.Graph) -> None:
        for node in graph.all(torch.ops.aten.add.Tensor):
            graph.replace(node, graph.call(torch.ops.aten.sub.Tensor, *node.args))

    program = compiled(verify="pin", patterns=[gate], post_passes=[wrong, twice])
    data = program.report.data()
    steps = {step["name"]: step for step in data["steps"]}
    assert steps["wrong"]["diff"] == {"added": [], "removed": [], "changed": []}
    assert steps["twice"]["added"] == 8
    assert all(op != "aten.sub.Tensor" for graph in graphs(data) for op, _ in calls(graph).values())


def test_five_thousand_nodes_fit() -> None:
    data = large(5000)
    assert len(data["final"]) == 5000
    text = page(data)
    assert len(text.encode()) < 5e6
    assert unpacked(text)["versions"]["name"][4999] == "node_4999"


def priced(program: graft.Compiled) -> list[tuple[Any, ...]]:
    kernels = program.report.data()["plan"]["kernels"]
    return [(k["name"], k["stream"], k["bytes"], k["flops"], k["nodes"]) for k in kernels]


@pytest.mark.parametrize(
    "mode", ["eager", pytest.param("default", marks=pytest.mark.slow)], ids=str
)
def test_a_loaded_program_has_a_page_and_a_profile(tmp_path: pathlib.Path, mode: str) -> None:
    """What a saved program keeps is what the page of the compiled one says of the plan."""

    def model(x: Tensor) -> Tensor:
        with graft.stream("side"):
            left = torch.relu(x @ x)
        return torch.topk(left + torch.tanh(x @ x.T), 2)[0]

    x = torch.randn(8, 8)
    program = graft.compile(model, (x,), mode=mode)
    program.save(tmp_path / "model.graft")
    loaded = graft.load(tmp_path / "model.graft")
    assert priced(loaded) == priced(program)
    profile = loaded.profile((x,), repeat=2)
    assert {kernel.stream for kernel in profile.kernels} == {"main", "side"}
    assert loaded.report.data()["plan"]["call"] == profile.seconds
    loaded.report.html(tmp_path / "loaded.html")
    torch.testing.assert_close(loaded(x), model(x))
