"""Prototypes: every form of a REG_OP header and of msopgen JSON, and the builders made of them."""

from __future__ import annotations

import importlib.util
import inspect
import json
import pathlib
import string
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from torchgraft import _torch
from torchgraft.errors import BadPrototype, NotRegistered, WrongDtype
from torchgraft.op.build import build
from torchgraft.op.builders import generate, render
from torchgraft.op.dtypes import DTYPES, GROUPS, check_dtypes, dtype_name
from torchgraft.op.header import read_header
from torchgraft.op.msopgen import read_msopgen
from torchgraft.op.prototype import ATTR_TYPES, Attr, Parsed, Port, Prototype

pytest.importorskip("tree_sitter_cpp")

BLUR = """\
#ifndef IMAGE_OPS_H_
#define IMAGE_OPS_H_
namespace ge {
/**
 * Blurs an image. Not an entry: REG_OP(Fake).OP_END_FACTORY_REG(Fake)
 */
REG_OP(Blur)
    .INPUT(image, TensorType({DT_FLOAT, DT_FLOAT16,  // the trailing comma is fine
                              DT_UINT8,}))
    .OPTIONAL_INPUT(mask, TensorType::IndexNumberType())
    /* a list of them */
    .DYNAMIC_INPUT(kernels, ge::TensorType::ALL(),)
    .OUTPUT(blurred, TensorType({DT_FLOAT}))
    .DYNAMIC_OUTPUT(levels, DT_FLOAT)
    .ATTR(sigma, Float, 1e-12)
    .REQUIRED_ATTR(radius, Int)
    .OP_END_FACTORY_REG(Blur)

REG_OP(Flip).INPUT(x, "T").OUTPUT(x, "T").DATATYPE(T, TensorType::FloatingDataType())
    .OP_END_FACTORY_REG(Flip);
}  // namespace ge
}  // namespace ge, once too often
#endif
"""


def one(text: str) -> Prototype:
    parsed = read_header(text, where="ops.h")
    assert not parsed.skipped
    (prototype,) = parsed.prototypes
    return prototype


def spec(text: str, more: str = "") -> tuple[Port, Parsed]:
    parsed = read_header(f"REG_OP(P).INPUT(x, {text}){more}.OP_END_FACTORY_REG(P)", where="ops.h")
    assert not parsed.skipped
    return parsed.prototypes[0].inputs[0], parsed


def why(text: str) -> str:
    (skipped,) = read_header(text, where="ops.h").skipped
    return f"{skipped.where}: {skipped.why}"


def test_a_header_is_read_whole() -> None:
    parsed = read_header(BLUR, where="image_ops.h")
    assert not parsed.skipped
    assert not parsed.notes
    blur, flip = parsed.prototypes
    assert blur.where == "image_ops.h:7"
    assert blur.inputs == (
        Port("image", "required", frozenset({"DT_FLOAT", "DT_FLOAT16", "DT_UINT8"})),
        Port("mask", "optional", frozenset({"DT_INT32", "DT_INT64"})),
        Port("kernels", "dynamic", None),
    )
    assert blur.outputs == (
        Port("blurred", "required", frozenset({"DT_FLOAT"})),
        Port("levels", "dynamic", frozenset({"DT_FLOAT"})),
    )
    assert blur.attrs == (Attr("sigma", "Float", False, 1e-12), Attr("radius", "Int"))
    floats = frozenset({"DT_DOUBLE", "DT_FLOAT", "DT_FLOAT16"})
    assert flip.inputs == (Port("x", "required", floats, "T"),)
    assert flip.mutated == ("x",)


