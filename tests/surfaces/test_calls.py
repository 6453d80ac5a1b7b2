"""What programs take and give: structure, aliasing, mutation, randomness, dtypes, weights."""

from __future__ import annotations

import copy
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, Mlp
from torch import Tensor, nn

import torchgraft as graft
from torchgraft._torch import generator
from torchgraft.errors import (
    BadValue,
    CannotCapture,
    InputMismatch,
    Specialised,
    WeightMismatch,
)

MODES = ["eager", pytest.param("default", marks=pytest.mark.slow)]


class Fn(nn.Module):
    """A module from a function."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_results_agree_with_eager(case: str, mode: str) -> None:
    model, args = CASES[case]()
    compiled = graft.compile(model, args, mode=mode)
    for _ in range(2):
        fresh = tuple(a.clone() if a.dtype == torch.int64 else torch.randn_like(a) for a in args)
        torch.testing.assert_close(compiled(*fresh), model(*(a.clone() for a in fresh)))
    expected = "aten" if mode == "eager" else "generated"
    assert {node.runs for node in compiled.report.nodes} == {expected}


# --- Structure ---


@pytest.mark.parametrize("mode", MODES)
def test_keyword_nested_and_constant_inputs(mode: str) -> None:
    def fn(x: Tensor, pair: Any, *, scale: float, mask: Any = None, flag: bool = True) -> Any:
        y = x + pair["a"] * scale + pair["b"][0]
        return {"y": y, "rest": [mask, (y * 2 if flag else y, 3)]}

    x, a, b = torch.randn(3), torch.randn(3), torch.randn(3)
    pair = {"a": a, "b": [b]}
    compiled = graft.compile(fn, (x, pair), {"scale": 0.5, "mask": None}, mode=mode)
    out = compiled(x, pair, scale=0.5, mask=None)
    torch.testing.assert_close(out, fn(x, pair, scale=0.5))
    torch.testing.assert_close(compiled(x, pair, mask=None, scale=0.5), out)  # other order
    with pytest.raises(InputMismatch, match=r"'scale': declared the constant 0.5, got 0.25"):
        compiled(x, pair, scale=0.25, mask=None)
    with pytest.raises(InputMismatch, match="declared a call like"):
        compiled(x, {"a": a, "b": [b, b]}, scale=0.5, mask=None)
    with pytest.raises(InputMismatch, match=r"pair\['b'\]\[0\]"):
        compiled(x, {"a": a, "b": [torch.randn(4)]}, scale=0.5, mask=None)


@pytest.mark.parametrize("mode", MODES)
def test_outputs_that_are_none_numbers_inputs_views_and_twice_the_same(mode: str) -> None:
    def fn(x: Tensor) -> Any:
        y = x * 2
        return None, 7, x, x.view(-1), y, y, y.t(), "text"

    x = torch.randn(2, 3)
    compiled = graft.compile(fn, (x,), mode=mode)
    none, seven, same, view, y, again, turned, text = compiled(x)
    assert (none, seven, text) == (None, 7, "text")
    assert same is x
    assert view.data_ptr() == x.data_ptr()
    parameter = nn.Parameter(x)
    assert compiled(parameter)[2] is parameter
    assert y.data_ptr() == again.data_ptr() == turned.data_ptr()
    torch.testing.assert_close((same, view, y, again, turned), fn(x)[2:7])
    assert turned.stride() == (1, 3)


@pytest.mark.parametrize("mode", MODES)
def test_no_inputs_no_outputs_and_zero_elements(mode: str) -> None:
    compiled = graft.compile(lambda: torch.ones(2) + 1, (), mode=mode)
    torch.testing.assert_close(compiled(), torch.full((2,), 2.0))
    assert graft.compile(lambda x: None, (torch.ones(1),), mode=mode)(torch.ones(1)) is None
    empty = torch.randn(0, 8)
    mlp = Mlp()
    compiled = graft.compile(mlp, (empty,), mode=mode)
    torch.testing.assert_close(compiled(empty), mlp(empty))
    assert "failed" not in {node.kind for node in compiled.report.nodes}


def test_two_outputs_computed_alike_stay_two_tensors() -> None:
    compiled = graft.compile(lambda x: (x + 1, x + 1, x.clone()), (torch.ones(3),), mode="eager")
    x = torch.ones(3)
    one, two, copied = compiled(x)
    assert len({one.data_ptr(), two.data_ptr(), copied.data_ptr(), x.data_ptr()}) == 4


# --- Declared inputs ---


@pytest.mark.parametrize("mode", MODES)
def test_a_range_of_shapes_holds_for_all_of_it(mode: str) -> None:
    model = Mlp()
    spec = graft.Input(min_shape=(1, 8), max_shape=(32, 8))
    compiled = graft.compile(model, (spec,), mode=mode)
    for rows in (1, 2, 7, 32):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), model(x))
    with pytest.raises(InputMismatch, match=r"a size from 1 to 32 in dim 0, got 33"):
        compiled(torch.randn(33, 8))


@pytest.mark.parametrize("mode", MODES)
def test_two_inputs_that_must_agree_are_checked(mode: str) -> None:
    spec = graft.Input(min_shape=(2, 4), max_shape=(9, 4))
    compiled = graft.compile(lambda x, y: (x * y, x.shape[0]), (spec, spec), mode=mode)
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    product, rows = compiled(x, y)
    torch.testing.assert_close(product, x * y)
    assert rows == 5
    with pytest.raises(InputMismatch, match="'y': declared size 5"):
        compiled(x, torch.randn(6, 4))


def test_a_range_from_zero_or_one_is_not_traced_as_if_those_could_not_occur() -> None:
    def fn(x: Tensor) -> Tensor:
        flat = x.reshape(x.shape[0], 6)
        return (flat.sum(0, keepdim=True) + flat).relu()

    compiled = graft.compile(
        fn, (graft.Input(min_shape=(0, 2, 3), max_shape=(8, 2, 3)),), mode="eager"
    )
    for rows in (0, 1, 2, 8):
        x = torch.randn(rows, 2, 3)
        torch.testing.assert_close(compiled(x), fn(x))


@pytest.mark.slow
def test_a_range_from_one_image_on_is_not_generated_for_several_alone(tmp_path: Path) -> None:
    """Inductor looked at the hint of a batch where it computed a view's strides, and where it chose
    a transposed convolution's layout."""

    class Upscale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 6, 2, stride=2)
            self.out = nn.Conv2d(6, 6, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.out(self.up(x).relu())
            b, _, h, w = y.shape
            rows = y.view(b, 2, 3, h, w).permute(0, 1, 3, 4, 2).contiguous().sigmoid()
            return rows.view(b, -1, 3).transpose(1, 2).reshape(b * 3, -1)

    model = Upscale().eval()
    spec = graft.Input(min_shape=(1, 3, 4, 4), max_shape=(8, 3, 4, 4))
    compiled = graft.compile(model, (spec,), require_full_compilation=True)
    compiled.save(tmp_path / "up.graft")
    loaded = graft.load(tmp_path / "up.graft")
    for batch in (1, 3, 8):
        x = torch.randn(batch, 3, 4, 4)
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(loaded(x), model(x))


@pytest.mark.parametrize("traced", [False, True])
def test_a_table_may_be_as_long_as_the_longest_input(traced: bool) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(16.0).expand(1, -1))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table[:, : x.size(1)]

    model: Any = Positions()
    if traced:
        model = torch.jit.trace(model, torch.ones(2, 5))
    spec = graft.Input(min_shape=(2, 3), max_shape=(2, 16))
    compiled = graft.compile(model, (spec,), mode="eager")
    for length in (3, 15, 16):
        x = torch.randn(2, length)
        assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize(
    ("fn", "only"),
    [
        (lambda x: x + 1 if x.shape[0] == 9 else x, "9"),
        (lambda x: x + 1 if x.shape[0] > 4 else x, "5 to 9"),
    ],
)
def test_a_dim_that_the_program_fixes_is_an_error(fn: Any, only: str) -> None:
    spec = graft.Input(min_shape=(2, 5), max_shape=(9, 5))
    with pytest.raises(Specialised, match=rf"'x', dim 0: declared 2 to 9.*only works for {only}"):
        graft.compile(fn, (spec,), mode="eager")


