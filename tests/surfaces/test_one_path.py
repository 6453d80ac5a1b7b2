"""The same packages through Python's executor, the C++ one in Python, and C++'s own loader."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import process
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import torchgraft as graft
from torchgraft import _torch
from torchgraft.backend import torchgraft
from torchgraft.errors import InputMismatch
from torchgraft.native import driver
from torchgraft.package.script import forget_engines

pytestmark = pytest.mark.slow
NOTE = "its plan is walked in C++"


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    """C++'s loader, as the operator that a ScriptModule calls."""
    torch.ops.load_library(driver.build("runtime").lib / "libtorchgraft.so")


def in_cpp(path: Path, *inputs: Tensor) -> list[Tensor]:
    engine = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    return list(torch.ops.torchgraft.run_engine(list(inputs), engine))


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, str], graft.Compiled]:
    def loaded(path: Path, executor: str) -> graft.Compiled:
        monkeypatch.setenv("TORCHGRAFT_EXECUTOR", executor)
        program = graft.load(path)
        assert (NOTE in program.report.notes) == (executor == "native")
        return program

    return loaded


def test_programs_of_the_cpp_loader_are_let_go(tmp_path: Path) -> None:
    graft.compile(nn.Linear(4, 2), (x := torch.randn(3, 4),)).save(path := tmp_path / "m.graft")
    forget_engines()
    engine = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    for _ in range(2):
        torch.ops.torchgraft.run_engine([x], engine)
        assert torch.ops.torchgraft.forget_engines() == 1
    torch.ops.torchgraft.run_engine([x], engine)
    forget_engines()
    assert torch.ops.torchgraft.forget_engines() == 0


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: (y * 2).flip(0), (x,))


