"""Converters that build with GE's own operators, and with builders of older generated files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchgraft as graft
from torchgraft import _torch
from torchgraft.compat.air import builtins, ge
from torchgraft.errors import NotOnThisDevice
from torchgraft.op.lookup import register_kernel


@pytest.fixture
def my_op() -> Iterator[Any]:
    """An operator that has a schema and a meta, and no kernel: it runs through its converter."""
    library = torch.library.Library("compat_ge", "FRAGMENT")
    library.define("mix(Tensor x, Tensor w) -> Tensor")
    library.impl("mix", lambda x, w: torch.empty_like(x), "Meta")
    with graft.Registry():
        yield torch.ops.compat_ge.mix.default
    _torch.drop_library(library)


@pytest.mark.feature("torchair", "GE's own operators in a converter: ge_apis.Add, MatMul, ...")
def test_operators_of_ge_itself(ascend: Path, my_op: Any) -> None:
    import torchair
    from torchair.ge_concrete_graph import ge_apis as ge

    @torchair.register_fx_node_ge_converter(my_op)
    def mix(x: Any, w: Any, meta_outputs: Any = None) -> Any:
        assert meta_outputs.size == [3, 3]
        made = ge.MatMul(x, w, None, transpose_x2=True)
        made = ge.Relu(ge.Add(made, 1.0))
        total = ge.ReduceSum(made, [1], keep_dims=True)
        made = ge.RealDiv(made, ge.Maximum(total, ge.Const(1e-6)))
        made = ge.Reshape(ge.Transpose(made, ge.Const([1, 0])), [3, 3])
        made = torchair.ge.custom_op("Mul", inputs={"x1": made, "x2": made}, outputs=["y"])
        return ge.Squeeze(ge.Pack([ge.TransposeD(made, perm=[1, 0])], axis=0), axis=[0])

    def expected(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made = (x @ w.T + 1).relu()
        return (made / made.sum(1, keepdim=True).clamp(min=1e-6)) ** 2

    x, w = torch.randn(3, 3), torch.randn(3, 3)
    fn = torch.compile(my_op, backend=torchair.get_npu_backend())
    torch.testing.assert_close(fn(x, w), expected(x, w))
    with pytest.raises(NotOnThisDevice, match="load_prototypes"):
        ge.NoSuchOperator  # noqa: B018


X = torch.tensor([[1.5, -2.0, 0.5], [3.0, 0.25, -1.0], [0.0, 2.0, 4.0]])
W = X.flip(0) + 0.5
CASES: dict[str, tuple[Callable[[Any, Any, Any], Any], torch.Tensor]] = {
    "Div": (lambda ge, x, w: ge.Div(x, w), X / W),
    "SquaredDifference": (lambda ge, x, w: ge.SquaredDifference(x, w), (X - W) ** 2),
    "LeakyRelu": (lambda ge, x, w: ge.LeakyRelu(x, negative_slope=0.5), X.clamp(min=0.5 * X)),
    "SoftmaxV2": (lambda ge, x, w: ge.SoftmaxV2(x, axes=[0]), X.softmax(0)),
    "ClipByValue": (lambda ge, x, w: ge.ClipByValue(x, -1.0, ge.Const(2.0)), X.clamp(-1, 2)),
    "Select": (lambda ge, x, w: ge.Select(ge.Greater(x, w), x, w), torch.maximum(X, W)),
    "MatMul": (lambda ge, x, w: ge.MatMul(x, w, x, transpose_x1=True), X.T @ W + X),
    "BatchMatMul": (lambda ge, x, w: ge.BatchMatMul(x, w, adj_x2=True), X @ W.T),
    "Concat": (
        lambda ge, x, w: ge.Slice(ge.ConcatV2([x, w], 0), [2, 0], [3, -1]),
        torch.cat([X, W])[2:5],
    ),
    "Tile": (lambda ge, x, w: ge.Slice(ge.Tile(x, [1, 2]), [0, 2], [3, 3]), X.tile(1, 2)[:, 2:5]),
    "ExpandDims": (lambda ge, x, w: ge.Squeeze(ge.ExpandDims(x, 0)), X),
    "Unsqueeze": (lambda ge, x, w: ge.Reshape(ge.Unsqueeze(x, axes=[0, 2]), [3, 3]), X),
    "GatherV2": (lambda ge, x, w: ge.GatherV2(x, ge.Const([2, 0, 1]), 1), X[:, [2, 0, 1]]),
    "Fill": (lambda ge, x, w: ge.Add(ge.Fill([3, 3], 2.0), x), X + 2),
    "BroadcastTo": (
        lambda ge, x, w: ge.BroadcastTo(ge.ReduceMean(x, [0], keep_dims=True), [3, 3]),
        X.mean(0, keepdim=True).expand(3, 3),
    ),
    "ReduceMax": (lambda ge, x, w: ge.Sub(x, ge.ReduceMax(x, [])), X - X.max()),
    "ArgMaxV2": (
        lambda ge, x, w: ge.Add(x, ge.ArgMaxV2(x, ge.Const(0), dtype=ge.Const(0).dtype)),
        X + X.argmax(0),
    ),
    "Cumsum": (
        lambda ge, x, w: ge.Cumsum(x, 0, exclusive=True, reverse=True),
        X.flip(0).cumsum(0).flip(0) - X,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_of_ge_computes_what_it_says(ascend: Path, my_op: Any, name: str) -> None:
    import torchair
    from torchair.ge_concrete_graph import ge_apis

    build, expected = CASES[name]
    torchair.register_fx_node_ge_converter(my_op)(lambda x, w: build(ge_apis, x, w))
    fn = torch.compile(my_op, backend=torchair.get_npu_backend())
    torch.testing.assert_close(fn(X, W), expected)


def test_every_operator_of_one_or_two_inputs_is_one_of_aten(ascend: Path, my_op: Any) -> None:
    import torchair

    def convert(x: Any, w: Any) -> Any:
        for name in builtins._UNARY:
            made = builtins.BUILTINS[name](ge.Cast(x, dst_type=torch.int32) if "Bit" in name else x)
            assert made.symsize == [3, 3]
        for name in builtins._BINARY:
            one, two = (ge.Cast(v, dst_type=torch.int32) for v in (x, w))
            first = builtins.BUILTINS[name](*((one, two) if "Bit" in name else (x, w)))
            second = x if "Bit" in name else builtins.BUILTINS[name](x, 2.0)
            assert first.symsize == second.symsize == [3, 3]
        with pytest.raises(NotImplementedError, match="must be a constant"):
            builtins.BUILTINS["Reshape"](x, x)
        return x

    torchair.register_fx_node_ge_converter(my_op)(convert)
    fn = torch.compile(my_op, backend=torchair.get_npu_backend())
    assert torch.equal(fn(X, W), X)


LEGACY = """
from torchair.ge_concrete_graph.ge_graph import Tensor, TensorType, auto_convert_to_tensor
from torchair.ge_concrete_graph.ge_graph import compat_as_bytes, get_default_ge_graph
from torchair.ge_concrete_graph.ge_graph import get_invalid_desc, next_unique_name


