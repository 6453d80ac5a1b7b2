"""op-plugin files: keys, versions, expressions, kernels, gradients, the folder, bad input."""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
import warnings
from typing import Any

import process
import pytest
import torch
from click.testing import CliRunner

import torchgraft as graft
from torchgraft.cli import main
from torchgraft.errors import (
    BadFile,
    BadPrototype,
    Clash,
    KernelBuild,
    NoKernel,
    NoShapes,
    NotRegistered,
    UnsupportedFile,
    WrongDtype,
)
from torchgraft.op import plugin, register_kernel
from torchgraft.op.plugin.expression import Expression
from torchgraft.op.plugin.functions import read_functions
from torchgraft.op.plugin.native import functions_of, implementations

pytest.importorskip("tree_sitter_cpp")
pytest.importorskip("yaml")

NUMBERS = itertools.count()  # ops live as long as the process: every test has names of its own


@pytest.fixture
def name() -> str:
    return f"plug{next(NUMBERS)}"


def functions(text: str, version: str = "v2.7") -> Any:
    return read_functions(text, "functions.yaml", version)


def problem(text: str) -> str:
    (said,) = functions(text).problems
    return str(said)


def load(folder: pathlib.Path, **files: str) -> plugin.Loaded:
    paths = []
    for name, text in files.items():
        stem, _, suffix = name.rpartition("_")
        path = folder / f"{stem}.{suffix}"
        path.write_text(text)
        paths.append(path)
    plugin.build(paths, folder / "kept")
    return plugin.load(folder / "kept")


# --- Expressions ---


X = torch.ones(2, 3)
VALUES = {"x": X, "n": 3, "b": [2, 1], "m": None, "grads": [X, X * 2]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{4, x.size(0)}", [4, 2]),
        ("n > 2 ? x.sizes() : b", [2, 3]),
        ("n <= 2 ? x.sizes() : b", [2, 1]),
        ("x.scalar_type()", torch.float32),
        ("at::kHalf", torch.float16),
        ("at::ScalarType::Long", torch.int64),
        ("op_infer::broadcast_ops_npu_output_size(x, b)", [2, 3]),
        ("op_infer::reduce_ops_npu_output_size(x, 1, true)", [2, 1]),
        ("-7 / 2 + n * 2", 3),
        ("m.has_value() || n == 3 && !false", True),
        ("m.value_or(n)", 3),
        ("std::vector<int64_t>{1, n}", [1, 3]),
        ("c10::SmallVector<int64_t, 8>({1})", [1]),
        ("static_cast<int64_t>(n)", 3),
        ("b[1]", 1),
        ("x.dim() == 2", True),
    ],
)
def test_expressions(text: str, expected: Any) -> None:
    assert Expression(text).evaluate(VALUES) == expected


def test_expressions_call_operators_and_methods() -> None:
    assert torch.equal(Expression("mul(grads[1], n)").evaluate(VALUES), X * 6)
    assert torch.equal(Expression("std::get<0>(grads[1].max(1))").evaluate(VALUES), X[:, 0] * 2)
    assert Expression("f(x, grads[n]) + y").names == ("x", "grads", "n", "y")


@pytest.mark.parametrize("text", ["a +", "[&] { return 1; }()", "Foo(x)", "a->b", "new int", ""])
def test_what_is_no_expression_is_refused_when_it_is_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"expression|function|compiler"):
        Expression(text)


# --- The functions file ---


VERSIONS = """\
all_version: [v2.1, v2.5, v2.7, v2.10]
custom:
  - func: ver_all(Tensor x) -> Tensor
    op_api: all_version
  - func: ver_list(Tensor x) -> Tensor
    acl_op: v2.1, v2.5
  - func: ver_range(Tensor x) -> Tensor
    op_api: [v2.5, newest]
  - func: ver_bare(Tensor x) -> Tensor
"""


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("v2.1", ["ver_all", "ver_list", "ver_bare"]),
        ("v2.5", ["ver_all", "ver_list", "ver_range", "ver_bare"]),
        ("v2.10", ["ver_all", "ver_range", "ver_bare"]),
        ("v2.13", ["ver_all", "ver_range", "ver_bare"]),
    ],
)
def test_versions(version: str, names: list[str]) -> None:
    found = functions(VERSIONS, version)
    assert [entry.name for entry in found.entries] == names
    noted = "v2.13 is not among its versions: read as v2.10"
    assert [note.what for note in found.notes] == ([noted] if version == "v2.13" else [])


