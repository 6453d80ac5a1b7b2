"""A program that was saved and loaded gives what the model gives, and says the same of itself."""

from __future__ import annotations

import gc
import re
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import process
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import torchgraft as graft
from torchgraft.errors import BadValue, InputMismatch, NotSavable, WeightMismatch


class Mixed(nn.Module):
    """A convolution with its norm, matrices, and a small parameter that could be inlined."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.linear, self.scale = nn.Linear(8, 4), nn.Parameter(torch.zeros(4))
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.linear(y) * self.scale + torch.arange(4)


def mixed() -> Mixed:
    return Mixed().eval()


def saved(compiled: graft.Compiled, folder: Path) -> graft.Compiled:
    compiled.save(folder / "program.graft")
    return graft.load(folder / "program.graft")


def check_same(compiled: graft.Compiled, loaded: graft.Compiled) -> None:
    assert loaded.plan == compiled.plan
    assert _shown(loaded) == _shown(compiled)
    assert loaded.report.nodes == compiled.report.nodes
    assert loaded.name == compiled.name


def _shown(program: graft.Compiled) -> str:
    """The graph; a truth value and a branch have no type there once loaded."""
    return re.sub(r": (\w*Bool|NoneType|SymInt|<lambda>) =", ": other =", str(program.graph))


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "one tensor": (lambda x: x.relu() + 1.5, (torch.randn(3),), {}),
    "nested": (
        lambda x, d, *, flag: {"a": (x, [d["k"] * 2]), "b": x - 1 if flag else x},
        (torch.randn(3), {"k": torch.randn(2)}),
        {"flag": True},
    ),
    "scalars": (
        lambda x: (x.clamp(-float("inf"), 2.0).to(torch.float64), x.sum(dtype=torch.float32)),
        (torch.randn(3),),
        {},
    ),
    "complex": (lambda x: torch.view_as_real(torch.fft.fft(x) * (1 + 2j)), (torch.randn(4),), {}),
    "several results of one call": (lambda x: x.topk(2), (torch.randn(5),), {}),
    "channels last": (
        lambda x: nn.functional.avg_pool2d(x, 2),
        (torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),),
        {},
    ),
    "a size that depends on data": (lambda x: x.nonzero(), (torch.tensor([0, 3, 4]),), {}),
    "an empty tensor": (lambda x: x.sum(), (torch.empty(0),), {}),
    "a branch": (
        lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y * 2, (x,)),
        (torch.ones(3),),
        {},
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, tmp_path: Path) -> None:
    fn, args, kwargs = PROGRAMS[name]
    compiled = graft.compile(fn, args, kwargs, mode="eager")
    loaded = saved(compiled, tmp_path)
    assert_close(loaded(*args, **kwargs), fn(*args, **kwargs), rtol=0, atol=0)
    check_same(compiled, loaded)


def test_the_other_branch(tmp_path: Path) -> None:
    fn = PROGRAMS["a branch"][0]
    loaded = saved(graft.compile(fn, (torch.ones(3),), mode="eager"), tmp_path)
    assert_close(loaded(-torch.ones(3)), torch.full((3,), -2.0))


def test_ranges_guards_and_their_messages(tmp_path: Path) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], 0).reshape(-1, 2) * 2

    batch = graft.Input(min_shape=(2, 4), max_shape=(9, 4))
    compiled = graft.compile(fn, (batch, batch), mode="eager")
    loaded = saved(compiled, tmp_path)
    for n, m in ((2, 2), (9, 3), (4, 7)):
        x, y = torch.randn(n, 4), torch.randn(m, 4)
        assert_close(loaded(x, y), fn(x, y))
    check_same(compiled, loaded)
    errors = []
    for program in (compiled, loaded):
        with pytest.raises(InputMismatch) as error:
            program(torch.ones(10, 4), torch.ones(2, 4))
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_gears_share_their_weights(tmp_path: Path) -> None:
    model = nn.Linear(4, 30_000)
    shapes = [(1, 4), (8, 4), (3, 4)]
    compiled = graft.compile(model, (graft.Input(gears=shapes),), mode="eager")
    loaded = saved(compiled, tmp_path)
    for shape in shapes:
        x = torch.randn(shape)
        assert_close(loaded(x), model(x))
    with pytest.raises(InputMismatch, match="one of the gears"):
        loaded(torch.ones(2, 4))
    assert len(loaded.reports) == 3
    assert (tmp_path / "program.graft").stat().st_size < 2 * 4 * 30_000 * 4


def test_streams_survive(tmp_path: Path) -> None:
    def fn(x: Tensor) -> Tensor:
        with graft.stream("side"):
            y = x.sin()
        return x.cos() + y

    x = torch.randn(4)
    compiled = graft.compile(fn, (x,), mode="eager")
    loaded = saved(compiled, tmp_path)
    assert loaded.plan.streams == ["main", "side"]
    assert loaded.plan == compiled.plan
    assert_close(loaded(x), fn(x))


def test_a_written_input_and_a_written_buffer(tmp_path: Path) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            x.mul_(2)
            return x + self.count

    model = Counter()
    loaded = saved(graft.compile(model, (torch.ones(2),), mode="eager"), tmp_path)
    x = torch.ones(2)
    assert loaded(x).tolist() == [3, 3]
    assert x.tolist() == [2, 2]
    assert loaded(x).tolist() == [6, 6]  # 4, and the second count
    again = graft.load(tmp_path / "program.graft")  # the file was not written to
    assert again(torch.ones(2)).tolist() == [3, 3]
    again.load_state_dict({"count": torch.full((2,), 10.0)})
    assert again(torch.ones(2)).tolist() == [13, 13]


def test_new_weights_without_compiling(tmp_path: Path) -> None:
    first, second = mixed(), mixed()
    nn.init.normal_(second.scale)
    x = torch.randn(2, 3, 6, 6)
    loaded = saved(graft.compile(first, (x,), mode="eager"), tmp_path)
    assert_close(loaded(x), first(x))
    loaded.load_state_dict(second.state_dict())
    assert_close(loaded(x), second(x))
    path = tmp_path / "program.graft"
    assert_close(graft.load(path, weights=second.state_dict())(x), second(x))
    safetensors.torch.save_file(second.state_dict(), tmp_path / "second.safetensors")
    assert_close(graft.load(path, weights=tmp_path / "second.safetensors")(x), second(x))
    with pytest.raises(WeightMismatch, match=r"missing: scale"):
        loaded.load_state_dict({k: v for k, v in first.state_dict().items() if k != "scale"})
    assert_close(loaded(x), second(x))


def test_new_weights_are_copied(tmp_path: Path) -> None:
    """What is packed of a weight would not see its owner's later changes, what is not, would."""
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    graft.compile(model, (x,), mode="eager").save(tmp_path / "p")
    other = nn.Linear(4, 3)
    wanted = other(x).detach()
    late = graft.load(tmp_path / "p")
    late.load_state_dict(other.state_dict())
    programs = [late, graft.load(tmp_path / "p", weights=other.state_dict())]
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(1)
    for program in programs:
        assert_close(program(x), wanted)