def loop(x: Tensor) -> tuple[Tensor, Tensor]:
    """Its body is given a slice with gaps, which the branch wants dense."""

    def more(n: Tensor, y: Tensor) -> Tensor:
        return n < 3

    def body(n: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return n + 1, y.reshape(-1).mul(2).reshape(y.shape)

    return torch.while_loop(more, body, (torch.zeros((), dtype=torch.int64), x[:, ::2].clone()))


def streams(x: Tensor) -> Tensor:
    with graft.stream("side"):
        y = x.sin() @ x
    with graft.stream("other"):
        z = (x * 3).cumsum(0)
    return x.cos() + y - z


def sizes(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[0] // 2
    return x[:half].reshape(-1) * half, x.new_ones(x.shape[0] % 3 + 1)


def scalars(x: Tensor) -> tuple[Tensor, ...]:
    wide = x.clamp(-float("inf"), 2.0).to(torch.float64)
    return (
        wide,
        x.sum(dtype=torch.float64),
        torch.full_like(x, 7, dtype=torch.int32),
        x.new_zeros(2),
    )


def written(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2).add_(y)
    return x.sum() + y


LIBRARY = torch.library.Library("onepath", "FRAGMENT")
LIBRARY.define(
    "mix(Tensor(a!) x, Tensor(b!)? y, Tensor(c!)[] more, Tensor by, float f=2.0) -> Tensor"
)
LIBRARY.define("bump(Tensor(a!) x) -> ()")


def mix(x: Tensor, y: Tensor | None, more: list[Tensor], by: Tensor, f: float = 2.0) -> Tensor:
    x.add_(by * f)
    for one in more if y is None else [y, *more]:
        one.mul_(f)
    return by + 1


LIBRARY.impl("mix", mix, "CompositeExplicitAutograd")
LIBRARY.impl("bump", lambda x: [x.add_(1)].clear(), "CompositeExplicitAutograd")
torch.library.register_fake("onepath::mix", lambda x, y, more, by, f=2.0: torch.empty_like(by))
torch.library.register_fake("onepath::bump", lambda x: None)


def operators_that_write(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Whole tensors, slices, other views, none, lists, and an input of the program."""
    op = torch.ops.onepath
    a, b = x.clone(), x.t().clone()
    made = op.mix(a[1:, 0], None, [b.select(0, 1), b[0]], y[1:, 1], 3.0)
    kept = op.mix(a.view(-1)[::2], b.t(), [], y.view(-1)[::2])
    op.bump(y)
    op.bump(a.unsqueeze(0))
    return a, b, made, kept, y * 2


ANY = graft.Input(min_shape=(2, 3), max_shape=(9, 3))
GEARS = graft.Input(gears=[(2, 3), (5, 3)])
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[tuple[Tensor, ...]]]] = {
    "one tensor": (lambda x: x.relu() + 1.5, (torch.ones(3),), [(torch.randn(3),)]),
    "several results": (lambda x: x.topk(2), (torch.ones(5),), [(torch.randn(5),)]),
    "lists": (
        lambda x: torch.cat([*torch.split(x, [1, 2], 1), x.new_ones(2, 1)], 1).chunk(2),
        (torch.ones(2, 3),),
        [(torch.randn(2, 3),)],
    ),
    "scalars": (scalars, (torch.ones(3),), [(torch.randn(3),)]),
    "complex": (
        lambda x: torch.view_as_real(torch.fft.fft(x) * (1 + 2j)),
        (torch.ones(4),),
        [(torch.randn(4),)],
    ),
    "indices": (
        lambda x, i: (x[i, None, 1], x.index_put((i,), x[0]), x[None, ..., ::2]),
        (torch.ones(3, 2), torch.tensor([0, 2])),
        [(torch.randn(3, 2), torch.tensor([2, 1]))],
    ),
    "a size of data": (lambda x: x.nonzero(), (torch.tensor([0, 3]),), [(torch.tensor([4, 0]),)]),
    "sizes": (sizes, (ANY,), [(torch.randn(n, 3),) for n in (2, 7, 9)]),
    "gears": (lambda x: x.sum(0) / x.shape[0], (GEARS,), [(torch.randn(n, 3),) for n in (5, 2)]),
    "other strides": (
        lambda x: (x.t(), x[1:], x + 1),
        (torch.ones(3, 2),),
        [(torch.randn(3, 2),), (torch.randn(2, 3).t(),), (torch.randn(3, 4)[:, ::2],)],
    ),
    "channels last": (
        lambda x: nn.functional.avg_pool2d(x, 2),
        (torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),),
        [(torch.randn(2, 3, 4, 4),)],
    ),
    "written inputs": (
        written,
        (torch.ones(3, 2), torch.ones(3, 2)),
        [(torch.randn(3, 2), torch.randn(3, 2)), (torch.randn(2, 3).t(), torch.randn(3, 2))],
    ),
    "operators that write": (
        operators_that_write,
        (torch.ones(3, 2), torch.ones(3, 2)),
        [(torch.randn(3, 2), torch.randn(3, 2)), (torch.randn(2, 3).t(), torch.randn(3, 2))],
    ),
    "branches": (branches, (torch.ones(3),), [(torch.ones(3),), (-torch.arange(3.0),)]),
    "a loop": (loop, (torch.ones(2, 4),), [(torch.randn(2, 4),)]),
    "streams": (streams, (torch.ones(3, 3),), [(torch.randn(3, 3),)] * 3),
    "sparse": (
        lambda x, y: torch.sparse.mm(x, y) + 1,
        (torch.eye(3).to_sparse(), torch.ones(3, 2)),
        [(torch.eye(3).to_sparse() * 2, torch.randn(3, 2))],
    ),
    "nothing": (lambda x: (x.sum(), None), (torch.empty(0),), [(torch.empty(0),)]),
}


def copies(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same values with the same strides."""
    if any(x.layout != torch.strided for x in args):
        return args
    made = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) for x in args]
    return tuple(made)


def owners(outputs: list[Any], inputs: tuple[Tensor, ...]) -> list[int | None]:
    """Which input each output shares memory with."""
    plain = [x for x in inputs if x.layout == torch.strided and x.numel()]
    return [
        next(
            (i for i, x in enumerate(plain) if isinstance(o, Tensor) and _torch.is_alias(o, x)),
            None,
        )
        for o in outputs
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_four_ways_give_one_result(
    name: str, load: Callable[[Path, str], graft.Compiled], tmp_path: Path
) -> None:
    fn, declared, calls = PROGRAMS[name]
    graft.compile(fn, declared, mode="eager").save(path := tmp_path / "program.graft")
    python, native = load(path, "python"), load(path, "native")
    fresh = graft.compile(fn, declared, mode="eager")
    assert (NOTE in fresh.report.notes) == (name not in ("branches", "a loop"))
    for args in calls:
        wanted, theirs = copies(args), copies(args)
        expected = _torch.flatten(python(*wanted))[0]
        for program in (native, fresh):
            mine = copies(args)
            found = _torch.flatten(program(*mine))[0]
            assert_close(found, expected, rtol=0, atol=0)
            assert_close(mine, wanted, rtol=0, atol=0)
            assert [type(f) for f in found] == [type(e) for e in expected]
            assert owners(found, mine) == owners(expected, wanted)
        if None in expected:  # the operator gives tensors only
            continue
        out = in_cpp(path, *theirs)
        assert_close(out, expected, rtol=0, atol=0)
        assert_close(theirs, wanted, rtol=0, atol=0)
        assert owners(out, theirs) == owners(expected, wanted)


def test_a_call_that_does_not_fit_is_told_the_same(
    load: Callable[[Path, str], graft.Compiled], tmp_path: Path
) -> None:
    path = tmp_path / "program.graft"
    graft.compile(PROGRAMS["gears"][0], (GEARS,), mode="eager").save(path)
    python, native = load(path, "python"), load(path, "native")
    wrong = [torch.ones(4, 3), torch.ones(2, 3, dtype=torch.int32), torch.ones(2), torch.eye(3)]
    for x in [*wrong, torch.eye(3).to_sparse()]:
        said = []
        for program in (python, native):
            with pytest.raises(InputMismatch) as caught:
                program(x)
            said.append(str(caught.value))
        with pytest.raises(RuntimeError) as thrown:
            in_cpp(path, x)
        assert said == [str(thrown.value)] * 2


@torch.library.custom_op("onepath::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    if x.sum() < 0:
        raise LookupError("less than nothing")
    return x * 2


@picky.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operator_of_python_and_what_it_raises(
    load: Callable[[Path, str], graft.Compiled], tmp_path: Path
) -> None:
    graft.compile(lambda x: picky(x) + 1, (torch.ones(2),), mode="eager").save(tmp_path / "p")
    program = load(tmp_path / "p", "native")
    assert program(torch.ones(2)).tolist() == [3, 3]
    with pytest.raises(LookupError, match="less than nothing"):
        program(-torch.ones(2))
    assert program(torch.ones(2)).tolist() == [3, 3]


def test_results_that_only_python_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHGRAFT_EXECUTOR", "native")
    fresh = graft.compile(lambda x: (x + 1, "text", 2), (torch.ones(2),), mode="eager")
    fresh.save(tmp_path / "p")
    for program in (fresh, graft.load(tmp_path / "p")):
        made = program(torch.ones(2))
        assert (made[0].tolist(), *made[1:]) == ([2.0, 2.0], "text", 2)
        assert NOTE not in program.report.notes


def test_fresh_programs_in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of operators alone, the caller's gradients kept out; generated code stays in Python."""
    monkeypatch.setenv("TORCHGRAFT_EXECUTOR", "native")
    x = torch.randn(3, 3, requires_grad=True)
    model = nn.Linear(3, 3)
    program = graft.compile(model, (x,), mode="eager")
    assert NOTE in program.report.notes
    assert_close(program(x), model(x).detach())
    program.load_state_dict(nn.Linear(3, 3).state_dict())
    assert not torch.equal(program(x), model(x))
    monkeypatch.setenv("TORCHGRAFT_EXECUTOR", "python")
    assert NOTE not in graft.compile(model, (x,), mode="eager").report.notes
    monkeypatch.setenv("TORCHGRAFT_EXECUTOR", "native")
    run = torch.compile(model, backend=torchgraft, options={"mode": "eager"})
    run(x).sum().backward()
    grad, x.grad = x.grad, None
    model(x).sum().backward()
    assert_close(grad, x.grad)
    assert NOTE not in graft.compile(model, (x,)).report.notes


def test_an_operator_of_python_on_a_stream_stays_in_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fn(x: Tensor) -> Tensor:
        with graft.stream("side"):
            y = picky(x)
        return x.cos() + y

    graft.compile(fn, (torch.ones(2),), mode="eager").save(tmp_path / "p")
    monkeypatch.setenv("TORCHGRAFT_EXECUTOR", "native")
    program = graft.load(tmp_path / "p")
    assert NOTE not in program.report.notes
    with pytest.raises(LookupError, match="less than nothing"):
        program(-torch.ones(2))


def test_threads_with_streams_of_their_own_calls(
    load: Callable[[Path, str], graft.Compiled], tmp_path: Path
) -> None:
    graft.compile(streams, (torch.ones(3, 3),), mode="eager").save(tmp_path / "p")
    program = load(tmp_path / "p", "native")
    given = [torch.randn(3, 3) for _ in range(4)]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            if not torch.equal(program(given[i]), streams(given[i])):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    with torch.inference_mode():
        assert_close(program(given[0]), streams(given[0]))


FORKED = """
import os, signal, sys, torch, torchgraft as graft
torch.set_num_threads(1)
program, x = graft.load(sys.argv[1]), torch.randn(3, 3)
print(sys.argv[2] in program.report.notes)
want = program(x)
for late in (False, True):  # with the threads of its own gone, and with those of the first process
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        signal.alarm(60)
        if not late:
            assert all(torch.equal(program(x), want) for _ in range(3))
        del program
        os._exit(0)
    print(os.waitpid(child, 0)[1], torch.equal(program(x), want))
"""


@pytest.mark.parametrize("executor", ["python", "native"])
def test_streams_in_a_process_that_was_forked(tmp_path: Path, executor: str) -> None:
    """The threads of streams are not forked with it."""
    graft.compile(streams, (torch.ones(3, 3),), mode="eager").save(tmp_path / "p")
    env = {**os.environ, "TORCHGRAFT_EXECUTOR": executor}
    said = process.output([sys.executable, "-c", FORKED, tmp_path / "p", NOTE], env=env)
    assert said.splitlines() == [str(executor == "native"), "0 True", "0 True"]


@pytest.fixture
def generated(tmp_path: Path) -> tuple[nn.Module, Path]:
    """Generated code with packed weights, around an operator."""
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4), nn.Softmax(-1))
    graft.compile(model, (graft.Input(min_shape=(2, 8), max_shape=(9, 8)),)).save(tmp_path / "p")
    return model, tmp_path / "p"


def test_generated_code_and_weights_that_go_with_the_program(
    generated: tuple[nn.Module, Path], load: Callable[[Path, str], graft.Compiled]
) -> None:
    model, path = generated
    x = torch.randn(5, 8)
    program = load(path, "native")
    assert_close(program(x), model(x))
    assert_close(in_cpp(path, x)[0], model(x))
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    program.load_state_dict(state)
    assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)
    storage = weakref.ref(state["0.weight"].untyped_storage())
    del program, state
    gc.collect()
    assert storage() is None


def test_finalize_reaches_programs_in_both_languages(tmp_path: Path) -> None:
    from torchgraft.compat.aie.compile import finalize
    from torchgraft.package import script

    x = torch.randn(3)
    module = graft.compile(lambda x: x * 2, (x,), mode="eager").script()
    forget = torch.ops.torchgraft.forget_engines
    forget()
    script._run_engine([x], module.engine)  # as Python runs it before the C++ runtime is loaded
    for _ in range(2):
        assert_close(module(x), x * 2)  # loaded again, by C++
        finalize()
        assert len(script._ENGINES) == 0
        assert forget() == 0
    assert_close(module(x), x * 2)
    assert forget() == 1


def test_finalize_of_cpp_reaches_programs_of_python() -> None:
    from torchgraft.native import bridge
    from torchgraft.package import script

    bridge.load()
    x = torch.randn(3)
    module = graft.compile(lambda x: x * 2, (x,), mode="eager").script()
    script._run_engine([x], module.engine)
    library = ctypes.PyDLL(str(driver.build("runtime").lib / "libtorch_aie.so"))
    library["_ZN9torch_aie8finalizeEv"]()
    assert len(script._ENGINES) == 0