def test_a_path_reads_as_its_text_and_a_missing_one_says_so(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "image ops (1).h"
    path.write_text(BLUR)
    assert read_header(path) == read_header(str(path)) == read_header(BLUR)
    assert read_header(path).prototypes[0].where == f"{path}:7"
    with pytest.raises(BadPrototype, match=r"none.h: found no such file"):
        read_header(tmp_path / "none.h")


INT8_BOOL = frozenset({"DT_INT8", "DT_BOOL"})


@pytest.mark.parametrize(
    ("text", "dtypes", "noted"),
    [
        ("TensorType({DT_INT8, DT_BOOL})", INT8_BOOL, ""),
        ("ge::TensorType({ge::DT_INT8, ge::DT_BOOL})", INT8_BOOL, ""),
        ("TensorType{DT_INT8, DT_BOOL}", INT8_BOOL, ""),
        ("{DT_INT8, DT_BOOL}", INT8_BOOL, ""),
        ("ListTensorType(TensorType({DT_INT8, DT_BOOL}))", INT8_BOOL, ""),
        ("TensorType(DT_INT8)", frozenset({"DT_INT8"}), ""),
        ("DT_INT32", frozenset({"DT_INT32"}), ""),
        ("ge::DT_INT32", frozenset({"DT_INT32"}), ""),
        ("TensorType({IndexNumberType(), DT_BOOL})", GROUPS["IndexNumberType"], "DT_BOOL"),
        ("TensorType::ALL()", None, ""),
        ("ge::TensorType::BasicType()", GROUPS["BasicType"], ""),
        ("TesnorType({DT_INT8, DT_BOOL})", INT8_BOOL, "TesnorType taken for TensorType"),
        ("TesnorType::ALL()", None, ""),
        ("TensorType::RealNumbertype()", GROUPS["RealNumberType"], "taken for RealNumberType"),
        ("TensorType({DT_INT8 DT_BOOL})", INT8_BOOL, "read around a syntax error"),
        ("TensorType({DT_FLOAT32})", frozenset({"DT_FLOAT"}), "DT_FLOAT32 taken for DT_FLOAT"),
        ("TensorType({DT_NEXT})", frozenset({"DT_NEXT"}), "no tensor will fit it"),
        ("TensorType({})", None, "taken for any"),
        ("Whatever()", None, "Whatever taken for any dtype"),
    ],
)
def test_type_specs_are_read_liberally(text: str, dtypes: Any, noted: str) -> None:
    port, parsed = spec(text)
    if noted.startswith("DT_B"):
        dtypes, noted = dtypes | {noted}, ""
    assert port.dtypes == dtypes
    assert port.symbol is None
    assert noted in (parsed.notes[0].what if parsed.notes else "")
    assert bool(noted) == bool(parsed.notes)


def test_symbols() -> None:
    port, _ = spec('"T"', ".DATATYPE(T, TensorType({DT_INT8, DT_BOOL}))")
    assert port == Port("x", "required", INT8_BOOL, "T")
    assert spec("T", ".DATATYPE(T, DT_INT8)")[0].symbol == "T"
    assert spec('"T"', ".DATATYPE(T, ListTensorType(DT_INT8))")[0].symbol is None
    port, parsed = spec('"T"')
    assert port == Port("x", "required", None, "T")
    assert parsed.notes[0].what == "T taken for any dtype"


@pytest.mark.parametrize(
    ("type", "text", "value"),
    [
        ("Float", "1e-12", 1e-12),
        ("Float", "-1.5e-7f", -1.5e-7),
        ("Float", "0", 0.0),
        ("Float", "std::numeric_limits<float>::infinity()", float("inf")),
        ("Float", "-FLT_MAX", -torch.finfo(torch.float32).max),
        ("Int", "-9223372036854775807", -(2**63) + 1),
        ("Int", "0x7F", 127),
        ("Int", "1'000LL", 1000),
        ("Int", "(-1)", -1),
        ("Int", "INT64_MAX", 2**63 - 1),
        ("Bool", "true", True),
        ("Bool", "0", False),
        ("String", '"none"', "none"),
        ("String", r'"a\"b" "\n\x41\101"', 'a"b\nAA'),
        ("String", 'R"(a\\n)"', "a\\n"),
        ("AscendString", '""', ""),
        ("Type", "DT_BF16", "DT_BF16"),
        ("Type", "ge::DT_HIFLOAT8", "DT_HIFLOAT8"),
        ("Type", "9", "DT_INT64"),
        ("Tensor", "Tensor()", None),
        ("NamedAttrs", "NamedAttrs()", {}),
        ("Bytes", "{1, 255}", b"\x01\xff"),
        ("ListInt", "{}", []),
        ("ListInt", "{1, -2, /* three */ 3,}", [1, -2, 3]),
        ("ListInt", "std::vector<int64_t>{1, 2}", [1, 2]),
        ("ListInt", "ge::UNKNOWN_RANK", [-2]),
        ("ListFloat", "{0.1, 1}", [0.1, 1.0]),
        ("ListBool", "{true, false}", [True, False]),
        ("ListString", '{"a", "b"}', ["a", "b"]),
        ("ListType", "{DT_INT8}", ["DT_INT8"]),
        ("ListListInt", "{{1, 2}, {}}", [[1, 2], []]),
        ("ListListBool", "{{true}}", [[True]]),
        ("ListListString", '{{"a"}}', [["a"]]),
    ],
)
def test_defaults_are_exact(type: str, text: str, value: Any) -> None:
    (attr,) = one(f"REG_OP(A).ATTR(a, {type}, {text}).OP_END_FACTORY_REG(A)").attrs
    assert attr == Attr("a", type.replace("Ascend", ""), False, value)
    assert attr.default.__class__ is value.__class__


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "\nREG_OP(A)\n.INPUT(x, DT_INT8)\n.OP_END_FACTORY_REG(B)",
            "ops.h:4: found OP_END_FACTORY_REG(B), expected OP_END_FACTORY_REG(A)",
        ),
        (
            "REG_OP(A)\n.INPUT(x, DT_INT8)\n",
            "ops.h:1: found the end of the file, expected OP_END_FACTORY_REG before it",
        ),
        (
            "\n  .INPUT(x, DT_INT8).OP_END_FACTORY_REG(A)",
            "ops.h:2: found OP_END_FACTORY_REG(A), expected a REG_OP before it",
        ),
        (
            "REG_OP(A)\n.INPUT(x, DT_INT8)\nINPUT(y, DT_INT8)\n.OP_END_FACTORY_REG(A)",
            "ops.h:3: found 'INPUT(y, DT_INT8)', expected macro calls joined by dots",
        ),
        (
            "REG_OP(A)\n.INPUT(x, TensorType({DT_INT8})\n.OP_END_FACTORY_REG(A)",
            "ops.h:2: found '.INPUT(x, TensorType({DT_INT8})', expected a whole macro call",
        ),
        (
            "REG_OP(A)\n.INPUT(x DT_INT8)\n.OP_END_FACTORY_REG(A)",
            "ops.h:2: found '.INPUT(x DT_INT8)', expected a whole macro call",
        ),
        (
            "REG_OP(A)\n.INPUT(x)\n.OP_END_FACTORY_REG(A)",
            "ops.h:2: found .INPUT(x), expected a name and its types",
        ),
        (
            "REG_OP(A)\n.ATTR(n, Int)\n.OP_END_FACTORY_REG(A)",
            "ops.h:2: found .ATTR(n, Int), expected a name, a type, a default",
        ),
        (
            "REG_OP(A)\n.ATTR(n, Int, 1.5)\n.OP_END_FACTORY_REG(A)",
            "ops.h:2: found 1.5, expected a default of Int for 'n' (not an Int)",
        ),
        (
            "REG_OP(A)\n.ATTR(n, Type, DT_FLAOT)\n.OP_END_FACTORY_REG(A)",
            "ops.h:2: found DT_FLAOT, expected a default of Type for 'n' "
            "(unknown dtype 'DT_FLAOT'. Did you mean 'DT_FLOAT'?)",
        ),
        (
            "REG_OP(A)\n.INPUT(x, DT_INT8)\n.INPUT(x, DT_INT8)\n.OP_END_FACTORY_REG(A)",
            "ops.h:1: found 'x' twice among the inputs, expected each name once",
        ),
    ],
)
def test_what_is_skipped_says_where_and_why(text: str, message: str) -> None:
    assert why(text) == message


