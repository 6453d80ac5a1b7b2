"""Convolutions as sums over what each output sees, and of each channel by itself: the same answers,
and only where it applies."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact import Several, check
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import torchgraft as graft
from torchgraft.codegen import convolve, depthwise, direct, own, winograd


class Seen(list[tuple[int, int]]):
    """How many convolutions of each region are computed by the one and the other."""

    then: list[Any]
    """What is done with the results of a region's."""


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """On whatever processor."""
    found = Seen()
    original = depthwise.as_code

    def told(gm: Any, mode: Any) -> bool:
        did = original(gm, mode)
        ops = direct.direct(), depthwise.depthwise()
        calls = [gm.graph.find_nodes(op="call_function", target=op) for op in ops]
        found.append((len(calls[0]), len(calls[1])))
        found.then = [node.args[9] for nodes in calls for node in nodes]
        return did

    monkeypatch.setattr(own, "is_ahead", lambda *vendors: True)
    monkeypatch.setattr(winograd, "as_code", lambda *_: False)
    monkeypatch.setattr(convolve, "as_products", lambda *_: None)
    monkeypatch.setattr(depthwise, "as_code", told)
    return found


KERNELS = st.tuples(st.integers(1, 5), st.integers(1, 5))
PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))
SHAPES = st.tuples(
    st.sampled_from([3, 8, 17, 32, 40]), st.sampled_from([12, 16, 24, 40, 64, 72]), KERNELS, PAIRS,
    st.tuples(st.integers(0, 3), st.integers(0, 3)), PAIRS, st.integers(9, 19), st.integers(9, 19),
    st.integers(1, 3), st.booleans(), st.booleans(),
)  # fmt: skip


@settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.lists(SHAPES, min_size=8, max_size=8), st.booleans())
def test_any_shape_is_right(shapes: list[Any], alone: bool) -> None:
    """Many shapes in one program, which is one compiler's work; channels together or alone."""
    torch.manual_seed(0)
    layers, images = [], []
    for depth, outs, kernel, steps, pads, grown, high, wide, count, biased, last in shapes:
        high, wide = (
            max(side, 1 + (size - 1) * by - 2 * pad)
            for side, size, by, pad in zip((high, wide), kernel, grown, pads, strict=True)
        )
        how = {"stride": steps, "padding": pads, "dilation": grown, "bias": biased}
        groups = outs if alone else 1
        layers.append(nn.Conv2d(groups if alone else depth, outs, kernel, groups=groups, **how))
        image = torch.randn(count, groups if alone else depth, high, wide)
        images.append(image.contiguous(memory_format=torch.channels_last) if last else image)
    check(Several(layers).eval(), *images)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "one pixel": (lambda: nn.Conv2d(32, 48, 1), (1, 0)),
    "groups": (lambda: nn.Conv2d(32, 64, 3, groups=2), (1, 0)),
    "small groups": (lambda: nn.Conv2d(32, 64, 3, padding=1, groups=4), (1, 0)),
    "groups, one channel each": (lambda: nn.Conv2d(32, 32, 3, padding=1, groups=32), (0, 1)),
    "padded as it needs": (lambda: nn.Conv2d(32, 16, 3, padding="same"), (1, 0)),
    "not padded, by name": (lambda: nn.Conv2d(32, 16, 3, padding="valid"), (1, 0)),
    "as large as the image": (lambda: nn.Conv2d(32, 32, 8, padding=1), (1, 0)),
    "a few outputs": (lambda: nn.Conv2d(32, 32, 12), (0, 0)),
    "few channels out": (lambda: nn.Conv2d(32, 4, 3), (0, 0)),
    "several outputs for a channel": (lambda: nn.Conv2d(32, 64, 3, groups=32), (0, 0)),
    "transposed": (lambda: nn.ConvTranspose2d(32, 32, 3), (0, 0)),
    "one dimension": (lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(32, 32, 3)), (0, 0)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(made: Seen, name: str) -> None:
    torch.manual_seed(0)
    make, expected = LAYERS[name]
    check(make().eval(), torch.randn(2, 32, 12, 12))
    assert made == [expected]