def test_tied_sizes_with_different_ranges_say_what_to_write() -> None:
    wide = {"min_shape": (2, 3), "max_shape": (16, 3)}
    narrow = graft.Input(min_shape=(2, 3), max_shape=(8, 3))
    with pytest.raises(CannotCapture, match=r"traced with x \(8, 3\), y \(16, 3\).*example="):
        graft.compile(lambda x, y: x + y, (narrow, graft.Input(**wide)), mode="eager")
    fitting = graft.Input(**wide, example=(8, 3))
    with pytest.raises(Specialised, match=r"declared 2 to 16, but .* only works for 2 to 8"):
        graft.compile(lambda x, y: x + y, (narrow, fitting), mode="eager")
    any_rows = {"min_shape": (2, 3), "max_shape": (None, 3)}
    longer = graft.Input(min_shape=(3, 3), max_shape=(None, 3), example=(17, 3))
    compiled = graft.compile(
        lambda x, y: x + y[1:], (graft.Input(**any_rows), longer), mode="eager"
    )
    torch.testing.assert_close(
        compiled(torch.ones(5, 3), torch.ones(6, 3)), torch.full((5, 3), 2.0)
    )
    with pytest.raises(InputMismatch, match="size 6"):
        compiled(torch.ones(5, 3), torch.ones(5, 3))
    with pytest.raises(BadValue, match=r"Input\.example"):
        graft.Input(**wide, example=(17, 3))