def test_files_for_older_versions_list_namespaces() -> None:
    text = "custom:\n- func: npu_old(Tensor x) -> Tensor\n  impl_ns: {}\n"
    assert functions(text.format("acl_op, op_api")).entries[0].kernels == ("op_api", "acl_op")
    found = functions(text.format("op_api"))
    assert (found.entries[0].kernels, found.problems) == (("op_api",), ())
    said = problem(text.format("op_apy"))
    assert said.startswith("functions.yaml:3: found 'op_apy', expected one of acl_op, op_api")


def test_every_key_is_read_and_what_has_no_effect_is_said() -> None:
    text = """\
official:
  - func: abs(Tensor self) -> Tensor
    acl_op: all_version
custom:
  - func: npu_all(Tensor self, Scalar alpha, *, Tensor? m=None) -> Tensor
    acl_op: all_version
    op_api: all_version
    dvm: all_version
    sparse: all_version
    exposed: all_version
    internal_format_opapi: all_version
    structured: True
    device_check: NoCheck
    dispatch: {CompositeExplicitAutograd: npu_other}
    tags: nondeterministic_seeded
    use_const_ref_for_mutable_tensors: True
    gen_opapi:
      out: {size: self, dtype: self, name: result}
      new_params: {half: alpha.toDouble() / 2}
      exec: aclnnAll, self, half, result
      cpu_scalar_h2d: [m]
      cpu_scalar_op: [{param: m, exec: aclnnAlls}]
      integral_identity_tensor: True
"""
    found = functions(text)
    assert not found.problems
    (entry,) = found.entries
    assert entry.gen is not None
    assert (entry.gen.kernel, [out.name for out in entry.gen.outs]) == ("aclnnAll", ["result"])
    assert [arg.text for arg in entry.gen.args] == ["self", "half", "result"]
    assert entry.dispatch == (("CompositeExplicitAutograd", "npu_other"),)
    assert entry.tags == ("nondeterministic_seeded",)
    noted = {note.what.split("'")[1] for note in found.notes if "'" in note.what}
    assert noted == {
        "dvm", "sparse", "internal_format_opapi", "structured", "device_check",
        "use_const_ref_for_mutable_tensors", "cpu_scalar_h2d", "cpu_scalar_op",
        "integral_identity_tensor",
    }  # fmt: skip
    assert ("abs", "functions.yaml:2") in [(note.name, note.where) for note in found.notes]


GEN = """\
- func: npu_f(Tensor x, int n) -> Tensor
  gen_opapi:
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("custom:\n  - func: npu_f(Tensor x) -> Tensor\n    op_apii: all_version\n",
         "functions.yaml:3: found unknown key 'op_apii', expected one of func, .*mean op_api"),
        ("custm: []\n", "functions.yaml:1: found unknown key 'custm', .*mean custom"),
        ("- func: npu_f(Tensr x -> Tensor\n", r"yaml:1: found npu_f\(Tensr x .* a schema"),
        ("- func: npu_f(Tensor x) -> Tensor\n  func: npu_g() -> ()\n", ":2: found 'func' twice"),
        ("- op_api: all_version\n", ":1: found an entry without 'func'"),
        ("- func: npu_f(Tensor x) -> Tensor\n  op_api: v2\n", ":2: found 'v2', expected a version"),
        ("- func: npu_f() -> ()\n- func: npu_f() -> ()\n", ":2: found a second npu_f"),
        ("a: [\n", "functions.yaml:2: found .* expected YAML"),
        (GEN + "    exec: aclnnF\n", "found no outputs, expected 1, as many as"),
        (GEN + "    out: {size: x}\n    exec: aclnnF\n", "found output 'out' without 'dtype'"),
        (GEN + "    out: {size: y, dtype: x}\n    exec: aclnnF\n", ":3: found unknown name 'y'"),
        (GEN + "    out: {size: x, dtype: x}\n    exec: aclnnF, z\n", ":4: found unknown name 'z'"),
        (GEN + "    out: {size: x, dtype: x}\n    exek: aclnnF\n", "'exek', .*mean exec"),
        (GEN + "    out0: {size: x, dtype: x}\n    out1: {size: x, dtype: x}\n    exec: aclnnF\n",
         "found 2 outputs, expected 1"),
        (GEN + "    structured_inherit: npu_q\n", "found 'npu_q'"),
        (GEN + "    exec: aclnnF\n  structured_delegate: npu_f.out\n",
         "gen_opapi and structured_delegate"),
    ],
)  # fmt: skip
def test_bad_entries_say_where(text: str, expected: str) -> None:
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError(problem(text))


def test_a_bad_entry_blocks_its_file(tmp_path: pathlib.Path, name: str) -> None:
    path = tmp_path / "functions.yaml"
    path.write_text(f"- func: {name}(Tensor x) -> Tensor\n- func: bad(\n")
    with pytest.raises(BadFile, match=r"1 entry cannot be read(.|\n)*functions.yaml:2"):
        plugin.build([path], tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
    built = plugin.build([path], tmp_path / "kept", keep_going=True)
    assert len(built.problems) == 1
    assert plugin.load(tmp_path / "kept").ops == (name,)


# --- Ops ---


def test_gen_opapi_runs_the_kernel_of_the_prototype(tmp_path: pathlib.Path, name: str) -> None:
    yaml = f"""\