def test_a_typo_in_a_macro_or_an_attribute_type_gets_the_nearest() -> None:
    assert "(did you mean INPUT?)" in why("REG_OP(A).INPTU(x, DT_INT8).OP_END_FACTORY_REG(A)")
    assert "(did you mean ListInt?)" in why("REG_OP(A).REQUIRED_ATTR(x, LisInt)"
                                            ".OP_END_FACTORY_REG(A)")  # fmt: skip


def test_one_bad_entry_does_not_cost_its_neighbours() -> None:
    good = "REG_OP({}).INPUT(x, DT_INT8).OP_END_FACTORY_REG({})\n"
    text = good.format("A", "A") + "REG_OP(B).INPUT(x, DT_INT8)\n" + good.format("C", "D")
    parsed = read_header(text + good.format("E", "E") + good.format("A", "A"), where="ops.h")
    assert [p.name for p in parsed.prototypes] == ["A", "E"]
    assert [(s.name, s.where) for s in parsed.skipped] == [
        ("B", "ops.h:2"),
        ("C", "ops.h:3"),
        ("A", "ops.h:5"),
    ]
    assert parsed.skipped[2].why == (
        "found a second A, expected one prototype per name; the first is at ops.h:1"
    )


@pytest.mark.parametrize("macro", ["GRAPH(g)", "DYNAMIC_GRAPH(g)", "OPTIONAL_OUTPUT(y, DT_INT8)"])
def test_what_no_op_can_be_is_skipped_but_not_malformed(macro: str) -> None:
    (skipped,) = read_header(f"REG_OP(If)\n.{macro}\n.OP_END_FACTORY_REG(If)").skipped
    assert not skipped.malformed
    assert skipped.where == "<text>:2"


