"""3 x 3 convolutions by Winograd's algorithm: the same answers, and only where it applies."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from exact import Several, check
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torchgraft as graft
from torchgraft._torch import together, written
from torchgraft.codegen import own, winograd

FEWEST = winograd._fewest


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many convolutions of each region are computed so, on whatever processor."""
    found: list[int] = []
    original = winograd.as_code

    def told(gm: Any, mode: Any) -> bool:
        original(gm, mode)
        calls = gm.graph.find_nodes(op="call_function", target=winograd.winograd())
        found.append(len(calls))
        return bool(calls)

    monkeypatch.setattr(own, "is_ahead", lambda *vendors: True)
    monkeypatch.setattr(winograd, "_fewest", lambda threads: 8)
    monkeypatch.setattr(winograd, "as_code", told)
    return found


CHANNELS = st.sampled_from([16, 32, 48, 64, 80])
SIDES = st.integers(3, 21)
SHAPES = st.tuples(
    CHANNELS, CHANNELS, SIDES, SIDES, st.integers(0, 3), st.integers(0, 2), st.integers(1, 3),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip


@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.lists(SHAPES, min_size=6, max_size=6))
def test_any_shape_is_right(shapes: list[Any]) -> None:
    """Many shapes in one program, which is one compiler's work."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    images = []
    for depth, outs, high, wide, pad_y, pad_x, count, biased, relu, last in shapes:
        layer = nn.Conv2d(depth, outs, 3, padding=(pad_y, pad_x), bias=biased)
        layers.append(nn.Sequential(layer, nn.ReLU()) if relu else layer)
        lies = torch.channels_last if last else torch.contiguous_format
        images.append(torch.randn(count, depth, high, wide).contiguous(memory_format=lies))
    check(Several(layers).eval(), *images)


class After(nn.Module):
    """What may follow a convolution, by name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Conv2d(16, 32, 3, padding=1, bias=how != "normalised")
        self.norm = nn.BatchNorm2d(32, affine=how != "normalised plainly")
        self.norm.running_mean.normal_()  # type: ignore[union-attr]
        self.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        if self.norm.affine:
            nn.init.normal_(self.norm.weight), nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        match self.how:
            case "normalised" | "normalised plainly" | "normalised with a bias":
                return self.norm(y).relu()
            case "a residual":
                return (self.norm(y) + x.repeat(1, 2, 1, 1)).relu()
            case "a residual of it" | "without relu":
                return x.repeat(1, 2, 1, 1).cos() + y
            case "twice itself":
                return y + y
            case "a number":
                return (y + 1).relu()
            case "one for all rows":
                return (y + x[:, :1]).relu()
            case "a factor":
                return torch.add(y, x.repeat(1, 2, 1, 1), alpha=3).relu()
            case "two uses":
                return y.relu(), y.flatten(1)
            case "a part of channels":
                return self.first(torch.cat([x.sin(), x], 1)[:, ::2])
            case "flattened":
                return y.relu().flatten(1)
        raise AssertionError(self.how)


AFTER = [
    "normalised", "normalised plainly", "normalised with a bias", "a residual",
    "a residual of it", "twice itself", "a number", "one for all rows", "a factor", "two uses",
    "a part of channels", "flattened",
]  # fmt: skip


@pytest.mark.parametrize("how", AFTER)
def test_what_follows_is_right(made: list[int], how: str) -> None:
    torch.manual_seed(0)
    check(After(how).eval(), torch.randn(2, 16, 9, 10))
    assert made == [1]