def test_what_else_is_assumed_of_sizes_is_checked_at_the_call() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.reshape(-1, 4) if x.shape[0] % 2 == 0 else x

    compiled = graft.compile(fn, (graft.Input(min_shape=(2, 4), max_shape=(16, 4)),), mode="eager")
    torch.testing.assert_close(compiled(torch.ones(6, 4)), torch.ones(6, 4))
    with pytest.raises(InputMismatch, match="declared sizes with Eq"):
        compiled(torch.ones(5, 4))


@pytest.mark.parametrize("mode", MODES)
def test_gears(mode: str) -> None:
    model = Mlp()
    compiled = graft.compile(model, (graft.Input(gears=[(1, 8), (4, 8)]),), mode=mode)
    for rows in (1, 4, 1):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), model(x))
    assert len(compiled.reports) == 2
    with pytest.raises(InputMismatch, match="one of the gears"):
        compiled(torch.randn(2, 8))


def test_strides_other_than_declared_are_taken() -> None:
    compiled = graft.compile(lambda x: x * 2, (torch.randn(3, 4),), mode="eager")
    x = torch.randn(4, 3).t()
    torch.testing.assert_close(compiled(x), x * 2)
    declared = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    compiled = graft.compile(lambda x: x.relu(), (declared,), mode="eager")
    assert compiled(declared).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(compiled(declared.contiguous()), declared.relu())


def test_outputs_that_are_views_of_an_input_are_so_whatever_its_strides() -> None:
    def fn(x: Tensor) -> Any:
        return x, x.t(), x[1:], x + 1

    compiled = graft.compile(fn, (torch.randn(3, 4),), mode="eager")
    for x in (torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(3, 8)[:, ::2]):
        *views, fresh = compiled(x)
        for got, want in zip(views, fn(x)[:3], strict=True):
            assert (got.data_ptr(), got.stride()) == (want.data_ptr(), want.stride())
            assert got.shape == want.shape
        torch.testing.assert_close(fresh, x + 1)
        compiled(x)[1].zero_()
        assert not x.any()