def test_dead_and_quoted_entries_are_not_entries() -> None:
    entry = "REG_OP(A).INPUT(x, DT_INT8).OP_END_FACTORY_REG(A)"
    text = f"// {entry}\n/* {entry} */\n#define X {entry}\n#define REG_OP(x) x\n"
    text += f'const char *s = "{entry}";\n#if 0\n{entry}\n#endif\n#ifdef REG_OP\n#endif\n'
    assert read_header(text) == Parsed(())


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
SETS = st.none() | st.frozensets(st.sampled_from(sorted(DTYPES)), min_size=1)
VALUES = {
    "Int": st.integers(-(2**63), 2**63 - 1),
    "Float": st.floats(allow_nan=False),
    "Bool": st.booleans(),
    "String": st.text(st.characters(exclude_categories=["Cs"])),
    "Type": st.sampled_from(sorted(DTYPES)),
    "Tensor": st.none(),
    "NamedAttrs": st.just({}),
    "Bytes": st.binary(),
}


@st.composite
def prototypes(draw: Any) -> Prototype:
    symbols = draw(st.dictionaries(st.sampled_from(["T", "T1", "U"]), SETS))

    def ports(kinds: list[str]) -> Iterator[Port]:
        for name in draw(st.lists(NAMES, max_size=4, unique=True)):
            symbol = draw(st.sampled_from([None, *symbols]))
            dtypes = draw(SETS) if symbol is None else symbols[symbol]
            yield Port(name, draw(st.sampled_from(kinds)), dtypes, symbol)

    def attrs() -> Iterator[Attr]:
        for name in draw(st.lists(NAMES, max_size=4, unique=True)):
            type = draw(st.sampled_from(ATTR_TYPES))
            values = VALUES[type.replace("List", "")]
            for _ in range(type.count("List")):
                values = st.lists(values, max_size=3)
            required = draw(st.booleans())
            yield Attr(name, type, required, None if required else draw(values))

    inputs, outputs = ["required", "optional", "dynamic"], ["required", "dynamic"]
    return Prototype(draw(NAMES), tuple(ports(inputs)), tuple(ports(outputs)), tuple(attrs()))


@given(st.lists(prototypes(), max_size=3, unique_by=lambda p: p.name.lstrip("_")))
@settings(deadline=None)
def test_what_is_rendered_reads_back_and_builders_compile(many: list[Prototype]) -> None:
    parsed = read_header("namespace ge {\n" + "\n".join(map(render, many)) + "\n}")
    assert parsed == Parsed(tuple(many))
    compile(generate(many), "generated.py", "exec")


ADD = {
    "op": "AddScaled",
    "input_desc": [
        {"name": "x", "param_type": "required", "format": ["ND", "ND"], "type": ["fp16", "float"]},
        {"name": "bias", "param_type": "optional", "format": ["ND"], "type": ["int32"]},
        {"name": "rest", "param_type": "dynamic", "format": ["ND"], "type": "bfloat16"},
    ],
    "output_desc": [{"name": "y", "format": ["ND"], "type": ["float16"]}],
    "attr": [
        {"name": "alpha", "param_type": "optional", "type": "float", "default_value": 1e-12},
        {"name": "axes", "param_type": "optional", "type": "list_int", "default_value": "{0, 1}"},
        {"name": "keep", "param_type": "optional", "type": "bool", "default_value": "False"},
        {"name": "mode", "param_type": "required", "type": "string"},
    ],
}


