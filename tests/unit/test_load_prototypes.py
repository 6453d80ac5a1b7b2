"""`graft.load_prototypes`: schemas, dtypes at call time, kernels from anywhere, bad files."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import torchgraft as graft
from torchgraft import _torch
from torchgraft.errors import (
    BadCall,
    BadFile,
    BadValue,
    Clash,
    NoKernel,
    NoShapes,
    NotRegistered,
    UnknownName,
    WrongDtype,
)
from torchgraft.op import execute, find_kernel, register_kernel
from torchgraft.op.build import build
from torchgraft.op.declare import TABLE, schema
from torchgraft.op.header import read_header

pytest.importorskip("tree_sitter_cpp")

NUMBERS = itertools.count()  # ops live as long as the process: every test has names of its own


@pytest.fixture
def name() -> str:
    return f"Load{next(NUMBERS)}"


def load(folder: pathlib.Path, text: str, file: str = "ops.h", **options: Any) -> Any:
    path = folder / file
    path.write_text(text)
    return graft.load_prototypes(path, **options)


def entry(name: str, chain: str) -> str:
    return f"REG_OP({name}){chain}.OP_END_FACTORY_REG({name})\n"


ADD = ".INPUT(x, TensorType({DT_FLOAT, DT_INT8})).INPUT(y, ALL()).OUTPUT(z, ALL())"


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        (ADD, "(Tensor x, Tensor y) -> Tensor"),
        (
            ".INPUT(x, ALL()).OPTIONAL_INPUT(m, ALL()).DYNAMIC_INPUT(xs, ALL())",
            "(Tensor x, Tensor? m, Tensor[] xs) -> ()",
        ),
        (
            ".INPUT(x, ALL()).OPTIONAL_INPUT(m, ALL()).OPTIONAL_INPUT(n, ALL()).OUTPUT(y, ALL())",
            "(Tensor x, Tensor? m=None, Tensor? n=None) -> Tensor",
        ),
        (
            ".INPUT(x, ALL()).OUTPUT(y, ALL()).DYNAMIC_OUTPUT(ys, ALL()).REQUIRED_ATTR(n, Int)",
            "(Tensor x, *, int size_of_ys, int n) -> (Tensor, Tensor[])",
        ),
        (
            ".INPUT(v, ALL()).INPUT(g, ALL()).OUTPUT(v, ALL()).OUTPUT(y, ALL())",
            "(Tensor(a!) v, Tensor g) -> Tensor",
        ),
        (
            ".ATTR(a, Float, 1e-12).REQUIRED_ATTR(b, ListInt).ATTR(c, String, 'x')"
            ".ATTR(d, Type, DT_INT8)".replace("'", '"'),
            '(*, float a=1e-12, int[] b, str c="x", str d="DT_INT8") -> ()',
        ),
        (".INPUT(x, ALL()).ATTR(x, Int, 1)", "(Tensor x, *, int {}=1) -> ()"),
        (".ATTR(a, Float, INFINITY).ATTR(b, ListBool, {true})", "(*, float? a=None, bool[]? b"),
    ],
)  # fmt: skip
def test_schemas(chain: str, expected: str) -> None:
    chain = chain.replace("ALL()", "TensorType::ALL()")
    (prototype,) = read_header(entry("P", chain)).prototypes
    expected = expected.format("x_changed_as_duplicate_with_input")
    text = schema(prototype)
    assert text.startswith(f"P{expected}")
    _torch.parse_schema(text)


def test_a_loaded_op_runs_its_kernel_and_checks_dtypes(tmp_path: pathlib.Path, name: str) -> None:
    parsed = load(tmp_path, entry(name, ADD))
    assert [one.name for one in parsed.prototypes] == [name]
    register_kernel(name, lambda x, y: x + y, "cpu")
    op = getattr(torch.ops.ge, name)
    x = torch.ones(3)
    assert op(x, x).tolist() == [2, 2, 2]
    with pytest.raises(WrongDtype) as caught:
        op(x.double(), x)
    assert str(caught.value) == (
        f"{name}: input 'x' is DT_DOUBLE; allowed: DT_FLOAT, DT_INT8.\n"
        "Convert the input with .to(...), or widen the prototype."
    )
    with pytest.raises(WrongDtype, match="input 'x' is DT_BOOL"):
        op(y=x, x=x.bool())


def test_dtypes_of_optional_and_list_inputs_and_symbols(tmp_path: pathlib.Path, name: str) -> None:
    chain = (
        '.INPUT(x, "T").OPTIONAL_INPUT(m, DT_BOOL).DYNAMIC_INPUT(xs, "T").OUTPUT(y, "T")'
        ".DATATYPE(T, TensorType::FloatingDataType())"
    )
    load(tmp_path, entry(name, chain))
    register_kernel(name, lambda x, m, xs: x + sum(xs), "cpu")
    op, x = getattr(torch.ops.ge, name), torch.ones(2)
    assert op(x, None, [x, x]).tolist() == [3, 3]
    for args in ((x, x, []), (x, None, [x, x.double()]), (x.int(), None, [])):
        with pytest.raises(WrongDtype):
            op(*args)


def test_exact_defaults_reach_the_kernel(tmp_path: pathlib.Path, name: str) -> None:
    chain = (
        ".INPUT(x, TensorType::ALL()).OUTPUT(y, TensorType::ALL())"
        ".ATTR(eps, Float, 1e-12).ATTR(top, Float, INFINITY).ATTR(low, Float, -INFINITY)"
        ".ATTR(pads, ListListInt, {{1, 2}, {3}}).ATTR(on, ListBool, {true})"
        '.ATTR(s, String, "a\\"b")'
        ".ATTR(most, Int, INT64_MIN).ATTR(t, Tensor, Tensor())"
    )
    load(tmp_path, entry(name, chain))
    seen: dict[str, Any] = {}

    def kernel(x: Tensor, **attrs: Any) -> Tensor:
        seen.update(attrs)
        return x.clone()

    register_kernel(name, kernel, "cpu")
    op = getattr(torch.ops.ge, name)
    op(torch.ones(1))
    # Torch leaves out what is at its default in the schema; the schema has it.
    defaults = {arg.name: arg.default_value for arg in op.default._schema.arguments}
    values = {key: seen.get(key, defaults[key]) for key in defaults if key != "x"}
    assert values == {
        "eps": 1e-12, "top": math.inf, "low": -math.inf, "pads": [[1, 2], [3]], "on": [True],
        "s": 'a"b', "most": -(2**63), "t": None,
    }  # fmt: skip
    op(torch.ones(1), pads=[[7]], top=1.5)
    assert (seen["pads"], seen["top"]) == ([[7]], 1.5)


def test_no_kernel_says_what_to_write(tmp_path: pathlib.Path, name: str) -> None:
    load(tmp_path, entry(name, ADD))
    x = torch.ones(1)
    with pytest.raises(NoKernel) as caught:
        getattr(torch.ops.ge, name)(x, x)
    assert str(caught.value) == (
        f"ge::{name} ({tmp_path}/ops.h:1) has no kernel for cpu.\n"
        f"Write one in Python:\n"
        f"  @graft.op('ge::{name}(Tensor x, Tensor y) -> Tensor')\n"
        f"  def {name}(x, y): ...\n"
        f'or in C++: TORCH_LIBRARY_IMPL(ge, CPU, m) {{ m.impl("{name}", &kernel); }}'
    )
    register_kernel(name, lambda x, y: x, "cuda")
    with pytest.raises(NoKernel, match="has no kernel for cpu; it has one for cuda"):
        getattr(torch.ops.ge, name)(x, x)


def test_an_op_traces_when_its_shapes_are_known(tmp_path: pathlib.Path, name: str) -> None:
    load(tmp_path, entry(name, ADD))
    op, x = getattr(torch.ops.ge, name), torch.ones(3)
    with pytest.raises(NoShapes, match=rf"ge::{name} .* cannot be traced"):
        make_fx(op, tracing_mode="fake")(x, x)
    with pytest.raises(NoShapes):
        op(x.to("meta"), x.to("meta"))
    torch.library.register_fake(f"ge::{name}", lambda x, y: torch.empty_like(x))
    graph = make_fx(op, tracing_mode="fake")(x, x)  # and still no kernel
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [op.default]
    register_kernel(name, lambda x, y: x + y, "cpu")
    compiled = torch.compile(lambda x: op(x, x) * 2, backend="torchgraft", fullgraph=True)
    assert compiled(x).tolist() == [4, 4, 4]
    with pytest.raises(WrongDtype):
        compiled(x.double())


def test_a_body_for_every_device_runs_on_fakes_too(tmp_path: pathlib.Path, name: str) -> None:
    register_kernel(name, lambda x, y: x + y)
    load(tmp_path, entry(name, ADD))
    op, x = getattr(torch.ops.ge, name), torch.ones(3)
    assert op(x, x).tolist() == [2, 2, 2]
    assert op(x.to("meta"), x.to("meta")).shape == (3,)


@pytest.mark.parametrize("first", ["kernel", "prototype"])
def test_kernel_and_prototype_come_in_either_order(
    tmp_path: pathlib.Path, name: str, first: str
) -> None:
    steps = [
        lambda: register_kernel(f"ge::{name}", lambda x, y: x * y, "cpu"),
        lambda: load(tmp_path, entry(name, ADD)),
    ]
    for step in steps if first == "kernel" else reversed(steps):
        step()
    x = torch.full((2,), 3.0)
    assert find_kernel(name) is find_kernel(f"aclnn{name}") is find_kernel(f"ge::{name}")
    assert find_kernel(f"aclnn{name}")(x, x).tolist() == [9, 9]
    with pytest.raises(WrongDtype):
        find_kernel(name)(x.double(), x)


def test_an_op_that_is_there_already_takes_the_prototype(tmp_path: pathlib.Path, name: str) -> None:
    lower = f"ge::{name}"
    torch.library.define(lower, "(Tensor x, Tensor y, float alpha=1.0) -> Tensor")
    torch.library.impl(lower, "cpu", lambda x, y, alpha=1.0: x + alpha * y)
    load(tmp_path, entry(name, ADD + ".ATTR(alpha, Float, 1.0)"))
    x = torch.ones(1)
    assert getattr(torch.ops.ge, name)(x, x, alpha=2.0).item() == 3
    with pytest.raises(WrongDtype):
        getattr(torch.ops.ge, name)(x.double(), x)
    other = f"{name}Other"
    torch.library.define(f"ge::{other}", "(Tensor x) -> Tensor")
    with pytest.raises(Clash, match=r"loaded before:\n.*Tensor x\) -> Tensor"):
        load(tmp_path, entry(other, ADD))


def test_asking_for_what_is_not_there_suggests(tmp_path: pathlib.Path, name: str) -> None:
    load(tmp_path, entry(f"{name}AddCustom", ADD))
    with pytest.raises(NotRegistered, match=rf"Did you mean 'ge::{name}AddCustom'"):
        find_kernel(f"aclnn{name}AdCustom")


def test_written_inputs(tmp_path: pathlib.Path, name: str) -> None:
    chain = ".INPUT(v, ALL()).INPUT(g, ALL()).OUTPUT(v, ALL()).OUTPUT(y, ALL())"
    load(tmp_path, entry(name, chain.replace("ALL()", "TensorType::ALL()")))

    def kernel(v: Tensor, g: Tensor) -> Tensor:
        v.add_(g)
        return g * 2

    register_kernel(name, kernel, "cpu")
    v, g = torch.zeros(2), torch.ones(2)
    out, y = build(name, inputs={"v": v, "g": g}, outputs=["v", "y"], attrs={})
    assert out is v
    assert (v.tolist(), y.tolist()) == ([1, 1], [2, 2])
    torch.library.register_fake(f"ge::{name}", lambda v, g: torch.empty_like(g))
    op = getattr(torch.ops.ge, name)

    def fn(v: Tensor, g: Tensor) -> Tensor:
        return op(v, g) + v

    v = torch.zeros(2)
    assert torch.compile(fn, backend="aot_eager", fullgraph=True)(v, g).tolist() == [3, 3]
    assert v.tolist() == [1, 1]


def test_a_wrong_attribute_suggests_the_nearest(tmp_path: pathlib.Path, name: str) -> None:
    load(tmp_path, entry(name, ADD + ".ATTR(radius, Int, 3)"))
    x = torch.ones(1)
    with pytest.raises(UnknownName) as caught:
        build(name, inputs={"x": x, "y": x}, outputs=["z"], attrs={"radus": 1})
    assert f"{tmp_path}/ops.h:1: unknown attribute of ge::{name} 'radus'" in str(caught.value)
    assert "Did you mean 'radius'?" in str(caught.value)


def test_the_call_of_eager_code(tmp_path: pathlib.Path, name: str) -> None:
    load(tmp_path, entry(name, ADD + ".ATTR(alpha, Float, 1.0).REQUIRED_ATTR(beta, Int)"))
    register_kernel(name, lambda x, y, *, beta, alpha=1.0: x + alpha * y + beta, "cpu")
    x, out = torch.ones(2), torch.empty(2)
    assert execute(f"aclnn{name}", x, x, 2.0, 10, out) is out
    assert out.tolist() == [13, 13]
    assert execute(f"aclnn{name}", x, x, 2.0, 10).tolist() == [13, 13]
    with pytest.raises(BadCall, match=r"with 2 arguments.\nPass x, y, alpha, beta, z, in this"):
        execute(f"aclnn{name}", x, x)
    with pytest.raises(BadValue, match=r"output 'z'"):
        execute(f"aclnn{name}", x, x, 2.0, 10, torch.empty(3))


# --- Files ---


def test_a_malformed_entry_blocks_its_file(tmp_path: pathlib.Path, name: str) -> None:
    good, bad = entry(f"{name}Good", ADD), entry(f"{name}Bad", ".INPUTT(x, ALL())")
    with pytest.raises(BadFile) as caught:
        load(tmp_path, good + bad)
    assert str(caught.value).startswith(
        f"{tmp_path}/ops.h: 1 entry cannot be read, so nothing was registered.\n"
        f"  {tmp_path}/ops.h:2: {name}Bad: found .INPUTT, expected one of INPUT, "
    )
    assert str(caught.value).endswith("or register the others with keep_going=True.")
    with pytest.raises(NotRegistered):
        find_kernel(f"{name}Good")
    parsed = load(tmp_path, good + bad, keep_going=True)
    assert [one.where for one in parsed.skipped] == [f"{tmp_path}/ops.h:2"]
    assert find_kernel(f"{name}Good")


def test_what_no_op_can_be_is_skipped_with_its_line(tmp_path: pathlib.Path, name: str) -> None:
    text = entry(f"{name}If", ".GRAPH(body)") + entry(name, ADD)
    text += entry(f"{name}Odd", ".REQUIRED_ATTR(f, NamedAttrs)")
    text += entry(f"{name}Word", ".ATTR(lambda, Float, 1.0).REQUIRED_ATTR(class, Int)")
    parsed = load(tmp_path, text)
    assert [one.name for one in parsed.prototypes] == [name]
    graph, odd, word = parsed.skipped
    assert word.where == f"{tmp_path}/ops.h:4"
    assert word.why == "found the name 'class', which no argument of a torch operator can have"
    assert (graph.where, graph.malformed) == (f"{tmp_path}/ops.h:1", False)
    assert (odd.where, odd.malformed) == (f"{tmp_path}/ops.h:3", False)
    assert odd.why == "found attribute 'f' of NamedAttrs, which no torch type can hold"


def test_declared_twice(tmp_path: pathlib.Path, name: str) -> None:
    load(tmp_path, entry(name, ADD))
    load(tmp_path, "\n\n" + entry(name, ADD), "again.h")
    assert len(load(tmp_path, entry(name, ADD), "nan.h").prototypes) == 1
    with pytest.raises(Clash) as caught:
        load(tmp_path, entry(name + "New", ADD) + entry(name, ADD + ".ATTR(a, Int, 1)"), "other.h")
    said = str(caught.value)
    assert f"{tmp_path}/ops.h:1:" in said
    assert f"{tmp_path}/other.h:2:" in said
    assert ".ATTR(a, Int, 1)" in said
    with pytest.raises(NotRegistered):
        find_kernel(name + "New")


def test_a_default_of_nan_equals_itself(tmp_path: pathlib.Path, name: str) -> None:
    for _ in range(2):
        load(tmp_path, entry(name, ".ATTR(a, Float, NAN)"))


def test_json_loads_too(tmp_path: pathlib.Path, name: str) -> None:
    port = {"param_type": "required", "type": ["fp16", "float"]}
    item = {
        "op": name,
        "input_desc": [{"name": "x", **port}],
        "output_desc": [{"name": "y", **port}],
        "attr": [{"name": "eps", "type": "float", "default_value": "1e-12"}],
    }
    load(tmp_path, json.dumps([item]), "ops.json")
    register_kernel(name, lambda x, eps=0.0: x.clone(), "cpu")
    op = getattr(torch.ops.ge, name)
    assert op.default._schema.arguments[1].default_value == 1e-12
    with pytest.raises(WrongDtype, match="DT_INT8; allowed: DT_FLOAT, DT_FLOAT16"):
        op(torch.ones(1, dtype=torch.int8))


# --- With graft.op ---


@pytest.mark.parametrize("first", ["op", "prototype"])
def test_an_op_is_the_kernel_of_a_prototype(tmp_path: pathlib.Path, name: str, first: str) -> None:
    made: list[graft.Op] = []

    def declare() -> None:
        @graft.op(f"ge::{name}")
        def body(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
            return x + alpha * y

        made.append(body)

    steps = [declare, lambda: load(tmp_path, entry(name, ADD + ".ATTR(alpha, Float, 1.0)"))]
    for step in steps if first == "op" else reversed(steps):
        step()
    (op,), x = made, torch.ones(2)
    assert find_kernel(f"aclnn{name}")(x, x, alpha=3.0).tolist() == [4, 4]
    assert build(name, inputs={"x": x, "y": x}, outputs=["z"], attrs={}).tolist() == [2, 2]
    with pytest.raises(WrongDtype):
        find_kernel(name)(x.double(), x)
    with pytest.raises(WrongDtype):
        op(x.double(), x)
    leaf = x.clone().requires_grad_()
    op(x, leaf, alpha=5.0).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [5, 5]
    run = torch.compile(lambda x: op(x, x) * 2, backend="torchgraft", fullgraph=True)
    assert run(x).tolist() == [4, 4]

    @op.kernel("cpu")
    def _(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        return x + alpha * y + 100

    assert execute(f"aclnn{name}", x, x, 1.0).tolist() == [102, 102]


def test_an_op_that_differs_from_its_prototype(tmp_path: pathlib.Path, name: str) -> None:
    load(tmp_path, entry(name, ADD))
    with pytest.raises(Clash, match=rf"{tmp_path}/ops.h:1:(.|\n)*test_load_prototypes.py:\d+:"):

        @graft.op(f"ge::{name}")
        def body(x: Tensor) -> Tensor:
            return x.clone()


def test_an_op_that_is_taken_back_leaves_the_prototype(tmp_path: pathlib.Path, name: str) -> None:
    load(tmp_path, entry(name, ADD))
    x = torch.ones(2)
    for _ in range(2):
        with graft.Registry():

            @graft.op(f"ge::{name}")
            def body(x: Tensor, y: Tensor) -> Tensor:
                return x + y

            assert find_kernel(name)(x, x).tolist() == [2, 2]
        with pytest.raises(NoKernel):
            find_kernel(name)(x, x)


@pytest.mark.slow
def test_dtypes_are_checked_in_cpp_for_a_kernel_in_cpp(tmp_path: pathlib.Path, name: str) -> None:
    chain = (
        f"REG_OP({name}).INPUT(x, TensorType({{DT_FLOAT, DT_INT64}}))"
        ".OPTIONAL_INPUT(y, TensorType({DT_BOOL})).DYNAMIC_INPUT(zs, TensorType({DT_BF16}))"
        f".OUTPUT(w, TensorType::ALL()).OP_END_FACTORY_REG({name})"
    )
    (tmp_path / "ops.h").write_text(chain)
    graft.load_prototypes(tmp_path / "ops.h")
    op = graft.op(f"ge::{name}(Tensor x, Tensor? y, Tensor[] zs) -> Tensor")(lambda x, y, zs: x + 1)
    arguments = "const at::Tensor& x, const std::optional<at::Tensor>& y, at::TensorList zs"
    op.kernel("cpu", cpp=f"at::Tensor {name}({arguments}) {{ return x + 1; }}")
    x, half = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)

    def tried() -> None:
        assert op(x, None, []).tolist() == op(x.long(), x.bool(), [half, half]).tolist() == [2, 2]
        for wrong, said in (
            ((x.int(), None, []), "input 'x' is DT_INT32; allowed: DT_FLOAT, DT_INT64"),
            ((x, x, []), "input 'y' is DT_FLOAT; allowed: DT_BOOL"),
            ((x, None, [half, x]), "DT_FLOAT; allowed: DT_BF16"),
        ):
            with pytest.raises(WrongDtype, match=said):
                op(*wrong)

    tried()  # in Python where nothing was compiled on this machine before
    op.build()
    tried()
    assert name not in TABLE._guards