def test_what_follows_is_part_of_it() -> None:
    seen: list[Any] = []
    original = winograd._Winograd.replace

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.norm(self.one(x))).relu()

    def replace(self: Any) -> None:
        original(self)
        seen.extend(n.target for n in self.gm.graph.nodes if self.data in n.all_input_nodes)
        seen.append(self.gm.graph.output_node().args[0][0].target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(winograd._Winograd, "replace", replace)
        check(Model().eval(), torch.randn(1, 16, 12, 12))
    assert seen == [winograd.winograd()] * 2


LAYERS: dict[str, Any] = {
    "groups": lambda: nn.Conv2d(32, 32, 3, groups=2),
    "steps": lambda: nn.Conv2d(32, 32, 3, stride=2),
    "dilation": lambda: nn.Conv2d(32, 32, 3, dilation=2),
    "another kernel": lambda: nn.Conv2d(32, 32, (3, 1)),
    "transposed": lambda: nn.ConvTranspose2d(32, 32, 3),
    "odd channels": lambda: nn.Conv2d(32, 24, 3),
    "one dimension": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(32, 32, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_other_convolutions_are_not(made: list[int], name: str) -> None:
    check(LAYERS[name]().eval(), torch.randn(1, 32, 12, 12))
    assert made == [0]


def test_few_tiles_other_types_and_weights_that_change_are_not(made: list[int]) -> None:
    layer, x = nn.Conv2d(16, 16, 3).eval(), torch.randn(1, 16, 12, 12)
    graft.compile(layer, (x[..., :5, :5],))
    graft.compile(layer, (x,), freeze=False)
    graft.compile(nn.Conv2d(16, 16, 3).double().eval(), (x.double(),))
    any_batch = graft.Input(min_shape=(1, 16, 12, 12), max_shape=(8, 16, 12, 12))
    graft.compile(layer, (any_batch,))
    assert made == [0, 0, 0, 0]


def test_gradients_are_torchs(made: list[int]) -> None:
    layer, x = nn.Conv2d(16, 16, 3), torch.randn(1, 16, 12, 12)
    torch.compile(layer, backend="torchgraft")(x).sum().backward()
    assert 1 not in made


def test_what_is_no_number_stays_where_it_is_seen() -> None:
    """Or in the other outputs of a tile that sees it."""
    layer, x = nn.Conv2d(16, 16, 3, padding=1).eval(), torch.randn(1, 16, 16, 16)
    x[0, 3, 6, 6] = float("inf")
    with torch.no_grad():
        found, expected = graft.compile(layer, (x,))(x), layer(x)
    bad = ~found.isfinite()
    assert bad[~expected.isfinite()].all()
    assert not bad[:, :, :4].any()
    assert not bad[:, :, :, 8:].any()


def test_threads_share_the_tiles(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winograd, "_fewest", FEWEST)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        check(nn.Conv2d(16, 48, 3, padding=1).eval(), torch.randn(2, 16, 17, 18))
        check(nn.Conv2d(16, 48, 3, padding=1).eval(), torch.randn(2, 16, 11, 9))  # too few
    finally:
        torch.set_num_threads(before)
    assert made == [1, 0]


def test_the_operator_itself_is_right() -> None:
    layer, x = nn.Conv2d(16, 48, 3, padding=(2, 1)).eval(), torch.randn(2, 16, 9, 8)
    other = torch.randn(2, 48, 11, 8)
    weight = pack(layer.weight.detach())
    expected = (layer(x) + other).relu()
    how = [2, 1], "relu", expected.shape, expected.stride()
    found = winograd.winograd()(x, weight, layer.bias.detach(), other, *how)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)


def pack(weight: Tensor) -> Tensor:
    rows = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    tiles = (rows @ weight @ rows.T).flatten(2)
    return torch.cat([part.permute(2, 1, 0).flatten() for part in tiles.split(winograd.PANEL)])


def test_a_package_computes_so_too_and_takes_new_weights(
    made: list[int], tmp_path: pathlib.Path
) -> None:
    torch.manual_seed(0)
    model, x = After("a residual").eval(), torch.randn(1, 16, 14, 14)
    graft.compile(model, (x,)).save(tmp_path / "model.graft")
    assert made == [1, 1]  # fresh, and again for the library
    loaded = graft.load(tmp_path / "model.graft")
    check(model, x, program=loaded)
    other = After("a residual").eval()
    loaded.load_state_dict(other.state_dict())
    check(other, x, program=loaded)


def test_kernels_of_one_source_share_their_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[str] = []
    original = written.shared

    def shared(texts: Sequence[str]) -> Any:
        parts, left = original(texts)
        sources.append("\n".join((*parts, *left)))
        return parts, left

    monkeypatch.setattr(together.written, "shared", shared)
    layers = [nn.Conv2d(16, 16 * (i + 1), 3, padding=1) for i in range(3)]
    check(Several(layers).eval(), *(torch.randn(1, 16, 8 + i, 8) for i in range(3)))
    convolutions = [source.count("const Shape shape{") for source in sources]
    assert sum(convolutions) == 3
    assert [source.count("struct Shape {") for source in sources] == [
        min(n, 1) for n in convolutions
    ]