def test_a_leaf_that_requires_grad_is_not_written_behind_autograd() -> None:
    compiled = graft.compile(lambda x: x.add_(1), (torch.zeros(2),), mode="eager")
    leaf = torch.zeros(2, requires_grad=True)
    with pytest.raises(InputMismatch, match="a leaf that requires grad"):
        compiled(leaf)  # eager raises, too
    assert not leaf.any()
    with torch.no_grad():
        compiled(leaf)
    assert leaf.tolist() == [1.0, 1.0]


def test_sparse_and_nested_tensors() -> None:
    sparse = torch.eye(3).to_sparse()
    compiled = graft.compile(lambda x: x.to_dense() + 1, (sparse,), mode="eager")
    torch.testing.assert_close(compiled(sparse), torch.eye(3) + 1)
    with pytest.raises(InputMismatch, match="declared a sparse_coo tensor, got layout"):
        compiled(torch.eye(3))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(CannotCapture, match="input 'x' is a nested tensor"):
        graft.compile(lambda x: x + 1, (nested,), mode="eager")
    compiled = graft.compile(lambda x: x + 1, (torch.ones(2, 3),), mode="eager")
    for wrong, what in ((nested, "a nested tensor"), (torch.ones(2, 3).to_sparse(), "sparse_coo")):
        with pytest.raises(InputMismatch, match=what):
            compiled(wrong)


