"""The C++ part, built once: layers against torch, examples, the runtime, soak and fuzz."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import process
import pytest
import torch
from layers import LAYERS, REFUSALS, inputs
from torch import Tensor

import torchgraft as graft
from torchgraft.native import bridge, driver
from torchgraft.passes import registry

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
OWN = registry._DEFAULT  # the process's: what libraries register is seen there


@pytest.fixture(scope="module")
def root() -> driver.Root:
    return driver.build("runtime")


@pytest.fixture(scope="module")
def built(root: driver.Root) -> Path:
    """The folder of what `tests/cpp` builds; kept beside the root, so that it is built once."""
    folder = root.path.with_name(f"{root.path.name}-tests")
    tools = driver._tools("tests")
    flags = ";".join([*driver.FLAGS, "-include", str(driver._header(tools))])
    configure = [
        *(tools.cmake, "-S", str(ROOT / "tests/cpp"), "-B", str(folder), "-G", tools.generator),
        f"-DCMAKE_CXX_COMPILER={tools.cxx}",
        f"-DGRAFT_FLAGS={flags}",
        f"-Dtorchgraft_DIR={root.cmake}",
        f"-DGRAFT_SOURCE={driver.SOURCE}",
    ]
    for command in (configure, [tools.cmake, "--build", str(folder), "--parallel", "2"]):
        done = process.run(command)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return folder


# --- Layers ---


@pytest.fixture(scope="module")
def layers(root: driver.Root, built: Path) -> torch.library.Library:
    bridge.load(root)
    library = torch.library.Library("layertest", "FRAGMENT")
    fakes: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of bodies that make tensors
        "shape": lambda x, y: x.new_empty(x.ndim, dtype=torch.int64),
        "constant": lambda x, y: torch.empty_like(x),
        "gather": lambda x, y: x.new_empty(x.shape[0], 2, 2),
    }
    for name, body in (LAYERS | dict.fromkeys(REFUSALS, torch.add)).items():
        library.define(f"{name}(Tensor x, Tensor y) -> Tensor")
        # Another memory than the input's, as an operator gives.
        library.impl(name, lambda x, y, body=body: body(x, y).clone(), "CPU")
        fake = fakes.get(name, body)
        torch.library.register_fake(
            f"layertest::{name}", lambda x, y, fake=fake: fake(x, y).clone(), lib=library
        )
    torch.ops.load_library(built / "liblayers.so")
    return library


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_what_torch_does(layers: torch.library.Library, name: str) -> None:
    x, y = inputs(name)
    op = getattr(torch.ops.layertest, name)
    compiled = graft.compile(lambda x: op(x, y), (x,), mode="eager", registry=OWN)
    [asked] = [c for c in compiled.report.conversions if c.op == f"layertest.{name}.default"]
    assert asked.reason is None
    assert asked.where.endswith("liblayers.so")
    assert "layertest" not in str(compiled.graph)
    torch.testing.assert_close(compiled(x), op(x, y), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_has_a_reason(layers: torch.library.Library, name: str) -> None:
    x, y = inputs(name)
    op = getattr(torch.ops.layertest, name)
    compiled = graft.compile(lambda x: op(x, y), (x,), mode="eager", registry=OWN)
    [asked] = compiled.report.conversions
    assert asked.reason is not None
    assert REFUSALS[name] in asked.reason
    assert torch.equal(compiled(x), x + y)


def test_a_dynamic_size_is_unknown_to_a_converter(layers: torch.library.Library) -> None:
    given = graft.Input(min_shape=(2, 3), max_shape=(9, 3))
    op = torch.ops.layertest
    compiled = graft.compile(
        lambda x: op.shape(op.softmax(x, x), x), (given,), mode="eager", registry=OWN
    )
    reasons = {c.op: c.reason for c in compiled.report.conversions}
    assert reasons["layertest.softmax.default"] is None
    assert "run time only" in (reasons["layertest.shape.default"] or "")
    assert compiled(torch.ones(5, 3)).tolist() == [5, 3]


# --- The examples, each in a process of its own ---


def _python(code: str, root: driver.Root) -> str:
    environment = os.environ | {"TORCHGRAFT_NATIVE": str(root), "PYTHONPATH": str(ROOT)}
    return process.output([sys.executable, "-W", "ignore", "-c", code], env=environment)


def test_libraries_load_twice_and_close_in_any_order(built: Path, root: driver.Root) -> None:
    said = _python(
        f"""