- func: {name}(Tensor self, float alpha=2.0) -> Tensor
  gen_opapi:
    out: {{size: self, dtype: self}}
    exec: aclnn{name}, self, alpha
- func: {name}.out(Tensor self, float alpha=2.0, *, Tensor(a!) out) -> Tensor(a!)
  gen_opapi:
    structured_inherit: {name}
- func: {name}_pair(Tensor x, int n) -> (Tensor a, Tensor b)
  gen_opapi:
    a: {{size: '{{4, x.size(0)}}', dtype: x}}
    b: {{size: 'n > 2 ? x.sizes() : std::vector<int64_t>{{n}}', dtype: at::kLong}}
    exec: aclnn{name}Pair
"""
    spec = "TensorType({DT_FLOAT})"
    header = (
        f"REG_OP({name}).INPUT(x, {spec}).ATTR(alpha, Float, 1.0).OUTPUT(y, {spec})"
        f".OP_END_FACTORY_REG({name})\n"
    )
    derivatives = f"""\
backward:
  - name: {name}(Tensor self, float alpha=2.0) -> Tensor
    self: {name}(grad, alpha)
"""
    loaded = load(tmp_path, functions_yaml=yaml, derivatives_yaml=derivatives, ops_h=header)
    assert loaded.prototypes == (name,)
    op, x = getattr(torch.ops.npu, name), torch.arange(3.0)
    with pytest.raises(NoKernel, match=f"ge::{name}"):
        op(x)
    register_kernel(f"aclnn{name}", lambda x, *, alpha=1.0: x * alpha, "cpu")
    assert op(x, 3.0).tolist() == [0, 3, 6]
    out = torch.empty(0)
    assert getattr(torch.ops.npu, name).out(x, out=out) is out
    assert out.tolist() == [0, 2, 4]
    with pytest.raises(WrongDtype):
        op(x.double())
    leaf = x.clone().requires_grad_()
    op(leaf, 5.0).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [5, 5, 5]
    compiled = torch.compile(lambda x: op(x, 3.0) + 1, backend="aot_eager", dynamic=True)
    assert compiled(x).tolist() == [1, 4, 7]
    a, b = getattr(torch.ops.npu, f"{name}_pair")(x.to("meta"), 2)
    assert (a.shape, a.dtype, b.shape, b.dtype) == ((4, 3), torch.float32, (2,), torch.int64)
    with pytest.raises(NotRegistered, match=f"ge::{name}Pair"):
        getattr(torch.ops.npu, f"{name}_pair")(x, 2)
    assert plugin.load(tmp_path / "kept") == loaded  # a second time changes nothing


def test_companions_are_found_beside_the_functions(tmp_path: pathlib.Path, name: str) -> None:
    lines = [f"- func: {one}(Tensor x) -> Tensor" for one in (name, f"{name}_new", f"{name}_in")]
    (tmp_path / "functions.yaml").write_text("\n".join([*lines, "  exposed: v1.11", ""]))
    old = f"deprecated:\n  - name: {name}\n    replace: torch.relu\n  - name: npu_gone\n"
    (tmp_path / "deprecated.yaml").write_text(old)
    atb = "functions:\n  - {cpp_name: 'native::atb::x', impl_name: 'atb::x'}\n"
    (tmp_path / "atb_ops.yaml").write_text(atb)
    built = plugin.build([tmp_path / "functions.yaml"], tmp_path / "kept")
    said = [f"{note.name}: {note.what}" for note in built.notes]
    assert "npu_gone: is deprecated, and is not among these operators" in said
    assert any(text.startswith("atb::x: is native::atb::x of the ATB library") for text in said)
    assert set(graft.load_ops(tmp_path / "kept").ops) == {name, f"{name}_new", f"{name}_in"}
    found = plugin.functions()
    assert {name, f"{name}_new"} <= found.keys()
    assert f"{name}_in" not in found
    for one in (name, f"{name}_new"):
        graft.op(f"npu::{one}")(relu)
    with pytest.warns(FutureWarning, match=f"npu::{name} is deprecated; use torch.relu"):
        assert found[name](-torch.ones(2)).tolist() == [0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found[name](torch.ones(2))
        found[f"{name}_new"](torch.ones(2))


def relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("deprecated", "deprecated:\n  - replace: x\n", ":2: found an entry without 'name'"),
        ("deprecated", "deprecated:\n  - nam: x\n", ":2: found unknown key 'nam'"),
        ("deprecated", "other: []\n", ":1: found unknown key 'other'"),
        ("atb_ops", "functions:\n  - cpp_name: x\n", ":2: found an entry of one name"),
    ],
)
def test_bad_companions(tmp_path: pathlib.Path, file: str, text: str, expected: str) -> None:
    (tmp_path / f"{file}.yaml").write_text(text)
    with pytest.raises(BadFile) as info:
        plugin.build([tmp_path / f"{file}.yaml"], tmp_path / "kept")
    assert f"{file}.yaml{expected}" in str(info.value)


def test_an_entry_without_a_kernel_says_what_to_write(tmp_path: pathlib.Path, name: str) -> None:
    load(tmp_path, functions_yaml=f"- func: {name}(Tensor x, Tensor y) -> Tensor\n")
    op, x = getattr(torch.ops.npu, name), torch.ones(2)
    with pytest.raises(NoKernel, match=rf"npu::{name} .*functions.yaml:1. has no kernel"):
        op(x, x)
    with pytest.raises(NoShapes):
        op(x.to("meta"), x.to("meta"))
    # As the meta function of an op-plugin project is written.
    torch.library.impl(f"npu::{name}", "Meta", lambda x, y: torch.empty_like(x))
    torch.library.impl(f"npu::{name}", "CPU", lambda x, y: x + y)
    assert torch.compile(op, backend="aot_eager")(x, x).tolist() == [2, 2]


def test_two_files_that_differ_clash(tmp_path: pathlib.Path, name: str) -> None:
    load(tmp_path, functions_yaml=f"- func: {name}(Tensor x) -> Tensor\n")
    with pytest.raises(Clash, match=r"functions.yaml:1:(.|\n)*others.yaml:1:"):
        load(tmp_path, others_yaml=f"- func: {name}(Tensor x, int n) -> Tensor\n")


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("x: grad * yy", "unknown name 'yy'"),
        ("z: grad", "unknown argument 'z'"),
        ("x: grad *", "no C\\+\\+ expression"),
    ],
)
def test_bad_derivatives(tmp_path: pathlib.Path, name: str, formula: str, expected: str) -> None:
    schema = f"{name}(Tensor x, Tensor y) -> Tensor"
    (tmp_path / "functions.yaml").write_text(f"- func: {schema}\n")
    (tmp_path / "derivatives.yaml").write_text(f"backward:\n- name: {schema}\n  {formula}\n")
    with pytest.raises(BadFile, match=rf"derivatives.yaml:3: found .*{expected}"):
        plugin.build([tmp_path / "functions.yaml"], tmp_path / "kept")


def test_several_gradients_of_one_formula(tmp_path: pathlib.Path, name: str) -> None:
    schema = f"{name}(Tensor x, Tensor y, *, float k) -> (Tensor a, Tensor b)"
    back = f"{name}_backward(Tensor ga, Tensor gb, Tensor a, float k) -> (Tensor, Tensor)"
    derivatives = f"- name: {schema}\n  x, y: {name}_backward(grads[0], grad_b, a, k)\n"
    load(
        tmp_path,
        functions_yaml=f"- func: {schema}\n- func: {back}\n",
        derivatives_yaml=derivatives,
    )
    torch.library.impl(f"npu::{name}", "CPU", lambda x, y, *, k: (x * k, y + 1))
    impl = torch.library.impl
    impl(f"npu::{name}_backward", "CPU", lambda ga, gb, a, k: (ga * k, gb * a))
    x, y = (torch.full((2,), v, requires_grad=True) for v in (3.0, 4.0))
    a, b = getattr(torch.ops.npu, name)(x, y, k=2.0)
    (a + b * 10).sum().backward()
    assert (x.grad.tolist(), y.grad.tolist()) == ([2, 2], [60, 60])  # type: ignore[union-attr]


# --- C++ ---


def test_functions_and_what_they_implement() -> None:
    source = b"""
        namespace op_api { namespace { int hidden() { return 1; } }
        at::Tensor& f_out(const at::Tensor& x, at::Tensor& out) { return out; }
        at::Tensor f(const at::Tensor& x) { return x; }
        std::tuple<at::Tensor, at::Tensor> g(int x); }
        at::Tensor acl_op::h(int x) { return {}; }
    """
    assert functions_of(source) == {"op_api::f_out", "op_api::f", "acl_op::h"}
    text = (
        "- func: f(Tensor x) -> Tensor\n- func: f.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)\n"
        "- func: other(int x) -> Tensor\n  dispatch: {CPU: h}\n"
    )
    made = implementations({"k.cpp": source}, functions(text).entries)["k.cpp"]
    assert [(one.op, one.function) for one in made] == [
        ("f", "op_api::f"), ("f.out", "op_api::f_out"), ("other", "acl_op::h"),
    ]  # fmt: skip
    text = "- func: f(Tensor x) -> Tensor\n- func: f.two(Tensor x, Tensor y) -> Tensor\n"
    with pytest.raises(BadPrototype, match=r"op_api::f for f\.two and for f"):
        implementations({"k.cpp": source}, functions(text).entries)


KERNEL = """\
#include "op_plugin/OpApiInterface.h"
#include "op_plugin/utils/op_api_common.h"
#include "scale.h"

