"""Inputs to try a graph on: the real ones where they are known, else drawn to fit their types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft import _torch
from torchgraft.fx.dialect import is_view

aten = torch.ops.aten

# Which argument is an index, and of which dim of which other argument.
_INDEX = {
    aten.embedding.default: (1, 0),
    aten.index_select.default: (2, 0),
    aten.gather.default: (2, 0),
    aten.scatter.src: (2, 0),
    aten.scatter.value: (2, 0),
    aten.scatter_add.default: (2, 0),
    aten.index_add.default: (2, 0),
}
_LISTS = {aten.index.Tensor, aten.index_put.default, aten._unsafe_index.Tensor}
_SAME_RANGE = {aten._to_copy.default, aten.clone.default}


def draws(gm: GraphModule) -> Iterator[list[Any]]:
    """Lists of inputs to try in turn: as given, mixed signs, positive only, all zeros.

    An integer that is used as an index is in range. A later draw is for graphs that the earlier
    one makes fail, or drives to infinities all over.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    given = gm.meta.get("samples") or [None] * len(inputs)
    for draw in (_mixed, _positive, _zero):
        generator = torch.Generator().manual_seed(0)
        with _torch.real():
            made = [
                held if held is not None else _drawn(node, draw, generator)
                for node, held in zip(inputs, given, strict=True)
            ]
        yield made


def _drawn(node: Node, draw: Any, generator: torch.Generator) -> Any:
    fake = node.meta["val"]
    if not isinstance(fake, Tensor):
        return _torch.hint(fake)
    sizes = [int(_torch.hint(size)) for size in fake.shape]
    strides = [int(_torch.hint(stride)) for stride in fake.stride()]
    high = min((_bound(node, set())), default=4)
    values = draw(sizes, fake.dtype, max(high, 1), generator)
    made = torch.empty_strided(sizes, strides, dtype=fake.dtype, device=fake.device)
    return made.copy_(values)


def _mixed(sizes: list[int], dtype: torch.dtype, high: int, generator: torch.Generator) -> Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, sizes, generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        kind = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(sizes, generator=generator, dtype=kind)
    return torch.randint(0, high, sizes, generator=generator)


def _positive(
    sizes: list[int], dtype: torch.dtype, high: int, generator: torch.Generator
) -> Tensor:
    if dtype.is_floating_point:
        return torch.rand(sizes, generator=generator) + 0.5
    return _mixed(sizes, dtype, high, generator)


def _zero(sizes: list[int], dtype: torch.dtype, high: int, generator: torch.Generator) -> Tensor:
    return torch.zeros(sizes)


def _bound(node: Node, seen: set[Node]) -> Iterator[int]:
    """The sizes of what a node's value indexes, here or after it was viewed or cast."""
    if node in seen:
        return
    seen.add(node)
    for user in node.users:
        if user.target in _INDEX:
            place, of = _INDEX[user.target]
            if len(user.args) > place and user.args[place] is node:
                dim = user.args[1] if place == 2 else 0
                yield _size(user.args[of], dim)
        elif user.target in _LISTS and isinstance(user.args[1], (list, tuple)):
            for dim, index in enumerate(user.args[1]):
                if index is node:
                    yield _size(user.args[0], dim)
        elif user.op == "call_function" and (is_view(user) or user.target in _SAME_RANGE):
            yield from _bound(user, seen)


def _size(node: Any, dim: Any) -> int:
    value = node.meta["val"] if isinstance(node, Node) else None
    if not isinstance(value, Tensor) or not isinstance(dim, int) or value.ndim == 0:
        return 1
    return int(_torch.hint(value.shape[dim]))