import ctypes, torch, torchgraft as graft
from _ctypes import dlclose
from torchgraft.native import bridge
bridge.load()
folder = {str(built / "examples")!r}
names = ["libcumsum_converter.so", "libquantize_pass.so"]
handles = [ctypes.CDLL(f"{{folder}}/{{name}}") for name in [*names, *names]]
def fn(x):
    return torch.clamp(torch.round(torch.cumsum(x, 0) * 8.8 + 1.1), -128, 127)
x = torch.randn(5, 5)
compiled = graft.compile(fn, (x,), mode="eager")
print([c.reason for c in compiled.report.conversions], list(compiled.report.matches.values()))
print(compiled(x).dtype, torch.equal(compiled(x), fn(x).to(torch.int8)))
other = graft.compile(lambda x: torch.clamp(torch.round(x * 2. + 1.), -8, 7), (x,), mode="eager")
print("it returned false" in other.explain() or [s for s in other.report.steps][-1] is not None)
for handle in (handles[1], handles[0], handles[3], handles[2]):
    dlclose(handle._handle)
after = graft.compile(fn, (x,), mode="eager")
print(after.report.conversions, torch.equal(after(x), fn(x)), after(x).dtype)
""",
        root,
    )
    assert said.splitlines() == [
        "[None] [1]",
        "torch.int8 True",
        "True",
        "[] True torch.float32",
    ]


def test_a_library_that_was_built_again_misses_the_cache(
    built: Path, tmp_path: Path, root: driver.Root
) -> None:
    said = []
    for name in ("libcumsum_converter.so", "libquantize_pass.so"):
        library = tmp_path / name
        for more in (b"", b"", b"built again"):  # what follows a library's own bytes is not read
            library.write_bytes((built / "examples" / name).read_bytes() + more)
            said.append(
                _python(
                    f"""
import ctypes, torch, torchgraft as graft
from torchgraft.native import bridge
bridge.load()
ctypes.CDLL({str(library)!r})
def fn(x):
    return torch.clamp(torch.round(torch.cumsum(x, 0) * 8.8 + 1.1), -128, 127)
fields = dict(mode="eager", cache_dir={str(tmp_path / "cache" / name)!r})
print(graft.compile(fn, (torch.randn(5, 5),), **fields).report.notes[-1])
""",
                    root,
                ).strip()
            )
    hit = "cache hit: nothing was compiled"
    assert said[0] == said[3] == "cache miss: the cache is empty"
    assert said[1] == said[4] == hit
    assert said[2] == (
        "cache miss: nearest entry differs in passes: "
        "aten.cumsum.default converter 0 aten::cumsum of libcumsum_converter.so changed"
    )
    assert "custom_pass_1 of libquantize_pass.so changed" in said[5]


def test_a_module_is_compiled_in_a_cpp_program(
    built: Path, tmp_path: Path, root: driver.Root
) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cumsum(x, 0).relu() + 1

    torch.jit.trace(Model(), torch.ones(5, 5)).save(str(tmp_path / "m.pt"))
    program = str(built / "examples" / "compile_module")
    library = str(built / "examples" / "libcumsum_converter.so")
    environment = os.environ | {"TORCHGRAFT_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    command = [program, str(tmp_path / "m.pt"), library, "5", "5"]
    done = process.run(command, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.rpartition(":")[2]) < 1e-5
    del environment["TORCHGRAFT_PYTHON"]  # that of its torch, whatever the path has
    done = process.run(command, env=environment | {"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    environment["TORCHGRAFT_PYTHON"] = "/no/such/python"
    done = process.run(command, env=environment)
    assert done.returncode == 1
    assert "'/no/such/python' does not run. Set TORCHGRAFT_PYTHON" in done.stderr


HOOK = """
import importlib.machinery, sys
class Hook:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchgraft":
            return importlib.machinery.PathFinder.find_spec(name, [{root!r}])
