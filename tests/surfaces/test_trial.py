"""Programs that a sceptical user tried, each of which once went wrong."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torchgraft as graft
from torchgraft.errors import BadValue, CannotCapture, InputMismatch, NotCopied

OLD = torch.__version__ < "2.12"  # torch's own versions compare as such


def test_a_constant_in_a_program_behind_torch_compile() -> None:
    def fn(x: Tensor) -> Tensor:
        x[:, 1] = 0
        return x + torch.tensor(3)

    x = torch.randn(2, 3)
    expected = fn(x.clone())
    for mode in ("eager", "default"):
        torch.compiler.reset()
        torch.testing.assert_close(
            torch.compile(fn, backend="torchgraft", mode=mode)(x.clone()), expected
        )


def test_a_negated_integer_wraps_before_a_float_is_added() -> None:
    def fn(x: Tensor) -> Tensor:
        return (-x) + 1.0

    x = torch.tensor([0, 5, 128], dtype=torch.uint8)
    assert graft.compile(fn, (x,), mode="eager")(x).tolist() == fn(x).tolist() == [1, 252, 129]


# --- Dynamic sizes ---


def test_sizes_computed_from_a_dynamic_one_may_be_0_or_1() -> None:
    def fn(x: Tensor) -> Tensor:
        half = x.shape[0] // 2
        return x[half:].cumsum(0) + x[1:].sum() + x[:half].view(-1, half).sum()

    compiled = graft.compile(fn, (graft.Input(min_shape=(2,), max_shape=(9,)),), mode="eager")
    for size in (2, 3, 9):
        x = torch.randn(size)
        torch.testing.assert_close(compiled(x), fn(x))


def test_a_dim_that_may_be_1_is_not_squeezed_silently() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.squeeze(0)

    with pytest.raises(CannotCapture, match=r"whose size s\d+ may be 1 (.|\n)*trial"):
        graft.compile(fn, (graft.Input(min_shape=(1, 3), max_shape=(4, 3)),), mode="eager")
    compiled = graft.compile(fn, (graft.Input(min_shape=(2, 3), max_shape=(4, 3)),), mode="eager")
    assert compiled(torch.ones(2, 3)).shape == (2, 3)


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="torch 2.11 traces a convolution for batches of 2 and more")
def test_convolutions_take_a_batch_of_one_among_others() -> None:
    model = torch.nn.Conv2d(3, 4, 3, stride=2).eval()
    spec = graft.Input(min_shape=(1, 3, 8, 8), max_shape=(4, 3, 20, 20))
    compiled = graft.compile(model, (spec,))
    for shape in ((1, 3, 8, 9), (3, 3, 17, 20)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), model(x).detach())


# --- Weights ---


@pytest.mark.slow
def test_frozen_weights_of_a_dynamic_program_are_its_own() -> None:
    model = torch.nn.Linear(4, 4)
    compiled = graft.compile(model, (graft.Input(min_shape=(1, 4), max_shape=(8, 4)),))
    x = torch.randn(2, 4)
    before = compiled(x)
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(compiled(x), before)


def test_a_tensor_that_is_no_buffer_is_copied_as_a_weight_is() -> None:
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = torch.randn(3)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by

    model, x = Scale(), torch.randn(2, 3)
    compiled = graft.compile(model, (x,), mode="eager")
    before = compiled(x)
    model.by.add_(1)
    assert torch.equal(compiled(x), before)


@pytest.mark.parametrize("freeze", [True, False])
def test_new_weights_leave_non_persistent_buffers_alone(freeze: bool) -> None:
    class Scaled(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("scale", torch.randn(3), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    model, x = Scaled(), torch.randn(2, 3)
    compiled = graft.compile(copy.deepcopy(model), (x,), mode="eager", freeze=freeze)
    with torch.no_grad():
        model.weight.add_(1)
    compiled.load_state_dict(model.state_dict())
    torch.testing.assert_close(compiled(x), model(x).detach())


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_sparse_weights(layout: torch.layout) -> None:
    class Mix(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mix", torch.eye(3).to_sparse(layout=layout))

        def forward(self, x: Tensor) -> Tensor:
            return self.mix @ x

    x = torch.randn(3, 2)
    compiled = graft.compile(Mix(), (x,), mode="eager")
    torch.testing.assert_close(compiled(x), x)


# --- Calls ---


def test_a_dict_may_have_its_keys_in_another_order() -> None:
    def fn(pair: dict[str, Tensor], by: float) -> Tensor:
        return (pair["a"] - pair["b"]) * by

    a, b, nan = torch.randn(2), torch.randn(2), float("nan")
    compiled = graft.compile(fn, ({"a": a, "b": b}, 2.0), mode="eager")
    torch.testing.assert_close(compiled({"b": b, "a": a}, 2.0), (a - b) * 2)
    assert (
        graft.compile(fn, ({"a": a, "b": b}, nan), mode="eager")({"b": b, "a": a}, nan)
        .isnan()
        .all()
    )


def test_an_expanded_example_does_not_bind_the_calls() -> None:
    example = torch.randn(1, 4).expand(3, 4)
    windows = torch.randn(6).unfold(0, 4, 1)
    for declared in (example, windows):
        compiled = graft.compile(lambda x: x * 2, (declared,), mode="eager")
        for x in (declared, torch.randn(3, 4)):
            torch.testing.assert_close(compiled(x), x * 2)


def test_a_mismatch_of_sizes_names_the_inputs() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x.view(2, -1).sum(0) + y.sum()

    spec = graft.Input(min_shape=(2,), max_shape=(20,))
    compiled = graft.compile(fn, (spec, spec), mode="eager")
    with pytest.raises(
        InputMismatch, match=r"Mod\(x.shape\[0\], 2\), 0\) .*, got x.shape\[0\] = 7"
    ):
        compiled(torch.ones(7), torch.ones(3))


def test_a_size_may_come_before_the_one_it_derives_from() -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + torch.cat([y, y])

    size = torch.export.Dim("size", min=2, max=10)
    shapes = {"x": {0: 2 * size}, "y": {0: size}}
    exported = torch.export.export(Twice(), (torch.ones(8), torch.ones(4)), dynamic_shapes=shapes)
    compiled = graft.compile(exported, mode="eager")
    assert compiled(torch.ones(6), torch.ones(3)).tolist() == [2.0] * 6
    with pytest.raises(InputMismatch, match=r"'x': declared size 6 \(2\*y.shape\[0\]\) .*, got 8"):
        compiled(torch.ones(8), torch.ones(3))


def test_a_written_input_that_shares_memory_with_another_is_refused() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x.add_(1) * y

    compiled = graft.compile(fn, (torch.ones(3), torch.ones(3)), mode="eager")
    x, memory = torch.ones(3), torch.ones(4, 3)
    with pytest.raises(InputMismatch, match=r"'x': declared memory of its own.*'y' has, too"):
        compiled(x, x)
    with pytest.raises(InputMismatch, match=r"Pass a copy: y.clone\(\)"):
        compiled(memory.view(-1)[:3], memory.view(-1)[2:5])
    assert x.tolist() == [1.0] * 3
    # Neighbours in one buffer, and columns of it, share no element.
    assert compiled(memory[0], memory[1]).tolist() == [2.0] * 3
    columns = torch.ones(3, 2)
    assert compiled(columns[:, 0], columns[:, 1]).tolist() == [2.0] * 3
    assert columns.tolist() == [[2.0, 1.0]] * 3


@pytest.mark.slow
def test_conjugated_and_negated_views_are_resolved() -> None:
    number = torch.tensor(1 + 2j)
    compiled = graft.compile(lambda x: x * 2, (torch.tensor(1.0),))
    assert compiled(number.conj().imag).item() == -4
    compiled = graft.compile(lambda x: x.imag * 2, (number,))
    assert compiled(number.conj()).item() == -4


def test_transforms_and_fake_tensors_are_refused() -> None:
    compiled = graft.compile(lambda x: x.sin().sum(), (torch.ones(3),), mode="eager")
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(InputMismatch, match="got one inside torch"):
            transform(compiled)(torch.ones(3, 3))
    with FakeTensorMode(), pytest.raises(InputMismatch, match="'x': declared a plain tensor, got"):
        compiled(torch.ones(3))


def test_a_config_can_be_copied_and_a_program_says_that_it_cannot() -> None:
    config = graft.Config(mode="eager", inductor={"max_fusion_size": 8})
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    compiled = graft.compile(torch.sin, (torch.zeros(3),), config=config)
    assert compiled(torch.zeros(3)).tolist() == [0.0] * 3
    with pytest.raises(NotCopied, match="sin is compiled: its code cannot be copied"):
        copy.deepcopy(compiled)


@pytest.mark.slow
def test_code_is_generated_for_random_operators() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5) + torch.rand(64)

    x = torch.ones(64)
    compiled = graft.compile(fn, (x,))
    assert not compiled.report.fallbacks
    torch.manual_seed(3)
    first = compiled(x)
    torch.manual_seed(3)
    assert torch.equal(compiled(x), first)
    assert not torch.equal(compiled(x), first)
    assert set(first.floor().tolist()) == {0.0, 2.0}


@pytest.mark.skipif(OLD, reason="torch 2.11 drops the check while it traces, for every backend")
@pytest.mark.parametrize("mode", ["eager", pytest.param("default", marks=pytest.mark.slow)])
def test_checked_factorisations_are_compiled_with_their_check(mode: str) -> None:
    compiled = graft.compile(lambda x: torch.linalg.inv(x) + 1, (torch.eye(3),), mode=mode)
    torch.testing.assert_close(compiled(4 * torch.eye(3)), torch.eye(3) / 4 + 1)
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        compiled(torch.zeros(3, 3))


def test_a_number_read_from_a_tensor() -> None:
    compiled = graft.compile(lambda x: x * x.sum().item(), (torch.ones(3),), mode="eager")
    assert compiled(2 * torch.ones(3)).tolist() == [12.0] * 3


def test_an_input_that_changes_its_shape_in_place_is_refused() -> None:
    with pytest.raises(CannotCapture, match=r"input 'x' changes its shape in place(.|\n)*trial"):
        graft.compile(lambda x: x.t_().add_(1), (torch.ones(2, 3),), mode="eager")


@pytest.mark.parametrize("door", ["graft.compile", "torch.compile"])
@pytest.mark.parametrize("mode", ["eager", pytest.param("default", marks=pytest.mark.slow)])
def test_inputs_that_swap_their_values(door: str, mode: str) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        old = x.clone()
        x.copy_(y)
        y.copy_(old)
        return x - y

    x, y = torch.ones(3), torch.zeros(3)
    if door == "torch.compile":
        result = torch.compile(fn, backend="torchgraft", mode=mode)(x, y)
    else:
        result = graft.compile(fn, (x.clone(), y.clone()), mode=mode)(x, y)
    assert (x.sum(), y.sum(), result.sum()) == (0, 3, -3)


def test_an_integer_to_a_negative_tensor() -> None:
    def fn(x: Tensor) -> Tensor:
        return x ** torch.tensor(-2)

    run = torch.compile(fn, backend="torchgraft", mode="eager")
    assert run(torch.tensor([1, 2, -1])).tolist() == [1, 0, 1]


# --- Mistakes ---


def test_one_tensor_may_stand_for_the_inputs() -> None:
    assert (
        graft.compile(torch.nn.ReLU(), torch.ones(2, 2), mode="eager")(torch.ones(2, 2)).sum() == 4
    )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: graft.compile(3, (torch.ones(2),)), "model: expected a module, a function"),
        (lambda: graft.compile(abs, (torch.ones(2),), config=3), "config: expected a graft.Config"),
        (lambda: graft.Config(registry=3), "Config.registry: expected a graft.Registry"),  # type: ignore[arg-type]
        (lambda: graft.Input((2,), device="nope"), "Input.device: expected a device such as"),
    ],
)
def test_a_wrong_argument_is_named(wrong: Any, says: str) -> None:
    with pytest.raises(BadValue, match=says):
        wrong()


def test_where_a_program_cannot_be_captured_is_not_our_own_code() -> None:
    with pytest.raises(CannotCapture) as caught:
        graft.compile(torch.nn.Linear(2, 2), (torch.ones(1, 3),), mode="eager")
    assert caught.value.line is None or "torchgraft" not in caught.value.line


@pytest.mark.slow
def test_an_exported_program_that_is_channels_last_and_dynamic() -> None:
    def last(x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)

    model = torch.nn.Conv2d(3, 4, 1)
    size = torch.export.Dim("size", min=2, max=8)
    shapes = {"input": {0: size}}
    exported = torch.export.export(model, (last(torch.ones(4, 3, 5, 5)),), dynamic_shapes=shapes)
    compiled = graft.compile(exported)
    for x in (torch.randn(3, 3, 5, 5), last(torch.randn(5, 3, 5, 5))):
        torch.testing.assert_close(compiled(x), model(x).detach())


@pytest.mark.parametrize("packed", [False, True])
def test_a_declared_size_that_will_be_refused_is_told_when_compiling(
    packed: bool, tmp_path: Path
) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    spec = graft.Input(min_shape=(1, 5, 16), max_shape=(8, 5, 16))
    said = r"calls with src.shape\[0\] = 1, which was declared, will be refused: compiling assumed "
    cache = tmp_path if packed else None
    with pytest.warns(UserWarning, match=said + r"Ne\(src.shape\[0\], 1\) at .*as a gear"):
        compiled = graft.compile(layer, (spec,), mode="eager", cache_dir=cache)
    assert [n for n in compiled.report.notes if n.startswith("calls with src.shape[0] = 1")]
    x = torch.randn(8, 5, 16)
    torch.testing.assert_close(compiled(x), layer(x))
    with pytest.raises(InputMismatch, match=r"got src.shape\[0\] = 1"):
        compiled(x[:1])
    gears = graft.Input(gears=[(1, 5, 16), (8, 5, 16)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        both = graft.compile(layer, (gears,), mode="eager")
    torch.testing.assert_close(both(x[:1]), layer(x[:1]))