def test_weights_without_values_are_refused(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    graft.compile(model, (x,), mode="eager").save(tmp_path / "p")
    with pytest.raises(WeightMismatch, match=r"bias: it has no values \(device meta\)"):
        graft.load(tmp_path / "p", weights=nn.Linear(4, 3, device="meta").state_dict())


def test_generated_code_and_new_weights(tmp_path: Path) -> None:
    """A weight of zeros is not assumed to stay zero, a norm is folded again, matrices repacked."""
    first, second = mixed(), mixed()
    nn.init.normal_(second.scale)
    x = torch.randn(2, 3, 6, 6)
    compiled = graft.compile(first, (x,))
    loaded = saved(compiled, tmp_path)
    check_same(compiled, loaded)
    assert loaded.report.regions == ["region0"]
    assert_close(loaded(x), first(x))
    loaded.load_state_dict(second.state_dict())
    assert_close(loaded(x), second(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_generated_code_around_an_operator_with_dynamic_sizes(tmp_path: Path) -> None:
    @torch.library.custom_op("packagetest::half", mutates_args=())
    def half(x: Tensor, n: int) -> Tensor:
        return x / 2 + n

    @half.register_fake
    def _(x: Tensor, n: int) -> Tensor:
        return torch.empty_like(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = half(self.linear(x).relu(), x.shape[0])
            return (y * x.shape[0] + 1).sum(0, keepdim=True).expand(x.shape[0], 4)

    model = Model()
    spec = graft.Input(min_shape=(2, 4), max_shape=(64, 4))
    loaded = saved(graft.compile(model, (spec,)), tmp_path)
    assert len(loaded.report.regions) == 2
    for n in (2, 17, 64):
        x = torch.randn(n, 4)
        assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-4)


def test_weights_of_a_tied_model_stay_one(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    model, x = Tied(), torch.randn(2, 4)
    loaded = saved(graft.compile(model, (x,), mode="eager"), tmp_path)
    assert_close(loaded(x), model(x))
    state = model.state_dict()
    state["two.weight"] = torch.zeros(4, 4)
    if len(loaded.captures[0].saved) == 2:
        with pytest.raises(WeightMismatch, match="are one tensor"):
            loaded.load_state_dict(state)


def test_a_state_with_a_name_that_no_state_dict_has(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.ones(3)
            self.register_buffer("a", both, persistent=False)
            self.register_buffer("b", both)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.a + self.b

    x = torch.ones(3)
    loaded = saved(graft.compile(Tied(), (x,), mode="eager", freeze=False), tmp_path)
    loaded.load_state_dict({"b": torch.full((3,), 2.0)})
    assert_close(loaded(x), torch.full((3,), 4.0))


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (1, "weight: int, not a tensor"),
        (torch.eye(2).to_sparse(), "weight: layout torch.sparse_coo for torch.strided"),
    ],
)
def test_weights_that_are_no_dense_tensors(tmp_path: Path, weight: Any, why: str) -> None:
    model, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    compiled = graft.compile(model, (x,), mode="eager")
    for program in (compiled, saved(compiled, tmp_path)):
        with pytest.raises(WeightMismatch, match=why):
            program.load_state_dict({"weight": weight})
        assert_close(program(x), model(x))


@pytest.mark.parametrize("given", [{"weights": 5}, {"sha256": 5}])
def test_arguments_of_load_that_are_something_else(tmp_path: Path, given: dict[str, Any]) -> None:
    graft.compile(lambda x: x + 1, (torch.ones(1),), mode="eager").save(tmp_path / "one.graft")
    with pytest.raises(BadValue, match="got 5"):
        graft.load(tmp_path / "one.graft", **given)


def test_weights_that_are_not_contiguous(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    x = torch.randn(1, 3, 5, 5)
    loaded = saved(graft.compile(model, (x,), mode="eager"), tmp_path)
    assert_close(loaded(x), model(x))


def test_a_pass_that_reads_weights_cannot_be_repeated(tmp_path: Path) -> None:
    def double(gm: Any, example_inputs: Any, config: Any) -> None:
        for node in gm.graph.find_nodes(op="get_attr"):
            setattr(gm, node.target, getattr(gm, node.target) * 2)

    model, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    compiled = graft.compile(model, (x,), mode="eager", post_passes=[double])
    loaded = saved(compiled, tmp_path)
    assert_close(loaded(x), model(x) * 2)
    with pytest.raises(WeightMismatch, match="cannot be repeated"):
        loaded.load_state_dict(model.state_dict())
    assert_close(loaded(x), model(x) * 2)


class Tables(nn.Module):
    """Two tables, which become one: where each begins is a constant that a pass of ours makes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(5, 4), nn.Embedding(7, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.one(ids) + self.two(ids)


def test_tables_that_were_joined_take_new_weights(tmp_path: Path) -> None:
    ids, other = torch.tensor([[4, 0]]), Tables()
    compiled = graft.compile(Tables(), (ids,))
    assert "_merged_starts0" in str(compiled.graph)
    loaded = saved(compiled, tmp_path)
    loaded.load_state_dict(other.state_dict())
    assert_close(loaded(ids), other(ids))


def test_weights_that_are_folded_and_changed(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.weight * 2) + self.bias

    model, x = Scaled(2, 2), torch.ones(1, 2)
    compiled = graft.compile(model, (x,), mode="eager")
    before, state = model(x).detach(), {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        model.bias.add_(1)
    assert_close(saved(compiled, tmp_path)(x), before)  # the program has a copy of the bias
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(NotSavable, match=r"weights=state_dict"):
        compiled.save(tmp_path / "no.graft")
    assert not (tmp_path / "no.graft").exists()
    compiled.save(tmp_path / "yes.graft", weights=state)
    assert_close(graft.load(tmp_path / "yes.graft")(x), before)
    compiled.load_state_dict(state)
    assert_close(saved(compiled, tmp_path)(x), before)


def transposed() -> nn.Module:
    model = nn.Linear(3, 5, bias=False)
    model.weight = nn.Parameter(torch.randn(7, 3).t()[:, 1:6].t())  # strided, at an offset
    return model


GONE = {
    "plain": (lambda: nn.Linear(3, 5), (2, 3)),
    "strided": (transposed, (2, 3)),
    "folded": (lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2)).eval(), (1, 1, 4, 4)),
    "packed": (lambda: nn.Linear(512, 512), (64, 512)),
    "script": (lambda: torch.jit.script(nn.Linear(3, 5)), (2, 3)),
}


@pytest.mark.parametrize("kind", GONE)
@pytest.mark.parametrize("mode", ["eager", pytest.param("default", marks=pytest.mark.slow)])
def test_a_model_that_is_gone_is_saved_with_its_weights(
    tmp_path: Path, kind: str, mode: str
) -> None:
    make, shape = GONE[kind]
    model, x = make(), torch.randn(shape)
    compiled, expected = graft.compile(model, (x,), mode=mode), model(x).detach()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    del model
    gc.collect()
    assert all(torch.equal(value, state[name]) for name, value in compiled.originals().items())
    assert compiled.originals().keys() <= state.keys()
    assert_close(saved(compiled, tmp_path)(x), expected, rtol=1e-4, atol=1e-5)


def test_weights_are_read_by_the_safetensors_library(tmp_path: Path) -> None:
    import zipfile

    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    graft.compile(model, (torch.ones(1, 3),), mode="eager").save(tmp_path / "m.graft")
    with zipfile.ZipFile(tmp_path / "m.graft") as archive:
        found = safetensors.torch.load(archive.read("weights.safetensors"))
    kept = {name: tensor for name, tensor in found.items() if not name.startswith(".pad")}
    assert_close(kept, dict(model.state_dict()), rtol=0, atol=0)


def test_weights_stay_in_the_file_at_multiples_of_64_bytes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 7, bias=False))
    compiled = graft.compile(model, (torch.ones(1, 3),), mode="eager", freeze=False)
    loaded = saved(compiled, tmp_path)
    states = list(loaded.captures[0].states.values())
    addresses = [state.data_ptr() for state in states]
    assert all(address % 64 == 0 for address in addresses)
    assert max(addresses) - min(addresses) < 4096  # in one mapping


def test_a_fresh_process_needs_no_model(tmp_path: Path) -> None:
    model, x = mixed(), torch.randn(2, 3, 6, 6)
    graft.compile(model, (x,), mode="eager").save(tmp_path / "m.graft")
    safetensors.torch.save_file({"x": x, "y": model(x)}, tmp_path / "case.safetensors")
    script = (
        "import sys, torch, torchgraft, safetensors.torch\n"
        "case = safetensors.torch.load_file(sys.argv[2])\n"
        "torch.testing.assert_close(torchgraft.load(sys.argv[1])(case['x']), case['y'])\n"
        "assert 'pickle' not in {m for m in sys.modules if m == 'torch._inductor.codecache'}\n"
    )
    command = [sys.executable, "-c", script, tmp_path / "m.graft", tmp_path / "case.safetensors"]
    process.output(command)


def test_a_program_with_branches_in_python_is_refused(tmp_path: Path) -> None:
    @torch.jit.script
    def branchy(x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return x + 1
        return x

    compiled = graft.compile(branchy, (torch.ones(2),), mode="eager")
    with pytest.raises(NotSavable, match=r"branches that stay in Python \(if on data"):
        compiled.save(tmp_path / "m.graft")


def test_saving_a_loaded_program_copies_it(tmp_path: Path) -> None:
    loaded = saved(graft.compile(lambda x: x + 1, (torch.ones(2),), mode="eager"), tmp_path)
    loaded.save(tmp_path / "copy.graft")
    assert (tmp_path / "copy.graft").read_bytes() == (tmp_path / "program.graft").read_bytes()


def test_saving_a_loaded_program_with_other_weights(tmp_path: Path) -> None:
    first, second, x = nn.Linear(3, 2), nn.Linear(3, 2), torch.ones(1, 3)
    loaded = saved(graft.compile(first, (x,), mode="eager"), tmp_path)
    loaded.load_state_dict(second.state_dict())
    loaded.save(tmp_path / "second.graft")
    assert_close(graft.load(tmp_path / "second.graft")(x), second(x))


def test_a_view_of_an_input_with_other_strides(tmp_path: Path) -> None:
    loaded = saved(
        graft.compile(lambda x: (x.t(), x + 1), (torch.ones(3, 2),), mode="eager"), tmp_path
    )
    x = torch.randn(2, 3).t()  # the call copies it, the view is of what the caller has
    view, _ = loaded(x)
    assert_close(view, x.t())
    assert view.data_ptr() == x.data_ptr()


def test_equal_programs_are_equal_files(tmp_path: Path) -> None:
    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    for name in ("one", "two"):
        graft.compile(model, (x,), mode="eager").save(tmp_path / name)
    found = graft.load(tmp_path / "one"), graft.load(tmp_path / "two")
    assert str(found[0].plan) == str(found[1].plan)


@pytest.mark.slow
def test_a_compiler_with_the_cpp_library_as_an_archive(tmp_path: Path) -> None:
    """Two copies of it in one process crash: AOTInductor's own constructor does, for CUDA."""
    compiler = tmp_path / "g++"
    static = 'case "$*" in *-shared*) exec g++ "$@" -static-libstdc++;; *) exec g++ "$@";; esac'
    compiler.write_text(f"#!/bin/sh\n{static}\n")
    compiler.chmod(0o755)
    model, x = mixed(), torch.randn(2, 3, 9, 9)
    with torch._inductor.config.patch({"cpp.cxx": (None, str(compiler))}):
        program = saved(graft.compile(model, (x,)), tmp_path)
    assert_close(program(x), model(x).detach())
    libraries = []
    with zipfile.ZipFile(tmp_path / "program.graft") as package:
        for name in package.namelist():
            if name.endswith(".so"):
                libraries.append(tmp_path / package.extract(name, tmp_path))
    assert libraries
    for library in libraries:
        needs = process.output(["readelf", "-d", library])
        assert "libstdc++.so.6" in needs


def test_a_product_in_halves_of_any_batch_is_generated_code(tmp_path: Path) -> None:
    """It is written in floats and in halves before one of them goes: both name the weight, which
    must not go with the one."""
    model = nn.Linear(8, 4).eval()
    batch = graft.Input(min_shape=(1, 8), max_shape=(8, 8))
    compiled = graft.compile(model, [batch], precision="float16")
    for program in (compiled, saved(compiled, tmp_path)):
        assert not [node for node in program.report.nodes if "failed" in node.reason]
        for rows in (1, 5):
            x = torch.randn(rows, 8)
            assert_close(program(x), model(x).detach(), rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="nothing says what is mapped")
def test_a_program_that_is_let_go_gives_its_code_back(tmp_path: Path) -> None:
    path, x = tmp_path / "program.graft", torch.randn(4, 8)
    graft.compile(lambda x: x.sin() * 2, (x,)).save(path)

    def mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("region.so")

    def called(x: Tensor) -> Tensor:
        return graft.load(path)(x)

    outputs = [called(x)]
    before = mapped()  # the first library may stay: it owns what all have in common
    with ThreadPoolExecutor(1) as thread:
        outputs += [called(x), called(x), *thread.map(called, [x, x])]
        assert mapped() == before
    for output in outputs:
        assert_close(output, x.sin() * 2)