sys.meta_path.insert(0, Hook)
"""
NONE = """
import importlib.util
plain = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "torchgraft" else plain(name)
"""


def test_a_cpp_program_compiles_in_a_bare_environment(built: Path, tmp_path: Path) -> None:
    torch.jit.trace(torch.nn.Softmax(-1), torch.ones(5, 5)).save(str(tmp_path / "m.pt"))
    python, custom = tmp_path / "python", tmp_path / "sitecustomize.py"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    library = str(built / "examples" / "libcumsum_converter.so")
    command = [
        str(built / "examples" / "compile_module"),
        str(tmp_path / "m.pt"),
        library,
        "5",
        "5",
    ]
    # No language, so C's, and an editable install: found by a hook of that Python alone.
    environment = {name: os.environ[name] for name in ("PATH", "HOME")}
    environment |= {"TORCHGRAFT_PYTHON": str(python)}
    custom.write_text(HOOK.format(root=str(ROOT)))
    done = process.run(command, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.rpartition(":")[2]) < 1e-3
    custom.write_text(NONE)
    done = process.run(command, env=environment)
    assert done.returncode == 1
    assert f"compiling needs torchgraft in '{python}', which has none. Set " in done.stderr


# --- The runtime ---


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program with generated code, an operator that sorts, weights and a dynamic size."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    path = tmp_path_factory.mktemp("packages") / "mlp.graft"
    graft.compile(_Module(model), (graft.Input(min_shape=(1, 8), max_shape=(64, 8)),)).save(path)
    return path


class _Module(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y.sort(-1)[0] + 1, y


@pytest.fixture(scope="module")
def eager_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of operators alone."""
    path = tmp_path_factory.mktemp("packages") / "eager.graft"
    weight = torch.arange(12.0).reshape(4, 3)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            parts = torch.split(x @ self.weight, [1, 2], dim=1)
            return {"a": torch.cat([parts[1] * 2.5, parts[0]], 1), "b": x.topk(2)[1]}

    graft.compile(Model(), (torch.ones(2, 4),), mode="eager").save(path)
    return path


def _run(*command: object) -> subprocess.CompletedProcess[str]:
    return process.run(command)


def test_a_package_gives_what_python_gives(built: Path, package: Path, root: driver.Root) -> None:
    program = built / "examples" / "run_package"
    x = torch.arange(24.0).reshape(3, 8)
    wanted = graft.load(package)(x)
    done = _run(program, package, 3, 8)
    assert done.returncode == 0, done.stderr
    numbers = [float(word) for word in done.stdout.split() if word[0] in "-0123456789"]
    torch.testing.assert_close(
        torch.tensor(numbers), torch.cat([w.flatten() for w in wanted]), atol=2e-3, rtol=1e-3
    )
    linked = _run("ldd", program).stdout
    assert "libtorchgraft.so" in linked
    assert "python" not in linked.replace(str(root), "").replace("lib/python3", "")


