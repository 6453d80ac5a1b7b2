"""Dumps: golden text, and round trips for every format that can be read back."""

from __future__ import annotations

import pathlib
import runpy
import sys
import xml.etree.ElementTree
from typing import Any

import process
import pytest
import torch
from samples import Stack, compiled, twice
from torch import Tensor

import torchgraft as graft
from torchgraft.errors import BadValue, MissingPackage
from torchgraft.inspect.dump import read_json
from torchgraft.inspect.graph import Row, rows


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(1, keepdim=True)


LINE = f"{__file__}:{Small.forward.__code__.co_firstlineno + 1}"

FOUR_TWO = (
    'attr { key: "_output_shapes" value { list { shape { dim { size: 4 } dim { size: 2 } } } } }'
)


def dumped(folder: pathlib.Path, *formats: str, **fields: Any) -> pathlib.Path:
    """The only program dumped into a folder."""
    graft.compile(
        Small(), (torch.ones(4, 2),), mode="eager", dump=folder, dump_formats=formats, **fields
    )
    [home] = folder.iterdir()
    return home


def test_files_are_numbered_by_step(tmp_path: pathlib.Path) -> None:
    program = compiled(dump=tmp_path, dump_formats=["txt"])
    [home] = tmp_path.iterdir()
    assert home.name == "000_Stack"
    steps = [step for step in program.report.steps if step.added or step.removed or step.changed]
    numbers = {step.name: i for i, step in enumerate(program.report.steps, 1)}
    wanted = [f"{numbers[step.name]:03}_{step.name}.txt" for step in steps]
    found = sorted(path.name for path in home.iterdir())
    assert found == sorted(["000_captured.txt", *wanted, "plan.txt"])
    assert (home / wanted[-1]).read_text() == f"{program.graph}\n"
    assert (home / "plan.txt").read_text() == f"{program.plan}\n"
    compiled(dump=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000_Stack", "001_Stack"]


def test_txt_and_dot_and_pbtxt(tmp_path: pathlib.Path) -> None:
    home = dumped(tmp_path, "txt", "dot", "pbtxt")
    assert (home / "000_captured.txt").read_text() == (
        "x: f32[4, 2] = placeholder x\n"
        "p_weight: f32[2] = get_attr _weight0\n"
        f"mul: f32[4, 2] = aten.mul.Tensor(x, p_weight)  # {LINE}\n"
        f"sum_1: f32[4, 1] = aten.sum.dim_IntList(mul, [1], True)  # {LINE}\n"
        "return (sum_1,)\n"
    )
    assert (
        (home / "000_captured.dot").read_text()
        == r"""digraph graph_of_torchgraft {
  node [fontname=monospace, fontsize=10];
  "x" [label="x\nf32[4, 2]", shape=invhouse];
  "p_weight" [label="p_weight\nf32[2]", shape=cylinder];
  "mul" [label="mul\naten.mul.Tensor\nf32[4, 2]", shape=box];
  "x" -> "mul";
  "p_weight" -> "mul";
  "sum_1" [label="sum_1\naten.sum.dim_IntList\nf32[4, 1]", shape=box];
  "mul" -> "sum_1";
  "output" [label="output", shape=house];
  "sum_1" -> "output";
}
"""
    )
    assert (
        (home / "000_captured.pbtxt").read_text()
        == f"""\
node {{
  name: "x"
  op: "Input"
  {FOUR_TWO}
  attr {{ key: "dtype" value {{ type: DT_FLOAT }} }}
}}
node {{
  name: "p_weight"
  op: "Constant"
  attr {{ key: "_output_shapes" value {{ list {{ shape {{ dim {{ size: 2 }} }} }} }} }}
  attr {{ key: "dtype" value {{ type: DT_FLOAT }} }}
}}
node {{
  name: "mul"
  op: "aten::mul"
  input: "x"
  input: "p_weight"
  attr {{ key: "_overload" value {{ s: "Tensor" }} }}
  {FOUR_TWO}
  attr {{ key: "dtype" value {{ type: DT_FLOAT }} }}
  attr {{ key: "_line" value {{ s: "{LINE}" }} }}
}}
node {{
  name: "sum_1"
  op: "aten::sum"
  input: "mul"
  attr {{ key: "dim" value {{ list {{ i: 1 }} }} }}
  attr {{ key: "keepdim" value {{ b: true }} }}
  attr {{ key: "_overload" value {{ s: "dim_IntList" }} }}
  {FOUR_TWO.replace("2", "1")}
  attr {{ key: "dtype" value {{ type: DT_FLOAT }} }}
  attr {{ key: "_line" value {{ s: "{LINE}" }} }}
}}
node {{
  name: "output"
  op: "Output"
  input: "sum_1"
}}
versions {{ producer: 1 }}
"""
    )


def test_py_runs_again(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(3)
    model, x = Stack(2), torch.randn(3, 4)
    program = graft.compile(
        model, (x,), mode="eager", post_passes=[twice], dump=tmp_path, dump_formats=["py"]
    )
    [home] = tmp_path.iterdir()
    scripts = sorted(home.glob("*.py"))
    assert len(scripts) == 3
    with torch.no_grad():
        want = model(x)
        for path in scripts:
            [got] = runpy.run_path(str(path))["Graph"]()(x)
            torch.testing.assert_close(got, want)
    torch.testing.assert_close(program(x), want)
    assert process.output([sys.executable, scripts[-1]]) == "(3, 4) torch.float32\n"


def test_json_comes_back(tmp_path: pathlib.Path) -> None:
    program = compiled(dump=tmp_path, dump_formats=["json"])
    [home] = tmp_path.iterdir()
    [*_, last] = sorted(home.glob("*.json"))
    assert read_json(last) == rows(program.graph.gm)
    assert read_json(home / "000_captured.json") != rows(program.graph.gm)
    broken = tmp_path / "broken.json"
    for text in ("", "[]", '{"format": "other", "version": 1}', '{"format": "torchgraft.graph"}'):
        broken.write_text(text)
        with pytest.raises(BadValue, match=r"broken\.json"):
            read_json(broken)


def test_svg_is_a_picture_of_every_node(tmp_path: pathlib.Path) -> None:
    home = dumped(tmp_path, "svg")
    tree = xml.etree.ElementTree.parse(home / "000_captured.svg")
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in tree.iter(f"{space}text")]
    assert {"p_weight", "x", "aten.mul.Tensor", "f32[4, 1]", "output"} <= set(texts)
    assert len(list(tree.iter(f"{space}rect"))) == 5
    assert len([p for p in tree.iter(f"{space}path") if p.get("marker-end")]) == 4


def test_onnx_has_the_structure(tmp_path: pathlib.Path) -> None:
    onnx = pytest.importorskip("onnx")
    program = compiled(dump=tmp_path, dump_formats=["onnx"])
    [home] = tmp_path.iterdir()
    [*_, last] = sorted(home.glob("*.onnx"))
    model = onnx.load(last)
    onnx.checker.check_model(model)
    found = {
        node.output[0]: (
            f"{node.domain}.{node.op_type}.{node.overload or 'default'}",
            tuple(node.input),
        )
        for node in model.graph.node
        if node.domain not in ("", "torchgraft")
    }
    calls = [row for row in rows(program.graph.gm) if row.kind == "call"]
    assert found == {row.name: (row.op, row.inputs) for row in calls}
    shapes = {
        info.name: [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        for info in model.graph.value_info
    }
    assert shapes["cumsum"] == [3, 4]
    [cumsum] = [node for node in model.graph.node if node.op_type == "cumsum"]
    assert [(a.name, a.i) for a in cumsum.attribute] == [("dim", 0)]


def test_onnx_is_optional(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingPackage, match=r"pip install 'torchgraft\[onnx\]'"):
        dumped(tmp_path, "onnx")


def graph_def() -> Any:
    """The messages of TensorFlow's graph.proto that a dump uses, with their numbers."""
    pool = pytest.importorskip("google.protobuf.descriptor_pool").DescriptorPool()
    from google.protobuf import descriptor_pb2, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="g.proto", package="g", syntax="proto3")
    text, whole, real, yes, kind, inner = 9, 3, 2, 8, 14, 11
    dtypes = file.enum_type.add(name="DataType")
    for number, name in enumerate(["DT_INVALID", "DT_FLOAT", "DT_DOUBLE", "DT_INT32"]):
        dtypes.value.add(name=name, number=number)
    messages = {
        "Dim": [("size", 1, whole, "", 1), ("name", 2, text, "", 1)],
        "Shape": [("dim", 2, inner, "Dim", 3)],
        "List": [("s", 2, 12, "", 3), ("i", 3, whole, "", 3), ("shape", 7, inner, "Shape", 3)],
        "Value": [
            ("s", 2, 12, "", 1), ("i", 3, whole, "", 1), ("f", 4, real, "", 1),
            ("b", 5, yes, "", 1), ("type", 6, kind, "DataType", 1), ("list", 1, inner, "List", 1),
        ],
        "Entry": [("key", 1, text, "", 1), ("value", 2, inner, "Value", 1)],
        "Node": [
            ("name", 1, text, "", 1), ("op", 2, text, "", 1), ("input", 3, text, "", 3),
            ("attr", 5, inner, "Entry", 3),
        ],
        "Versions": [("producer", 1, 5, "", 1)],
        "Graph": [("node", 1, inner, "Node", 3), ("versions", 4, inner, "Versions", 1)],
    }  # fmt: skip
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, number, type_, of, label in fields:
            made = message.field.add(name=field, number=number, type=type_, label=label)
            if of:
                made.type_name = f".g.{of}"
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("g.Graph"))