def test_autocast_is_the_models_or_that_of_the_compile() -> None:
    """A program is what was captured: autocast around a later call changes nothing."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)

    def half(x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    assert graft.compile(Fn(half), (x,), mode="eager")(x).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled = graft.compile(model, (x,), mode="eager")
    assert compiled(x).dtype == torch.bfloat16


def test_gradients_and_autocast_of_the_caller_do_not_reach_the_program() -> None:
    model = Mlp()
    compiled = graft.compile(model, (torch.randn(2, 8),), mode="eager")
    x = torch.randn(2, 8, requires_grad=True)
    assert not compiled(x).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(x.detach()).dtype == torch.float32
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))


# --- Mutation and randomness ---


@pytest.mark.parametrize("mode", MODES)
def test_mutated_inputs_are_written_back(mode: str) -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        x.add_(1)
        y[0] = x[0] * 2
        return x, x + y, x[1:]

    def inputs() -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        return torch.randn(3, 2), torch.randn(3, 2)

    compiled = graft.compile(fn, inputs(), mode=mode)
    ours, theirs = inputs(), inputs()
    got, want = compiled(*ours), fn(*theirs)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(got, want)
    assert got[0].data_ptr() == ours[0].data_ptr()
    ours[0].zero_()
    assert not got[2].any()  # a view of the written input
    strided = (torch.randn(2, 3).t(), torch.randn(2, 3).t())
    theirs = copy.deepcopy(strided)
    torch.testing.assert_close(compiled(*strided), fn(*theirs))
    torch.testing.assert_close(strided, theirs)


@pytest.mark.parametrize("mode", MODES)
def test_buffers_are_written_back(mode: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).train()
    twin = copy.deepcopy(model)
    x = torch.randn(6, 4)
    compiled = graft.compile(model, (x,), mode=mode)
    before = model[0].running_mean.clone()
    for _ in range(2):
        torch.testing.assert_close(compiled(x), twin(x).detach())
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert not torch.equal(before, model[0].running_mean)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("door", ["graft.compile", "torch.compile"])
def test_random_operators_follow_the_seed(mode: str, door: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=True) + torch.rand_like(x)

    x = torch.ones(64)
    if door == "graft.compile":
        run: Any = graft.compile(fn, (x,), mode=mode)
    else:
        run = torch.compile(fn, backend="torchgraft", mode=mode)

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return run(x)

    one = drawn(1)
    assert not torch.equal(one, run(x))
    assert torch.equal(one, drawn(1))
    assert not torch.equal(one, drawn(2))
    if mode == "eager":
        torch.manual_seed(1)
        torch.testing.assert_close(one, fn(x))
    else:
        assert graft.reports()[-1].coverage == 1


# --- Weights ---


def test_frozen_weights_are_copies_and_the_report_says_so() -> None:
    model = Mlp()
    x = torch.randn(2, 8)
    compiled = graft.compile(model, (x,), mode="eager")
    before = model(x).detach()
    with torch.no_grad():
        model.up.weight.zero_()
    torch.testing.assert_close(compiled(x), before)
    assert any("3 weights are frozen" in note for note in compiled.report.notes)


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_returned_weights_are_the_callers_when_frozen_and_the_modules_when_not(
    mode: str, freeze: bool
) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.arange(6.0).view(2, 3))

        def forward(self, x: Tensor) -> Any:
            wide = self.w.unsqueeze(0).expand(9, 2, 3) * 2  # too large to fold before Inductor
            return x + self.w, self.w, self.w.t(), self.w * 2, wide, self.w

    model, x = Returns(), torch.ones(2, 3)
    compiled = graft.compile(model, (x,), mode=mode, freeze=freeze)
    want = [t.detach().clone() for t in model(x)]
    outputs = compiled(x)
    assert outputs[1] is outputs[5]  # as eager
    assert outputs[2].data_ptr() == outputs[1].data_ptr()
    assert (outputs[1].data_ptr() == model.w.data_ptr()) == (not freeze)
    for output in outputs if freeze else (outputs[0], outputs[3], outputs[4]):
        output.fill_(7)
    for one in (x, x.t().contiguous().t()):  # as declared, and adapted
        torch.testing.assert_close(compiled(one), tuple(want))


@pytest.mark.parametrize("mode", MODES)
def test_new_weights(mode: str) -> None:
    model, other = Mlp(), Mlp()
    x = torch.randn(2, 8)
    compiled = graft.compile(model, (x,), mode=mode)
    compiled.load_state_dict(other.state_dict())
    torch.testing.assert_close(compiled(x), other(x).detach())
    with pytest.raises(WeightMismatch, match=r"missing: up.bias"):
        compiled.load_state_dict({"up.weight": torch.zeros(16, 8)})
    with pytest.raises(WeightMismatch, match=r"up.bias: torch.float32 \(3,\)"):
        compiled.load_state_dict({**other.state_dict(), "up.bias": torch.zeros(3)})
    torch.testing.assert_close(compiled(x), other(x).detach())


@pytest.mark.parametrize("mode", MODES)
def test_unfrozen_weights_are_read_at_each_call(mode: str) -> None:
    model = Mlp()
    x = torch.randn(2, 8)
    compiled = graft.compile(model, (x,), mode=mode, freeze=False)
    behind = torch.compile(model, backend="torchgraft", mode=mode)
    with torch.no_grad():
        behind(x)
        model.up.weight.mul_(3)
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(behind(x), model(x))
    compiled.load_state_dict(Mlp().state_dict())
    torch.testing.assert_close(compiled(x), model(x).detach())  # the module's own tensors


# --- Dtypes ---

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_that_eager_takes(dtype: torch.dtype, mode: str) -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        return torch.cat([x, y]).reshape(2, -1).t(), torch.where(x == y, x, y)

    make = torch.randn(4, dtype=torch.complex64) if dtype.is_complex else torch.randn(4) * 3
    x, y = make.to(dtype), make.flip(0).to(dtype)
    compiled = graft.compile(fn, (x, y), mode=mode)
    torch.testing.assert_close(compiled(x, y), fn(x, y))
    if mode == "default" and dtype.is_complex:
        assert {node.reason for node in compiled.report.fallbacks} == {"complex numbers"}


@pytest.mark.slow
def test_what_the_generator_refuses_runs_on_aten_beside_what_it_takes() -> None:
    def fn(x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x.relu() + 1)
        return spectrum.abs().sum(-1) * 2

    x = torch.randn(3, 8)
    compiled = graft.compile(fn, (x,))
    torch.testing.assert_close(compiled(x), fn(x))
    assert 0 < compiled.report.coverage < 1
    assert {node.reason for node in compiled.report.fallbacks} == {"complex numbers"}


@pytest.mark.parametrize("mode", MODES)
def test_sizes_that_depend_on_data(mode: str) -> None:
    def fn(x: Tensor) -> Any:
        kept = x[x > 0] * 2
        return kept, kept.sum(), x + 1

    x = torch.randn(32)
    compiled = graft.compile(fn, (x,), mode=mode)
    torch.testing.assert_close(compiled(x), fn(x))
    torch.testing.assert_close(compiled(-x), fn(-x))


# --- Threads ---


@pytest.mark.parametrize("mode", MODES)
def test_many_threads_call_and_compile_at_once(mode: str) -> None:
    model = Mlp()
    x = torch.randn(2, 8)
    want = model(x).detach()
    shared = graft.compile(model, (x,), mode=mode)
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            own = graft.compile(model, (x,), config=graft.Config(mode="eager", freeze=bool(i % 2)))
            for _ in range(20):
                torch.testing.assert_close(shared(x), want)
                torch.testing.assert_close(own(x), want)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_views_with_gaps_keep_their_strides(dynamic: bool) -> None:
    """Between regions, where the next one counts on them, and as outputs."""

    def halves(x: Tensor) -> tuple[Tensor, ...]:
        y = x.t().contiguous().t() * 2  # lies column by column, and so do its halves
        return y[: x.shape[0] // 2], y[x.shape[0] // 2 :]

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        with graft.stream("side"):
            first, last = halves(x)
        return torch.cat([last, first]) + 1, first

    x = torch.randn(64, 32)
    declared = graft.Input(min_shape=(4, 32), max_shape=(128, 32)) if dynamic else x
    compiled = graft.compile(model, (declared,))
    found, want = compiled(x), model(x)
    torch.testing.assert_close(found, want)
    assert found[1].stride() == want[1].stride() == (1, 64)


def _pad_products(graph: torch.fx.Graph) -> None:
    """What the generator does on CUDA where it pays: the product becomes a view with gaps."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        left, right = node.args
        with graph.inserting_before(node):
            wide = graph.call_function(aten.constant_pad_nd.default, (right, [0, 1]))
            wide.meta["val"] = wide.target(right.meta["val"], [0, 1])
            product = graph.call_function(aten.mm.default, (left, wide))
            product.meta["val"] = product.target(left.meta["val"], wide.meta["val"])
            part = graph.call_function(aten.slice.Tensor, (product, 1, 0, -1))
            part.meta["val"] = part.target(product.meta["val"], 1, 0, -1)
        node.replace_all_uses_with(part)
        graph.erase_node(node)