def test_errors_have_the_same_sentences(built: Path, package: Path, tmp_path: Path) -> None:
    program = built / "examples" / "run_package"
    done = _run(program, package, 3, 9)
    with pytest.raises(graft.errors.InputMismatch) as caught:
        graft.load(package)(torch.ones(3, 9))
    assert done.returncode == 1
    assert done.stderr.strip() == str(caught.value)
    assumes = tmp_path / "assumes.graft"
    with pytest.warns(UserWarning, match="will be refused"):
        graft.compile(
            lambda x: x.nonzero() + 1 if x.shape[0] != 1 else x.nonzero(),
            (graft.Input(min_shape=(1, 3), max_shape=(8, 3)),),
            mode="eager",
        ).save(assumes)
    with pytest.raises(graft.errors.InputMismatch, match=r"got x.shape\[0\] = 1.\n") as caught:
        graft.load(assumes)(torch.ones(1, 3))
    assert _run(program, assumes, 1, 3).stderr.strip() == str(caught.value)
    data = package.read_bytes()
    cases = {
        "cut": data[:-40],
        "altered": data.replace(b'"mode"', b'"made"'),
        "empty": b"",
        "other": b"hello" * 100,
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        done = _run(program, tmp_path / name, 3, 8)
        assert done.returncode == 1, name
        with pytest.raises(graft.errors.BadPackage) as refused:
            graft.load(tmp_path / name)
        mine, theirs = done.stderr.strip(), str(refused.value)
        assert mine.splitlines()[-1] == theirs.splitlines()[-1]
        assert mine.partition("loaded: ")[2][:12] == theirs.partition("loaded: ")[2][:12]


class _Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        both = torch.ones(3)
        self.register_buffer("a", both, persistent=False)
        self.register_buffer("b", both)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a + self.b


def test_mistakes_are_told_as_in_python(built: Path, package: Path, tmp_path: Path) -> None:
    tied = tmp_path / "tied.graft"
    graft.compile(_Tied(), (torch.ones(3),), mode="eager", freeze=False).save(tied)
    done = _run(built / "misuse", package, tied)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    program, x = graft.load(package), torch.ones(3, 8)
    calls: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {
        "unknown name": ((x,), {"zz": x}),
        "by name": ((), {"x": x}),
        "nothing": ((), {}),
        "one more": ((x, x), {}),
        "in a list": (([x],), {}),
        "number": ((3,), {}),
        "float": ((2.0,), {}),
        "text": (("a",), {}),
        "none": ((None,), {}),
    }
    for name, (args, kwargs) in calls.items():
        with pytest.raises(graft.errors.InputMismatch) as caught:
            program(*args, **kwargs)
        assert found[name] == str(caught.value), name
    assert found["fits"] is None
    assert found["signature"] == "x float32[1 to 64, 8] on cpu"
    assert found["undefined"].endswith("on cpu, got an undefined tensor.\nPass a tensor.")
    assert "inner.0.bias: an undefined tensor" in found["undefined weight"]
    sparse = {"inner.0.weight": torch.ones(16, 8).to_sparse(), "inner.0.bias": torch.ones(16)}
    with pytest.raises(graft.errors.WeightMismatch) as refused:
        program.load_state_dict(sparse)
    assert "inner.0.weight: layout torch.sparse_coo for torch.strided" in str(refused.value)
    assert found["sparse weight"] == str(refused.value)
    assert (found["tied"], found["tied gives"]) == (None, 12.0)
    empty = "this Program is empty.\nAssign one to it: program = torchgraft::load(path);"
    assert [found[name] for name in ("empty", "empty call", "empty name")] == [empty] * 3
    assert found["shapes"] == [[5], [5], [5, 2], [4]]
    assert found["ranges"] == [False, True, True]


def test_calls_of_several_shapes_keep_their_results(built: Path, tmp_path: Path) -> None:
    """The program with which tests/package/test_cuda_package.py looks at captured graphs."""
    library = torch.library.Library("graft_calls", "DEF")
    library.define("count(Tensor x) -> Tensor")
    library.impl("count", torch.clone, "CPU")
    torch.library.register_fake("graft_calls::count", torch.empty_like, lib=library)

    class Counted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.calls.add_(1)
            made = torch.ops.graft_calls.count(x * 2)
            return made + self.calls, made[:1]

    model, path = Counted(), tmp_path / "counted.graft"
    declared = graft.Input(min_shape=(2, 3), max_shape=(9, 3))
    graft.compile(model, (declared,), mode="eager").save(path)
    done = _run(built / "calls", path, 3, "2x3", "5x3")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["counted"], found["notes"]) == (6, [])
    wanted = []
    for i in range(3):
        for rows in (2, 5):
            numbers = torch.arange(1, 1 + 3 * rows, dtype=torch.float32) / 100 + i
            wanted += [out.flatten() for out in model(numbers.reshape(rows, 3))]
    for out, want in zip(found["outputs"], wanted, strict=True):
        torch.testing.assert_close(torch.tensor(out), want)
    library._destroy()


def test_threads_get_equal_results_and_memory_is_flat(built: Path, package: Path) -> None:
    done = _run(built / "soak", package, 8, os.environ.get("TORCHGRAFT_SOAK", 300), 3, 8)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == 0
    assert found["after_kib"] - found["before_kib"] < 4096


@pytest.mark.parametrize("which", ["package", "eager_package"])
def test_mutated_packages_never_crash(
    built: Path, which: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(which)
    count = int(os.environ.get("TORCHGRAFT_FUZZ", 400 if which == "package" else 2000))
    sizes = (3, 8) if which == "package" else (2, 4)
    done = _run(built / "fuzz", path, count, 7, *sizes)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["odd"] == 0, done.stderr[-2000:]
    assert found["refused"] + found["loaded"] == count
    assert found["refused"] > count / 2