@auto_convert_to_tensor([False, False], [False, True], inputs_tensor_type=[TensorType.TT_ALL] * 2)
def Blend(x, bias, *, factor, kind="plain", dependencies=[], node_name=None):
    op = get_default_ge_graph().op.add()
    op.type = "Blend"
    op.name = next_unique_name(node_name, "Blend")
    for dependency in dependencies:
        op.input.append(dependency.controller)
    op.input.append(x.tensor)
    op.input_desc.add().CopyFrom(x.desc)
    op.input_desc[-1].name = "x"
    if bias is not None:
        op.input.append(bias.tensor)
        op.input_desc.add().CopyFrom(bias.desc)
    else:
        op.input.append("")
        op.input_desc.add().CopyFrom(get_invalid_desc())
    op.input_desc[-1].name = "bias"
    op.attr["factor"].f = factor
    op.attr["kind"].s = compat_as_bytes(kind)
    op.output_desc.add().name = "y"
    return Tensor(op, 0)
"""


@pytest.mark.feature("torchair", "builders of older generated files (messages filled in by hand)")
def test_a_builder_of_an_older_file(ascend: Path, my_op: Any) -> None:
    import torchair

    header = ascend / "blend.h"
    header.write_text(
        "REG_OP(Blend).INPUT(x, TensorType::ALL()).OPTIONAL_INPUT(bias, TensorType::ALL())"
        ".OUTPUT(y, TensorType::ALL()).REQUIRED_ATTR(factor, Float)"
        '.ATTR(kind, String, "plain").OP_END_FACTORY_REG(Blend)',
        encoding="utf-8",
    )
    graft.load_prototypes(header)

    def blend(x: Any, bias: Any = None, *, factor: float, kind: str = "plain") -> Any:
        return x * factor + (0 if bias is None else bias) + (1 if kind == "more" else 0)

    register_kernel("Blend", blend)
    made: dict[str, Any] = {}
    exec(LEGACY, made)

    @torchair.register_fx_node_ge_converter(my_op)
    def mix(x: Any, w: Any, meta_outputs: Any = None) -> Any:
        first = made["Blend"](x, None, factor=2.0)
        return made["Blend"](first, w, factor=0.5, kind="more", dependencies=[x])

    x, w = torch.randn(2, 3), torch.randn(2, 3)
    fn = torch.compile(my_op, backend=torchair.get_npu_backend())
    torch.testing.assert_close(fn(x, w), x + w + 1)


GENERATED = """
from torchair._ge_concrete_graph.compat_ir import IrDef, ge_op
from torchair._ge_concrete_graph.ge_ir_pb2 import GraphDef, OpDef, TensorDef, TensorDescriptor
from torchair.ge import attr
from torchair.ge._ge_graph import DataType, TensorType, auto_convert_to_tensor, compat_as_bytes
from torchair.ge._ge_graph import compat_as_bytes_list, get_default_ge_graph, get_invalid_desc
from torchair.ge._ge_graph import next_unique_name, trans_to_list_list_float
from torchair.ge._ge_graph import trans_to_list_list_int