@pytest.mark.slow
def test_a_product_that_the_generator_pads_keeps_its_strides() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        with graft.stream("side"):
            product = x @ x
        return product + 1, product

    x = torch.randn(3, 3)
    compiled = graft.compile(model, (x,), inductor={"joint_custom_post_pass": _pad_products})
    found, want = compiled(x), model(x)
    torch.testing.assert_close(found, want)
    assert found[1].stride() == (3, 1)


@pytest.mark.slow
def test_a_view_of_one_of_several_results() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = (x * 2).sort(dim=0)
        return values.t()[::2], places[:, ::3]

    x = torch.randn(9, 6)
    compiled = graft.compile(model, (x,))
    for found, want in zip(compiled(x), model(x), strict=True):
        torch.testing.assert_close(found, want)
        assert found.stride() == want.stride()


@pytest.mark.slow
def test_a_program_for_a_range_is_quiet_and_in_the_generators_cache() -> None:
    """Inductor warns with a traceback where its cache cannot take a graph."""
    said: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = said.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._inductor.codecache")
    logger.addHandler(handler)
    try:
        declared = graft.Input(min_shape=(4, 32), max_shape=(128, 32))
        for _ in range(2):
            hits = generator.cache_hits()
            graft.compile(lambda x: (x * 3 + 1).relu(), (declared,))
    finally:
        logger.removeHandler(handler)
    assert not said
    assert generator.cache_hits() == hits + 1