def test_pbtxt_parses_as_a_graph_def(tmp_path: pathlib.Path) -> None:
    kind = graph_def()
    from google.protobuf import text_format

    program = compiled(dump=tmp_path, dump_formats=["pbtxt"])
    [home] = tmp_path.iterdir()
    [*_, last] = sorted(home.glob("*.pbtxt"))
    parsed = text_format.Parse(last.read_text(), kind())
    want: list[Row] = rows(program.graph.gm)
    assert [node.name.rpartition("/")[2] for node in parsed.node] == [row.name for row in want]
    assert [tuple(name.rpartition("/")[2] for name in node.input) for node in parsed.node] == [
        row.inputs for row in want
    ]
    assert any(node.name == "blocks/1/down/addmm_3" for node in parsed.node)


def test_symbolic_sizes(tmp_path: pathlib.Path) -> None:
    spec = graft.Input(min_shape=(2, 4), max_shape=(8, 4))
    formats = ["txt", "py", "json", "dot", "svg", "pbtxt", "onnx"]
    model = Stack(1)
    graft.compile(model, (spec,), mode="eager", dump=tmp_path, dump_formats=formats)
    [home] = tmp_path.iterdir()
    assert 'dim { size: -1 name: "s' in (home / "000_captured.pbtxt").read_text()
    scope = runpy.run_path(str(home / "000_captured.py"))
    x = torch.randn(5, 4)
    with torch.no_grad():
        torch.testing.assert_close(scope["Graph"]()(x)[0], model(x))
    assert len(list(home.glob("000_captured.*"))) == len(formats)
