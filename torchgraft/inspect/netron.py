"""A graph for Netron and TensorBoard: GraphDef text, and the structure as ONNX.

Neither is meant to run: operators keep their own names, weights are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft.errors import MissingPackage
from torchgraft.fx.edit import target_name
from torchgraft.inspect.graph import Row, attributes, row, shape_of

# --- GraphDef, as protobuf text ---

_DT = {
    torch.float32: "DT_FLOAT",
    torch.float64: "DT_DOUBLE",
    torch.float16: "DT_HALF",
    torch.bfloat16: "DT_BFLOAT16",
    torch.int64: "DT_INT64",
    torch.int32: "DT_INT32",
    torch.int16: "DT_INT16",
    torch.int8: "DT_INT8",
    torch.uint8: "DT_UINT8",
    torch.bool: "DT_BOOL",
    torch.complex64: "DT_COMPLEX64",
    torch.complex128: "DT_COMPLEX128",
}


def pbtxt(gm: GraphModule) -> str:
    """Protobuf text of a GraphDef. A node's name starts with its module, so viewers can fold it."""
    table = {node: row(node) for node in gm.graph.nodes}
    names = {node.name: _scoped(one) for node, one in table.items()}
    lines: list[str] = []
    for node, one in table.items():
        lines += ["node {", f"  name: {_quoted(names[one.name])}"]
        lines.append(f"  op: {_quoted(_op(one))}")
        lines += [f"  input: {_quoted(names[used])}" for used in one.inputs]
        for key, value in _attrs(node, one):
            lines.append(f"  attr {{ key: {_quoted(key)} value {{ {value} }} }}")
        lines.append("}")
    return "\n".join([*lines, "versions { producer: 1 }"]) + "\n"


def _scoped(one: Row) -> str:
    return "/".join([*one.module.split("."), one.name]) if one.module else one.name


def _op(one: Row) -> str:
    if one.kind != "call":
        return one.kind.capitalize()
    namespace, op, _ = _parts(one.op)
    return f"{namespace}::{op}" if namespace else op


def _parts(op: str) -> tuple[str, str, str]:
    """Namespace, name and overload of an operator. Apart, because Netron shows what lies behind
    the last dot of a name: `default`, most of the time."""
    if op.count(".") != 2:  # a function of Python
        return "", op, ""
    namespace, name, overload = op.split(".")
    return namespace, name, "" if overload == "default" else overload


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _attrs(node: Node, one: Row) -> Iterator[tuple[str, str]]:
    if node.op == "call_function":
        for name, value in attributes(node).items():
            yield name, _attr(value)
        if overload := _parts(one.op)[2]:
            yield "_overload", f"s: {_quoted(overload)}"
    values = node.meta.get("val")
    tensors = values if isinstance(values, (list, tuple)) else [values]
    shapes = [shape_of(v) for v in tensors if isinstance(v, Tensor)]
    if shapes and node.op != "output":
        shown = " ".join(f"shape {{ {_dims(shape or [])} }}" for shape in shapes)
        yield "_output_shapes", f"list {{ {shown} }}"
        dtype = next(v.dtype for v in tensors if isinstance(v, Tensor))
        yield "dtype", f"type: {_DT[dtype]}" if dtype in _DT else f"s: {_quoted(str(dtype))}"
    if one.line:
        yield "_line", f"s: {_quoted(one.line)}"


def _dims(shape: list[int | str]) -> str:
    # A size that is not known is -1 in a GraphDef; its name is kept beside it.
    return " ".join(
        f"dim {{ size: {size} }}"
        if isinstance(size, int)
        else f"dim {{ size: -1 name: {_quoted(size)} }}"
        for size in shape
    )


def _attr(value: Any) -> str:
    if isinstance(value, bool):
        return f"b: {str(value).lower()}"
    if isinstance(value, int):
        return f"i: {value}"
    if isinstance(value, float):
        return f"f: {value!r}"
    if isinstance(value, torch.dtype) and value in _DT:
        return f"type: {_DT[value]}"
    if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
        return f"list {{ {' '.join(f'i: {v}' for v in value)} }}"
    return f"s: {_quoted(str(value))}"


# --- ONNX ---


def onnx(gm: GraphModule, name: str) -> bytes:
    """The structure as a serialised ONNX model: operators under their namespace as domain."""
    try:
        import onnx as package
        from onnx import helper
    except ImportError:
        raise MissingPackage("The dump format 'onnx'", "onnx", "onnx") from None
    nodes, inputs, outputs, infos = [], [], [], []
    domains = {"torchgraft"}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            inputs.append(_info(helper, node.name, value))
        elif node.op == "output":
            returned = [arg for arg in node.args[0] if isinstance(arg, Node)]
            for i, arg in enumerate(returned):  # an input may be returned, and twice
                nodes.append(
                    helper.make_node("Identity", [arg.name], [f"output_{i}"], name=f"output_{i}")
                )
                outputs.append(_info(helper, f"output_{i}", arg.meta.get("val")))
        else:
            op, domain, overload = _name(node)
            domains.add(domain)
            used = [used.name for used in node.all_input_nodes]
            made = helper.make_node(op, used, [node.name], name=node.name, domain=domain)
            made.overload = overload
            made.doc_string = row(node).line
            made.metadata_props.add(key="module", value=row(node).module)
            given = attributes(node) if node.op == "call_function" else {}
            made.attribute.extend(
                helper.make_attribute(key, _plain(held))
                for key, held in given.items()
                if _plain(held) is not None
            )
            nodes.append(made)
            if isinstance(value, Tensor):
                infos.append(_info(helper, node.name, value))
    graph = helper.make_graph(nodes, name, inputs, outputs, value_info=infos)
    opsets = [helper.make_opsetid("", 21), *(helper.make_opsetid(d, 1) for d in sorted(domains))]
    model = helper.make_model(graph, producer_name="torchgraft", opset_imports=opsets)
    model.ir_version = 10
    package.checker.check_model(model)
    serialised: bytes = model.SerializeToString()
    return serialised


def _name(node: Node) -> tuple[str, str, str]:
    """The operator, domain and overload of a node."""
    if node.op == "get_attr":
        return "constant", "torchgraft", ""
    namespace, op, overload = _parts(target_name(node.target))
    return op, namespace or "torchgraft", overload


def _plain(value: Any) -> Any:
    """An argument as an ONNX attribute can hold it; None where it has no value."""
    if isinstance(value, bool):
        return int(value)
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, (list, tuple)) and value:
        for kind in (int, float):
            if all(type(v) is kind for v in value):
                return list(value)
    return str(value)


def _info(helper: Any, name: str, value: Any) -> Any:
    from onnx import TensorProto

    if not isinstance(value, Tensor):
        return helper.make_tensor_value_info(name, TensorProto.INT64, [])
    kinds = {torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.float16: "FLOAT16"}
    kind = kinds.get(value.dtype) or str(value.dtype).removeprefix("torch.").upper()
    number = getattr(TensorProto, kind, TensorProto.UNDEFINED)
    return helper.make_tensor_value_info(name, number, shape_of(value))
