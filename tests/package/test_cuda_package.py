"""Programs that were compiled for CUDA: saved, then run by Python, by C++ in Python, and by C++.

Needs nothing but a GPU, torch's own toolchain and a checkout: `python3 -m pytest` on this file.
What needs the C++ part builds it, and is skipped where CMake or a compiler is missing.
"""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import process
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import torchgraft as graft
from torchgraft.errors import BadPackage, NativeBuild, WeightMismatch, WrongMachine
from torchgraft.native import driver
from torchgraft.package import archive

pytestmark = [pytest.mark.cuda, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
NOTE = "its plan is walked in C++"
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


# --- Programs ---


class Mixed(nn.Module):
    """Generated code around an operator that is not generated, with weights and a state."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.add_(1)
        y = self.down(self.up(x).relu()).softmax(-1)
        return y.sort(-1)[0] * 2 + 1, self.calls + y.sum()


class Towers(nn.Module):
    """Branches on streams of their own, whose results meet on the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = []
        for i, tower in enumerate(self.towers):
            with graft.stream(f"side{i}"):
                y = tower(x).tanh()
                made.append((tower(y) @ y.transpose(0, 1)).tanh())
        return made[0] + made[1] * made[2], made[2]


RANGE = graft.Input(min_shape=(2, 8), max_shape=(64, 8))
FIXED = torch.zeros(5, 8)
PROGRAMS: dict[str, tuple[type[nn.Module], Any, list[tuple[int, ...]]]] = {
    "fixed": (Mixed, FIXED, [(5, 8)] * 3),
    "range": (Mixed, RANGE, [(2, 8), (33, 8), (64, 8), (33, 8)]),
    "streams": (Towers, torch.zeros(4, 64), [(4, 64)] * 4),
}
MODES = ["eager", "default", "reduce-overhead"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[nn.Module, Path]]:
    """A program by name and mode, with the package of it; each is compiled once."""
    made: dict[tuple[str, str], tuple[nn.Module, Path]] = {}

    def get(name: str, mode: str) -> tuple[nn.Module, Path]:
        if (name, mode) not in made:
            torch.manual_seed(0)
            kind, given, _ = PROGRAMS[name]
            model = kind().cuda().eval()
            declared = given.cuda() if isinstance(given, Tensor) else given
            path = tmp_path_factory.mktemp("packages") / "program.graft"
            graft.compile(model, (declared,), mode=mode).save(path)
            made[name, mode] = (model, path)
        model, path = made[name, mode]
        return copy.deepcopy(model), path

    return get


def runtime() -> driver.Root:
    try:
        return driver.build("runtime")
    except NativeBuild as error:
        if "this machine has no" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(params=["python", "native"])
def load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`graft.load`, with the plan walked by Python or by C++."""
    executor = request.param
    monkeypatch.setenv("TORCHGRAFT_EXECUTOR", executor)
    if executor == "native":
        root = runtime()
        if not (root.lib / f"torchgraft_executor{driver.MODULE}").exists():
            pytest.skip("Python has no headers here")

    def loaded(path: Path, **options: Any) -> graft.Compiled:
        program = graft.load(path, **options)
        assert (NOTE in program.report.notes) == (executor == "native")
        return program

    return loaded


# --- Results ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loaded_program_gives_what_the_model_gives(
    name: str, mode: str, saved: Any, load: Any
) -> None:
    model, path = saved(name, mode)
    program = load(path)
    for shape in PROGRAMS[name][2]:
        x = torch.randn(shape, device="cuda")
        assert_close(program(x), model(x), **CLOSE)
    refused = [note for note in program.report.notes if "not captured" in note]
    assert refused == []


@pytest.mark.parametrize("mode", MODES)
def test_calls_on_any_stream_from_several_threads(mode: str, saved: Any, load: Any) -> None:
    model, path = saved("streams", mode)
    given = [torch.randn(4, 64, device="cuda") for _ in range(4)]
    wanted = [model(x) for x in given]
    torch.cuda.synchronize()
    program = load(path)
    wrong: list[Any] = []

    def work(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(100):
                    made = program(given[i])
                    waste = torch.full((4, 64), float("nan"), device="cuda")  # of freed memory
                    assert_close(made, wanted[i], **CLOSE)
                    del waste
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_plan_on_streams_is_saved_as_one(saved: Any, load: Any) -> None:
    _, path = saved("streams", "default")
    assert set(load(path).plan.streams) == {"main", "side0", "side1", "side2"}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_new_weights_without_a_compiler(
    mode: str, saved: Any, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = saved("fixed", mode)
    monkeypatch.setenv("PATH", "")
    other = Mixed().cuda().eval()
    x = torch.randn(5, 8, device="cuda")
    for program in (load(path), load(path, weights=other.state_dict())):
        program.load_state_dict(other.state_dict())
        twin = copy.deepcopy(other)
        for _ in range(2):
            assert_close(program(x), twin(x), **CLOSE)
    with pytest.raises(WeightMismatch, match="missing: down"):
        program.load_state_dict({k: v for k, v in model.state_dict().items() if "down" not in k})


def test_weights_are_on_the_device_once_and_go_with_the_program(load: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2048, 4096, bias=False), nn.ReLU()).cuda()
    x = torch.randn(2, 2048, device="cuda")
    graft.compile(model, (x,)).save(tmp_path / "p")
    program = load(tmp_path / "p")
    assert_close(program(x), model(x), **CLOSE)
    size = 2048 * 4096 * 4
    del program
    gc.collect()
    torch.cuda.synchronize()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    program = load(tmp_path / "p")
    program(x)
    assert torch.cuda.memory_allocated() - before < 1.5 * size
    assert free - torch.cuda.mem_get_info()[0] < 2.5 * size  # what a library takes by itself, too
    del program
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 0.1 * size


def test_the_compile_cache(tmp_path: Path, load: Any) -> None:
    model, x = nn.Sequential(nn.Linear(8, 4), nn.Tanh()).cuda(), torch.randn(3, 8, device="cuda")
    for hit in (False, True):
        compiled = graft.compile(model, (x,), cache_dir=str(tmp_path))
        assert any("cache" in note and "hit" in note for note in compiled.report.notes) == hit
        assert_close(compiled(x), model(x), **CLOSE)


# --- Refusals ---


def rewritten(path: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The package with a changed manifest."""
    with zipfile.ZipFile(path) as file:
        held = {name: file.read(name) for name in file.namelist()}
    manifest = json.loads(held.pop("manifest.json"))
    change(manifest)
    archive.write(target, manifest, held)
    return target


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], None], str, type[Exception]]] = {
    "capability": (
        lambda m: m["requires"].update(capability=[3, 5]),
        "it needs compute capability 3.5, here is {capability} ({name}).\n"
        "Compile and save it on a device of capability {capability}.",
        WrongMachine,
    ),
    "cuda": (
        lambda m: m.update(cuda="10.2"),
        "it needs CUDA 10.2, here is CUDA {cuda}.\n"
        "Install the torch it was made with, or compile and save it again.",
        WrongMachine,
    ),
    "torch": (
        lambda m: m.update(torch="1.0.0"),
        "it needs torch 1.0.0, here is torch {torch}.\n"
        "Install torch 1.0.0, or compile and save it again with this one.",
        WrongMachine,
    ),
    "no capability": (
        lambda m: m["requires"].update(capability=[9]),
        "its compute capability is [9].",
        BadPackage,
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_package_of_another_machine_says_what_it_needs(
    what: str, saved: Any, tmp_path: Path
) -> None:
    change, sentence, error = CHANGES[what]
    path = rewritten(saved("fixed", "eager")[1], tmp_path / "other.graft", change)
    wanted = sentence.format(
        capability=".".join(map(str, torch.cuda.get_device_capability())),
        name=torch.cuda.get_device_name(),
        cuda=torch.version.cuda,
        torch=torch.__version__,
    )
    with pytest.raises(error) as caught:
        graft.load(path)
    assert wanted in str(caught.value)


def test_a_device_that_there_is_not(saved: Any) -> None:
    with pytest.raises(WrongMachine, match="it needs device 'cuda:99', here is cuda:0"):
        graft.load(saved("fixed", "eager")[1], device="cuda:99")
    with pytest.raises(WrongMachine, match="it needs device 'cuda', here is device='cpu'"):
        graft.load(saved("fixed", "eager")[1], device="cpu")
    x = torch.randn(5, 8, device="cuda")
    model, path = saved("fixed", "eager")
    assert_close(graft.load(path, device="cuda:0")(x), model(x), **CLOSE)


# --- C++, no Python in the process ---


def _built(source: str, target: str, *more: str) -> Path:
    """A program of a CMake project, built as a user builds it; once for several processes."""
    root, tools = runtime(), driver._tools("tests")
    folder = root.path.with_name(f"{root.path.name}-{target}")
    configure = [
        *(tools.cmake, "-S", str(ROOT / source), "-B", str(folder), "-G", tools.generator),
        *(f"-DCMAKE_CXX_COMPILER={tools.cxx}", f"-Dtorchgraft_DIR={root.cmake}", *more),
    ]
    with driver.locked(folder.with_suffix(".lock")):
        for command in (configure, [tools.cmake, "--build", str(folder), "--target", target]):
            done = process.run(command)
            assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return folder / target


@pytest.fixture(scope="module")
def run_package() -> Path:
    """`examples/cpp/run_package.cpp`."""
    return _built("examples/cpp", "run_package")


def _run(*command: object) -> subprocess.CompletedProcess[str]:
    return process.run(command)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_cpp_program_gives_what_the_model_gives(
    name: str, mode: str, saved: Any, run_package: Path
) -> None:
    model, path = saved(name, mode)
    shape = PROGRAMS[name][2][0]
    size = torch.Size(shape).numel()
    wanted = model(torch.arange(float(size), device="cuda").reshape(shape))
    done = _run(run_package, path, *shape)
    assert done.returncode == 0, done.stderr
    assert "CUDAFloatType" in done.stdout
    numbers = [float(word) for word in done.stdout.split() if word[0] in "-0123456789"]
    flat = torch.cat([w.flatten() for w in wanted]).cpu()
    assert_close(torch.tensor(numbers), flat, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("what", CHANGES)
def test_a_cpp_program_is_told_the_same(
    what: str, saved: Any, tmp_path: Path, run_package: Path
) -> None:
    change, _, error = CHANGES[what]
    path = rewritten(saved("fixed", "eager")[1], tmp_path / "other.graft", change)
    with pytest.raises(error) as caught:
        graft.load(path)
    done = _run(run_package, path, 5, 8)
    assert done.returncode == 1
    assert done.stderr.strip() == str(caught.value)


# --- CUDA graphs in C++ ---


class Counted(nn.Module):
    """Tells how often the host ran it: a replayed graph does not ask the host. It has a state, a
    result that is an input, and two results that share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.calls.add_(1)
        made = torch.ops.graft_calls.count(self.linear(x)).relu()
        return made + self.calls, made[:1], made, self.calls * 2


@pytest.fixture(scope="module")
def counted() -> Any:
    """The operator that `tests/cpp/calls.cpp` has for C++."""
    library = torch.library.Library("graft_calls", "DEF")
    library.define("count(Tensor x) -> Tensor")
    library.impl("count", torch.clone, "CUDA")
    torch.library.register_fake("graft_calls::count", torch.empty_like, lib=library)
    yield library
    library._destroy()


@pytest.fixture(scope="module")
def calls() -> Path:
    """`tests/cpp/calls.cpp`."""
    header = driver._header(driver._tools("tests"))
    flags = ";".join([*driver.FLAGS, "-include", str(header)])
    return _built("tests/cpp", "calls", f"-DGRAFT_FLAGS={flags}", f"-DGRAFT_SOURCE={driver.SOURCE}")


def called(calls: Path, path: Path, rounds: int, *shapes: str) -> dict[str, Any]:
    done = _run(calls, path, rounds, *shapes)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def given(rounds: int, *sizes: tuple[int, ...]) -> list[Tensor]:
    """The inputs that `calls` makes."""
    made = []
    for i in range(rounds):
        for size in sizes:
            numbers = torch.arange(1, 1 + torch.Size(size).numel(), dtype=torch.float32)
            made.append((numbers / 100 + i).reshape(size).cuda())
    return made


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_cpp_replays_a_graph_of_each_shape(
    mode: str, counted: Any, calls: Path, tmp_path: Path
) -> None:
    model = Counted().cuda().eval()
    path = tmp_path / "counted.graft"
    declared = graft.Input(min_shape=(2, 8), max_shape=(64, 8))
    graft.compile(model, (declared,), mode=mode).save(path)
    found = called(calls, path, 10, "2x8", "33x8")
    if mode == "reduce-overhead":
        assert found["notes"] == []
        assert found["counted"] == 2 * 2  # of each shape a warm-up and a capture
    else:
        assert found["counted"] == 10 * 2
    outputs = [torch.tensor(out, dtype=torch.float32) for out in found["outputs"]]
    wanted = [out for x in given(10, (2, 8), (33, 8)) for out in model(x)]  # counts as well
    assert len(outputs) == len(wanted)
    for out, want in zip(outputs, wanted, strict=True):
        assert_close(out, want.detach().cpu().flatten(), **CLOSE)


def test_cpp_keeps_so_many_graphs_and_no_more(counted: Any, calls: Path, tmp_path: Path) -> None:
    model = Counted().cuda().eval()
    path = tmp_path / "counted.graft"
    declared = graft.Input(min_shape=(2, 8), max_shape=(64, 8))
    graft.compile(model, (declared,), mode="reduce-overhead").save(path)
    rows = range(2, 2 + 17)  # one more than are kept
    found = called(calls, path, 2, *(f"{n}x8" for n in rows))
    assert found["notes"] == []
    assert found["counted"] == 2 * 17 * 2  # each had to go before it came again
    inputs = given(2, *((n, 8) for n in rows))
    for out, x in zip(found["outputs"][2::4], inputs, strict=True):
        want = torch.relu(model.linear(x)).detach().cpu().flatten()
        assert_close(torch.tensor(out, dtype=torch.float32), want, **CLOSE)


def test_cpp_says_why_it_does_not_capture(counted: Any, calls: Path, tmp_path: Path) -> None:
    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.graft_calls.count(x.nonzero().float())

    model, path = Look().cuda(), tmp_path / "look.graft"
    x = torch.ones(4, 8, device="cuda")
    graft.compile(model, (x,), mode="reduce-overhead").save(path)
    found = called(calls, path, 3, "4x8")
    assert found["counted"] >= 3
    [note] = found["notes"]
    assert note.startswith("not captured as a CUDA graph: ")
    for out, x in zip(found["outputs"], given(3, (4, 8)), strict=True):
        assert_close(torch.tensor(out).float(), model(x).cpu().flatten(), **CLOSE)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_operator_of_a_script_module(name: str, mode: str, saved: Any) -> None:
    """The loader of C++ on this process's own streams."""
    torch.ops.load_library(runtime().lib / "libtorchgraft.so")
    model, path = saved(name, mode)
    engine = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    with torch.cuda.stream(torch.cuda.Stream()):
        for shape in PROGRAMS[name][2]:
            x = torch.randn(shape, device="cuda")
            made = torch.ops.torchgraft.run_engine([x], engine)
            assert_close(tuple(made), model(x), **CLOSE)
