"""Stacked values on CPU, joined as the rows that they are.

`stack` is decomposed into one long row that is cut up afterwards. Where the row is of values that
were rows before, Inductor would find each of their elements by a division.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchgraft.fx import meta

aten = torch.ops.aten


def as_rows(gm: GraphModule) -> None:
    """Let reshape(cat(values, d), [..., rows, width, ...]) be cat of values that have rows."""
    for view in gm.graph.find_nodes(op="call_function", target=aten.reshape.default):
        joined: Any = view.args[0]
        if joined.target is aten.cat.default and len(joined.users) == 1:
            _split(gm, view, joined, *joined.args)
    gm.recompile()


def _split(gm: GraphModule, view: Node, joined: Node, values: Any, dim: int = 0) -> None:
    long, cut = joined.meta["val"], view.meta["val"]
    dim %= long.ndim
    sizes = [size for node in (*values, view) for size in node.meta["val"].shape]
    if long.device.type != "cpu" or not all(isinstance(size, int) for size in sizes):
        return
    if any(node.meta["val"].ndim != long.ndim for node in values):
        return  # an empty one, which counts for nothing
    if cut.ndim != long.ndim + 1 or cut.shape[:dim] + cut.shape[dim + 2 :] != (
        long.shape[:dim] + long.shape[dim + 1 :]
    ):
        return
    width = cut.shape[dim + 1]
    if not width or any(node.meta["val"].shape[dim] % width for node in values):
        return

    call = functools.partial(meta.call, gm, view)
    with gm.graph.inserting_before(view):
        rows = []
        for node in values:
            size = list(node.meta["val"].shape)
            size[dim : dim + 1] = [size[dim] // width, width]
            rows.append(call(aten.reshape.default, node, size))
        made = call(aten.cat.default, rows, dim)
    if made.meta["val"].stride() != cut.stride():
        for node in (made, *rows):
            gm.graph.erase_node(node)
        return
    view.replace_all_uses_with(made)
    gm.graph.erase_node(view)
    gm.graph.erase_node(joined)