namespace op_api {
using npu_preparation = at_npu::native::OpPreparation;

at::Tensor plug_cpp(const at::Tensor& x, const at::Tensor& y, const at::Scalar& alpha) {
  at::Tensor result = npu_preparation::apply_tensor_without_format(x);
  EXEC_NPU_CMD(aclnnPlugCpp, x, y, alpha, result);
  return result * SCALE;
}
}  // namespace op_api
"""
DEVICE = """\
#include <ATen/ATen.h>
#include <torch/library.h>

static at::Tensor add(const at::Tensor& x, const at::Tensor& y, double alpha) {
  return x + y * alpha;
}
TORCH_LIBRARY_IMPL(ge, CPU, m) { m.impl("PlugCpp", &add); }
"""
HEADER = """\
REG_OP(PlugCpp)
    .INPUT(x, TensorType({DT_FLOAT})).INPUT(y, TensorType::ALL())
    .REQUIRED_ATTR(alpha, Float)
    .OUTPUT(z, TensorType::ALL())
    .OP_END_FACTORY_REG(PlugCpp)
"""


@pytest.mark.slow
def test_a_project_is_built_kept_and_loaded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "functions.yaml": "- func: plug_cpp(Tensor x, Tensor y, Scalar alpha) -> Tensor\n",
        "kernel.cpp": KERNEL,
        "device.cc": DEVICE,
        "ops.h": HEADER,
    }
    for file, text in files.items():
        pathlib.Path(file).write_text(text)
    pathlib.Path("scale.h").write_text("#define SCALE 1\n")
    run = CliRunner()
    made = run.invoke(main, ["op-plugin", *files])
    assert made.exit_code == 0, made.output
    assert made.stdout == (
        "compiled kernel.cpp\ncompiled device.cc\n.torchgraft: 1 operators, 1 prototypes\n"
    )
    x = torch.ones(2)
    assert torch.ops.npu.plug_cpp(x, x, 2).tolist() == [3, 3]
    assert torch.ops.npu.plug_cpp(x.to("meta"), x.to("meta"), 2).shape == (2,)
    with pytest.raises(WrongDtype, match="PlugCpp: input 'x' is DT_DOUBLE; allowed: DT_FLOAT"):
        torch.ops.npu.plug_cpp(x.double(), x, 2)
    again = json.loads(run.invoke(main, ["op-plugin", *files, "--json"]).stdout)
    assert (again["compiled"], again["kept"]) == ([], ["kernel.cpp", "device.cc"])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "script.py").write_text(
        "import torch, torch_npu\nx = torch.ones(2)\nprint(torch_npu.plug_cpp(x, x, 2).tolist())\n"
    )
    kept = [sys.executable, "-m", "torchgraft", "run", "--ops", str(tmp_path / ".torchgraft")]
    done = process.run([*kept, "script.py"], cwd=elsewhere)
    assert done.stdout == "[3.0, 3.0]\n", done.stderr

    pathlib.Path("scale.h").write_text("#define SCALE oops\n")
    bad = run.invoke(main, ["op-plugin", *files])
    assert bad.exit_code == 1
    first = bad.stderr.splitlines()
    assert first[0].startswith("Error: kernel of operator")
    assert "scale.h:1: " in first[1]
    assert "oops" in first[1]
    assert len(first) == 3  # and where the log is
    built = plugin.build([pathlib.Path("device.cc")], "other")
    assert built.compiled == ("device.cc",)


@pytest.mark.slow
def test_a_kernel_that_does_not_fit_its_schema(tmp_path: pathlib.Path) -> None:
    (tmp_path / "functions.yaml").write_text("- func: plug_unfit(Tensor x, int n) -> Tensor\n")
    kernel = tmp_path / "kernel.cpp"
    kernel.write_text(
        "#include <ATen/ATen.h>\n"
        "namespace op_api { at::Tensor plug_unfit(const at::Tensor& x) { return x; } }\n"
    )
    plugin.build([tmp_path / "functions.yaml", kernel], tmp_path / "kept")
    with pytest.raises(KernelBuild, match="plug_unfit"):
        plugin.load(tmp_path / "kept")


# --- The folder ---


def test_the_folder_is_checked_before_it_is_loaded(tmp_path: pathlib.Path, name: str) -> None:
    home = tmp_path / "kept"
    with pytest.raises(UnsupportedFile, match=r"no manifest\.json"):
        plugin.load(home)
    load(tmp_path, functions_yaml=f"- func: {name}(Tensor x) -> Tensor\n")
    (kept,) = (home / "files").iterdir()
    kept.write_text(f"- func: {name}_other(Tensor x) -> Tensor\n")
    with pytest.raises(UnsupportedFile, match="its hash differs"):
        plugin.load(home)
    manifest = json.loads((home / "manifest.json").read_text())
    manifest["functions"][0]["file"] = "../functions.yaml"
    (home / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UnsupportedFile, match="outside of the folder"):
        plugin.load(home)
    (home / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(UnsupportedFile, match="format is not 3"):
        plugin.load(home)


def test_a_kernel_in_python_is_kept_and_loaded_elsewhere(tmp_path: pathlib.Path) -> None:
    """Those of an NPU's own language have a stand-in that is as short as what they compute."""
    (tmp_path / "plug.h").write_text(
        "REG_OP(PlugInPython).INPUT(x, TensorType::ALL()).INPUT(y, TensorType::ALL())"
        ".OUTPUT(z, TensorType::ALL()).OP_END_FACTORY_REG(PlugInPython)"
    )
    kernel = tmp_path / "plug.py"
    kernel.write_text(
        "import torchgraft as graft\nfrom torch import Tensor\n\n\n"
        "@graft.op('ge::PlugInPython')\ndef plug(x: Tensor, y: Tensor) -> Tensor:\n"
        "    return x - y\n"
    )
    plugin.build([tmp_path / "plug.h", kernel], tmp_path / "kept")
    kernel.unlink()
    script = (
        f"import torch, torchgraft as graft\ngraft.load_ops({str(tmp_path / 'kept')!r})\n"
        f"graft.load_ops({str(tmp_path / 'kept')!r})\n"
        "print(torch.ops.ge.PlugInPython(torch.tensor(5), torch.tensor(2)).item())"
    )
    done = process.run([sys.executable, "-c", script])
    assert done.stdout.strip() == "3", done.stderr


def test_a_file_of_no_known_kind(tmp_path: pathlib.Path) -> None:
    (tmp_path / "kernel.cu").write_text("")
    with pytest.raises(UnsupportedFile, match=r"\.cu is none of the kinds"):
        plugin.build([tmp_path / "kernel.cu"], tmp_path / "kept")