def test_msopgen(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "add.json"
    path.write_text(json.dumps([ADD], indent=1))
    (add,) = read_msopgen(path).prototypes
    assert add == Prototype(
        "AddScaled",
        (
            Port("x", "required", frozenset({"DT_FLOAT16", "DT_FLOAT"})),
            Port("bias", "optional", frozenset({"DT_INT32"})),
            Port("rest", "dynamic", frozenset({"DT_BF16"})),
        ),
        (Port("y", "required", frozenset({"DT_FLOAT16"})),),
        (
            Attr("alpha", "Float", False, 1e-12),
            Attr("axes", "ListInt", False, [0, 1]),
            Attr("keep", "Bool", False, False),
            Attr("mode", "String"),
        ),
    )
    assert add.where == f"{path}:2"
    assert read_msopgen(json.dumps(ADD)).prototypes == (add,)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("3", "add.json:2: found no 'op' in 3, expected 'op' to be a str"),
        ('{"op": "a b"}', "add.json:2: found 'a b', expected a name of letters and digits"),
        (
            '{"op": "A", "input_desc": [{"name": "x", "type": ["int8"], "param_type": "requird"}]}',
            "add.json:2: found param_type 'requird' of 'x', "
            "expected one of required, optional, dynamic (did you mean required?)",
        ),
        (
            '{"op": "A", "attr": [{"name": "n", "type": "int", "default_value": "x"}]}',
            "add.json:2: found default_value \"x\" of 'n', "
            "expected Int (Expecting value: line 1 column 1 (char 0))",
        ),
    ],
)
def test_bad_msopgen_entries(entry: str, message: str) -> None:
    parsed = read_msopgen(f'[\n{entry},\n{{"op": "Good"}}]', where="add.json")
    assert [f"{s.where}: {s.why}" for s in parsed.skipped] == [message]
    assert [(p.name, p.where) for p in parsed.prototypes] == [("Good", "add.json:3")]


def test_a_file_that_is_not_json_raises() -> None:
    with pytest.raises(BadPrototype, match=r"add.json:2: found .*, expected JSON"):
        read_msopgen('[\n{"op" "A"}]', where="add.json")


def module(text: str, folder: pathlib.Path) -> types.ModuleType:
    path = folder / "generated.py"
    path.write_text(text)
    found = importlib.util.spec_from_file_location("generated", path)
    assert found is not None
    assert found.loader is not None
    generated = importlib.util.module_from_spec(found)
    found.loader.exec_module(generated)
    return generated


ODD = """
REG_OP(Slide).INPUT(x, DT_FLOAT).INPUT(dim, DT_INT64).OUTPUT(y, DT_FLOAT)
    .ATTR(eps, Float, 1e-12).REQUIRED_ATTR(from, Int).ATTR(dim, Int, -1).ATTR(to, Type, DT_HIFLOAT8)
    .ATTR(node_name, String, "a\\"\\\\").OP_END_FACTORY_REG(Slide)
REG_OP(Cut).INPUT(x, DT_FLOAT).DYNAMIC_OUTPUT(ys, DT_FLOAT).REQUIRED_ATTR(axis, Int)
    .OP_END_FACTORY_REG(Cut)
"""


def test_builders_have_the_names_and_the_order_that_callers_expect(tmp_path: pathlib.Path) -> None:
    text = generate(read_header(ODD, where="one.h").prototypes)
    assert text == generate(read_header(ODD, where="two.h").prototypes)
    generated = module(text, tmp_path)
    slide = inspect.signature(generated.Slide).parameters
    assert list(slide) == [
        "x",
        "dim",
        "from_changed_as_is_python_key",
        "eps",
        "dim_changed_as_duplicate_with_input",
        "to",
        "node_name_changed_as_is_reserved",
        "dependencies",
        "node_name",
    ]
    defaults = [p.default for p in slide.values() if p.default is not inspect.Parameter.empty]
    assert defaults == [1e-12, -1, "DT_HIFLOAT8", 'a"\\', (), None]
    assert list(inspect.signature(generated._Cut).parameters)[:3] == ["x", "size_of_ys", "axis"]
    assert read_header(generated.Slide.__doc__).prototypes == read_header(ODD).prototypes[:1]
    with pytest.raises(NotRegistered, match="ge::Slide is not registered"):
        generated.Slide(torch.ones(2), torch.ones(2), from_changed_as_is_python_key=1)


