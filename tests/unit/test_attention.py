"""Attention on CPU as generated code: the same answers, and only where it applies."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torchgraft as graft
from torchgraft.codegen import attention, own


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each region had attention to generate code for, on whatever processor."""
    found: list[bool] = []
    original = attention.as_code

    def told(gm: Any) -> bool:
        found.append(original(gm))
        return found[-1]

    monkeypatch.setattr(own, "is_ahead", lambda *vendors: True)
    monkeypatch.setattr(attention, "as_code", told)
    return found


def heads(positions: int, channels: int, count: int = 3, batch: int = 1) -> Tensor:
    """As a product leaves them: [batch, position, head, channel], seen with heads first."""
    return torch.randn(batch, positions, count, channels).transpose(1, 2)


SIZES = {
    "one block": (8, 8, 16),
    "rows left": (21, 21, 64),
    "one vector of keys": (9, 16, 32),
    "a vector and a bit": (9, 17, 32),
    "three vectors": (16, 48, 32),
    "more queries than keys": (40, 5, 48),
    "vision": (197, 197, 64),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_answers_are_right(made: list[bool], name: str, causal: bool) -> None:
    queries, keys, depth = SIZES[name]
    torch.manual_seed(0)
    q, k, v = (heads(size, depth, batch=2) for size in (queries, keys, keys))
    q *= 4  # so that rows of the softmax are far from uniform

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    answer = graft.compile(model, (q, k, v))(q, k, v)
    assert made == [True]
    exact = model(q.double(), k.double(), v.double())
    torch.testing.assert_close(answer.double(), exact, rtol=1e-4, atol=1e-5)
    assert answer.stride() == model(q, k, v).stride()


MASKS = {
    "for each": (2, 3, 21, 37),
    "for each head": (1, 3, 21, 37),
    "for each batch": (2, 1, 21, 37),
    "one": (1, 1, 21, 37),
    "for all queries": (2, 3, 1, 37),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_added(made: list[bool], name: str) -> None:
    """A query that sees nothing has the answer 0, as torch gives it."""
    torch.manual_seed(0)
    q, k, v = (heads(size, 32, batch=2) for size in (21, 37, 37))
    mask = torch.randn(MASKS[name]).mul(4).masked_fill(torch.rand(MASKS[name]) < 0.3, -torch.inf)
    mask[0, 0, -1] = -torch.inf

    def model(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)

    answer = graft.compile(model, (q, k, v, mask))(q, k, v, mask)
    assert made == [True]
    exact = model(q.double(), k.double(), v.double(), mask.double())
    torch.testing.assert_close(answer.double(), exact, rtol=1e-4, atol=1e-5)
    assert not answer[0, 0, -1].any()


@pytest.mark.parametrize(
    "name", ["of truths", "a constant", "part of another", "turned", "one for all keys"]
)
def test_masks_of_every_kind(made: list[bool], name: str) -> None:
    torch.manual_seed(0)
    q, k, v = (heads(24, 16) for _ in range(3))
    seen, held = torch.rand(1, 1, 24, 24) < 0.7, torch.randn(1, 3, 24, 24)
    turned = torch.randn(24, 24, 3)

    def model(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        given = {
            "of truths": mask,
            "a constant": held,
            "part of another": held[:, :1, ::2, ::2],
            "turned": turned.permute(2, 0, 1).unsqueeze(0),
            "one for all keys": mask[..., :1].float().expand(1, 1, 24, 24),
        }
        few = q[:, :, ::2] if name == "part of another" else q
        keys, values = (x[:, :, ::2] if name == "part of another" else x for x in (k, v))
        return F.scaled_dot_product_attention(few, keys, values, given[name])

    answer = graft.compile(model, (q, k, v, seen))(q, k, v, seen)
    assert made == [True]
    torch.testing.assert_close(answer, model(q, k, v, seen), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("made_of", ["a copy", "images"])
def test_what_was_transposed_is_right(made: list[bool], made_of: str) -> None:
    """Channels before positions, as 1 x 1 convolutions leave them."""
    torch.manual_seed(0)
    given = [torch.randn(2, 3, 16, 24) for _ in range(3)]
    layer = torch.nn.Conv2d(48, 48, 1).eval().requires_grad_(False)

    def model(*given: Tensor) -> Tensor:
        if made_of == "images":
            given = tuple(layer(x.reshape(2, 48, 4, 6)).view(2, 3, 16, 24) for x in given)
        q, k, v = (x.transpose(-1, -2).contiguous() for x in given)
        return F.scaled_dot_product_attention(q, k, v)

    answer = graft.compile(model, tuple(given))(*given)
    assert made == [True]
    torch.testing.assert_close(answer, model(*given), rtol=1e-4, atol=1e-5)


def test_channels_that_attend_to_each_other(made: list[bool]) -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Conv2d(16, 48, 1).eval().requires_grad_(False), torch.randn(2, 16, 4, 8)

    def model(x: Tensor) -> Tensor:
        seen = layer(x).view(2, 3, 16, 32)
        return F.scaled_dot_product_attention(seen, seen, seen)

    torch.testing.assert_close(graft.compile(model, (x,))(x), model(x), rtol=1e-4, atol=1e-5)
    assert made == [True]


def test_parts_of_one_product_and_what_follows(made: list[bool]) -> None:
    """Queries, keys and values in one piece of memory, a scale of the model's own, a sum behind."""
    torch.manual_seed(0)
    x = torch.randn(2, 24, 3 * 32)

    def model(x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in x.sin().chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, scale=0.7)
        return (seen + q).relu().transpose(1, 2).flatten(2)

    compiled = graft.compile(model, (x,))
    assert made == [True]
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


def test_infinite_scores_are_what_they_were(made: list[bool]) -> None:
    q, k, v = (heads(16, 16) for _ in range(3))
    q[0, 0, 3, 0], k[0, 1, 2, 0], q[0, 2, 1, 0] = float("inf"), float("inf"), float("nan")
    answer = graft.compile(F.scaled_dot_product_attention, (q, k, v))(q, k, v)
    assert made == [True]
    expected = torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v
    torch.testing.assert_close(answer, expected, equal_nan=True, rtol=1e-4, atol=1e-5)
    assert 0 < int(answer.isnan().sum()) < answer.numel()


attend = F.scaled_dot_product_attention
OTHERS: dict[str, Any] = {
    "one number for all keys": lambda q, k, v: attend(q, k, v, q[..., :1]),
    "a mask of two dimensions": lambda q, k, v: attend(q, k, v, q[0, 0] @ k[0, 0].T),
    "a scale below zero": lambda q, k, v: attend(q, k, v, scale=-1.0),
    "other types": lambda q, k, v: attend(q.double(), k.double(), v.double()),
    "few queries": lambda q, k, v: attend(q[:, :, :7], k, v),
    "odd channels": lambda q, k, v: attend(q[..., :15], k[..., :15], v[..., :15]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_rest_is_torchs(made: list[bool], name: str) -> None:
    torch.manual_seed(0)
    q, k, v = (heads(16, 16) for _ in range(3))
    answer = graft.compile(OTHERS[name], (q, k, v))(q, k, v)
    assert made == [False]
    torch.testing.assert_close(answer, OTHERS[name](q, k, v), rtol=1e-4, atol=1e-5)


def test_gradients_are_torchs(made: list[bool]) -> None:
    q, k, v = (heads(16, 16).requires_grad_() for _ in range(3))
    compiled = torch.compile(F.scaled_dot_product_attention, backend="torchgraft")
    compiled(q, k, v).sum().backward()
    assert True not in made
    got = q.grad
    q.grad = None
    F.scaled_dot_product_attention(q, k, v).sum().backward()
    torch.testing.assert_close(got, q.grad)


def test_a_package_has_it(made: list[bool], tmp_path: pathlib.Path) -> None:
    """Two of other sizes in one library: their functions do not meet."""
    torch.manual_seed(0)
    q, k, v = (heads(24, 16) for _ in range(3))

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = F.scaled_dot_product_attention(q, k, v)
        return F.scaled_dot_product_attention(first[:, :, :9], k, v)

    compiled = graft.compile(model, (q, k, v))
    compiled.save(tmp_path / "attention.graft")
    assert made == [True, True]
    loaded = graft.load(tmp_path / "attention.graft")
    torch.testing.assert_close(loaded(q, k, v), model(q, k, v), rtol=1e-4, atol=1e-5)