@auto_convert_to_tensor([False, False], [False, False])
def KeepRow(cache, x, *, row, spans=[[0, 1]], dependencies=[], node_name=None):
    ir = IrDef("KeepRow").input("cache", "DT_FLOAT").input("x", "DT_FLOAT")
    ir = ir.required_attr("row", attr.Int).attr("spans", attr.ListListInt([[0, 1]]))
    return ge_op(
        op_type="KeepRow",
        inputs={"cache": cache, "x": x},
        attrs={"row": attr.Int(row), "spans": attr.ListListInt(spans)},
        outputs=["cache", "twice"],
        dependencies=dependencies,
        ir=ir.output("cache", "DT_FLOAT").output("twice", "DT_FLOAT"),
    )


@auto_convert_to_tensor([False], [False])
def Spans(x, *, spans, dependencies=[], node_name=None):
    op = get_default_ge_graph().op.add()
    op.type = "Spans"
    op.name = next_unique_name(node_name, "Spans")
    op.input.append(x.tensor)
    op.input_desc.add().CopyFrom(x.desc)
    op.input_desc[-1].name = "x"
    op.attr["spans"].list_list_int.CopyFrom(trans_to_list_list_int(spans))
    op.output_desc.add().name = "y"
    return Tensor(op, 0)
"""


def test_a_generated_file_imports_what_it_does_not_use(ascend: Path, my_op: Any) -> None:
    """And an operator that writes to its input gives that input, as its prototype says."""
    import torchair
    from torchair.ge import Tensor

    made: dict[str, Any] = {"Tensor": Tensor}
    exec(GENERATED, made)
    header = ascend / "spans.h"
    header.write_text(
        "REG_OP(Spans).INPUT(x, TensorType::ALL()).OUTPUT(y, TensorType::ALL())"
        ".REQUIRED_ATTR(spans, ListListInt).OP_END_FACTORY_REG(Spans)",
        encoding="utf-8",
    )
    graft.load_prototypes(header)
    register_kernel("Spans", lambda x, *, spans: x + sum(map(sum, spans)))

    def keep(cache: Any, x: Any, *, row: int, spans: Any) -> Any:
        cache[row] = x[0]
        return x * 2

    register_kernel("KeepRow", keep)

    @torchair.register_fx_node_ge_converter(my_op)
    def mix(x: Any, w: Any) -> Any:
        assert (x.index, x.rank) == (0, 2)
        cache, twice = made["KeepRow"](torchair.ge.Clone(x), w, row=1)
        spans = made["Spans"](cache, spans=[[1, 2], [3]])
        return torchair.ge.custom_op("Add", inputs={"x1": spans, "x2": twice}, outputs=["y"])

    x, w = torch.randn(2, 3), torch.randn(2, 3)
    fn = torch.compile(my_op, backend=torchair.get_npu_backend())
    torch.testing.assert_close(fn(x, w), torch.stack([x[0], w[0]]) + 6 + 2 * w)
    with pytest.raises(NotOnThisDevice, match="protobuf"):
        made["GraphDef"]()
    with pytest.raises(TypeError, match="expected an operator"):
        torchair.register_fx_node_ge_converter("aten::sin")