def test_two_builders_of_one_name_are_refused() -> None:
    cut = Prototype("Cut", outputs=(Port("y", "dynamic"),), where="a.h:1")
    with pytest.raises(BadPrototype, match=r"b.h:2: found a second builder '_Cut'"):
        generate([cut, Prototype("_Cut", where="b.h:2")])


def test_a_builder_calls_the_registered_op_and_names_its_node(tmp_path: pathlib.Path) -> None:
    library = torch.library.Library("ge", "FRAGMENT")
    library.define("Cut(Tensor x, *, int axis, int size_of_ys) -> Tensor[]")
    library.impl("Cut", lambda x, axis, size_of_ys: list(x.chunk(size_of_ys, axis)),
                 "CompositeImplicitAutograd")  # fmt: skip
    try:
        cut = module(generate(read_header(ODD).prototypes), tmp_path)._Cut
        assert [len(y) for y in cut(torch.ones(6), axis=0, size_of_ys=3)] == [2, 2, 2]
        with torch.fx.traceback.preserve_node_meta():
            graph = make_fx(lambda x: cut(x, axis=0, size_of_ys=2, node_name="mine"))(torch.ones(4))
        assert {"node_name": "mine"} in [node.meta.get("custom") for node in graph.graph.nodes]
        with pytest.raises(NotRegistered, match=r"Did you mean 'ge::Cut'\?"):
            build("Cutt", inputs={}, outputs=[], attrs={})
    finally:
        _torch.drop_library(library)


def test_dtypes_are_checked() -> None:
    gather = one(
        'REG_OP(Gather).INPUT(x, "T").DYNAMIC_INPUT(more, "T").OPTIONAL_INPUT(at, DT_INT64)'
        ".DATATYPE(T, TensorType({DT_BF16, DT_FLOAT})).OP_END_FACTORY_REG(Gather)"
    )
    f32, half, i64 = torch.ones(1), torch.ones(1).half(), torch.ones(1).long()
    assert check_dtypes(gather, [f32, [f32, f32], None]) is None
    assert check_dtypes(gather, {"x": f32.bfloat16(), "at": i64}) is None
    assert str(check_dtypes(gather, [half])) == (
        "Gather: input 'x' is DT_FLOAT16; allowed: DT_FLOAT, DT_BF16.\n"
        "Convert the input with .to(...), or widen the prototype."
    )
    error = check_dtypes(gather, [f32, [f32, f32.bfloat16()], i64])
    assert isinstance(error, WrongDtype)
    assert (error.name, error.allowed) == ("more", ("DT_FLOAT",))
    assert "('T' was bound by input 'x')" in str(error)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_a_dtype_is_named_by_any_of_its_spellings(name: str) -> None:
    dtype = DTYPES[name]
    assert dtype_name(name.lower()) == dtype_name(dtype.code) == name
    if dtype.torch is not None:
        assert dtype_name(dtype.torch) == dtype_name(str(dtype.torch)) == name


def test_a_big_header_loads_fast() -> None:
    wide = "TensorType({DT_FLOAT, DT_FLOAT16, DT_BF16, DT_INT8, DT_INT32, DT_INT64})"
    body = "".join(f"    .INPUT({letter}, {wide})\n" for letter in string.ascii_lowercase[:4])
    body += f'    .OUTPUT(y, {wide})\n    .ATTR(eps, Float, 1e-5)\n    .ATTR(mode, String, "a")\n'
    text = "".join(
        f"/** Op {i}. */\nREG_OP(Op{i})\n{body}    .OP_END_FACTORY_REG(Op{i})\n"
        for i in range(1700)
    )
    start = time.perf_counter()
    parsed = read_header(text)
    print(f"1,700 prototypes, {len(text) >> 10} KiB: {time.perf_counter() - start:.2f} s")
    assert len(parsed.prototypes) == 1700