THEN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "relu": (F.relu, "relu"),
    "relu6": (F.relu6, "clamp 0.0 6.0"),
    "hardtanh": (F.hardtanh, "clamp -1.0 1.0"),
    "clamp": (lambda y: y.clamp(-0.5, 2), "clamp -0.5 2.0"),
    "silu": (F.silu, "silu"),
    "gelu": (F.gelu, "gelu"),
    "gelu by tanh": (lambda y: F.gelu(y, approximate="tanh"), ""),
    "a lower limit": (lambda y: y.clamp(min=0.25), ""),
    "an infinite limit": (lambda y: y.clamp(0, float("inf")), ""),
    "a gate of another": (lambda y: torch.sigmoid(y) * y.sin(), ""),
}


@pytest.mark.parametrize("name", THEN)
def test_what_is_done_number_by_number_is_part_of_it(made: Seen, name: str) -> None:
    follows, expected = THEN[name]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(8, 24, 3), nn.BatchNorm2d(24)
            self.alone = nn.Conv2d(24, 24, 3, padding=1, groups=24)

        def forward(self, x: Tensor) -> Tensor:
            y = follows(self.norm(self.first(x)))
            return follows(self.alone(y) + y)

    check(Model().eval(), torch.randn(1, 8, 12, 11))
    assert made == [(1, 1)]
    assert made.then == [expected] * 2


def test_what_is_no_number_stays_where_it_is_seen() -> None:
    layer, x = (
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU6()).eval(),
        torch.randn(1, 16, 9, 9),
    )
    x[0, 3, 4, 4] = float("nan")
    with torch.no_grad():
        found, expected = graft.compile(layer, (x,))(x), layer(x)
    assert found.isnan().equal(expected.isnan())
    assert int(found.isnan().sum()) == 9 * 16


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_weights_that_are_no_parameters_and_biases_with_gaps(
    monkeypatch: pytest.MonkeyPatch, fast: bool, alone: bool
) -> None:
    """Nothing is frozen then, and nothing packed ahead."""
    if fast:
        monkeypatch.undo()
        monkeypatch.setattr(own, "is_ahead", lambda *vendors: True)
    kernel = torch.randn(32, 1 if alone else 16, 3, 3)
    groups = 32 if alone else 1
    one, many, x = torch.randn(1), torch.randn(64), torch.randn(1, 32 if alone else 16, 20, 20)

    def model(x: Tensor, one: Tensor, many: Tensor) -> tuple[Tensor, Tensor]:
        first = F.conv2d(x, kernel, one.expand(32), padding=1, groups=groups)
        return first, F.conv2d(x, kernel, many[::2], padding=1, groups=groups)

    found = graft.compile(model, (x, one, many))(x, one, many)
    torch.testing.assert_close(found, model(x, one, many), rtol=1e-4, atol=1e-4)


def test_other_types_and_weights_that_change_are_not(made: Seen) -> None:
    layer, x = nn.Conv2d(16, 16, 3).eval(), torch.randn(1, 16, 12, 12)
    graft.compile(layer, (x,), freeze=False)
    graft.compile(nn.Conv2d(16, 16, 3).double().eval(), (x.double(),))
    graft.compile(layer, (graft.Input(min_shape=(1, 16, 12, 12), max_shape=(8, 16, 12, 12)),))
    assert made == [(0, 0)] * 3


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_share_the_outputs(made: Seen, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(16, 100, 3, padding=1), nn.Conv2d(16, 200, 5), nn.Conv2d(3, 16, 3, padding=1),
        nn.Conv2d(64, 64, 3, groups=64),
    ]  # fmt: skip
    sides = ((16, 17, 18), (16, 7, 7), (3, 20, 21), (64, 9, 9))
    try:
        check(Several(layers).eval(), *(torch.randn(2, *size) for size in sides))
    finally:
        torch.set_num_threads(before)
    assert made == [(3, 1)]


def test_a_package_computes_so_too_and_takes_new_weights(
    made: Seen, tmp_path: pathlib.Path
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.alone = nn.Conv2d(3, 24, 3, 2), nn.Conv2d(24, 24, 3, groups=24)
            self.norm, self.last = nn.BatchNorm2d(24), nn.Conv2d(24, 40, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.alone(self.stem(x))).relu())

    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(1, 3, 19, 19)
    graft.compile(model, (x,)).save(tmp_path / "model.graft")
    assert made == [(2, 1), (2, 1)]  # fresh, and again for the library
    loaded = graft.load(tmp_path / "model.graft")
    check(model, x, program=loaded)
    other = Model().eval()
    loaded.load_state_dict(other.state_dict())
    check(other, x, program=loaded)
