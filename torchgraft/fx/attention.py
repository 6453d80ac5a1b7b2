"""Masks of attention that say what attention can be told without one.

Models make masks of `arange` and comparisons that, for fixed sizes, hide nothing or just what lies
ahead. With a mask, CUDA's fast kernels decline (flash attention takes none, the others want its
last dimension dense), and what is left computes in float32, step by step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from torchgraft import _torch
from torchgraft.fx.dialect import is_random

aten = torch.ops.aten

_MOST = 1 << 24
"""Elements of a mask that is looked at."""


def plain_masks(graph: Graph) -> dict[Node, Callable[..., Any]]:
    """Calls of attention whose mask can go, and what to call instead with the same arguments.

    Another kernel may lay its result out otherwise; what was dense before is dense again.
    """
    known: dict[Node, Any] = {}
    found: dict[Node, Callable[..., Any]] = {}
    calls = graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    masked = [node for node in calls if len(node.args) > 3 and isinstance(node.args[3], Node)]
    if not masked:
        return {}
    with _torch.real():
        for node in masked:
            value = _constant(node.args[3], known)
            if not isinstance(value, Tensor) or True in node.args[5:6]:
                continue
            if (causal := _causal(value)) is not None:
                dense = node.meta["val"].is_contiguous()
                found[node] = functools.partial(_unmasked, causal=causal, dense=dense)
    return found


def _causal(mask: Tensor) -> bool | None:
    """Whether a mask hides just what lies ahead (True), or nothing (False); else None."""
    shown = mask if mask.dtype == torch.bool else mask == 0
    if bool(shown.all()):
        return False
    if mask.dtype != torch.bool or mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return None
    past = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    return True if bool((mask == past).all()) else None


def _unmasked(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    p: float = 0.0,
    _: bool = False,
    *,
    causal: bool,
    dense: bool,
    **kwargs: Any,
) -> Any:
    result = aten.scaled_dot_product_attention.default(q, k, v, None, p, causal, **kwargs)
    return result.contiguous() if dense else result


def _size(node: Node) -> float:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else float("inf")


def _constant(node: Node, known: dict[Node, Any]) -> Any:
    """The value of a node that depends on no input and no weight, on the CPU; else None."""
    if node not in known:
        known[node] = None
        used = [_constant(one, known) for one in node.all_input_nodes]
        plain = node.op == "call_function" and not is_random(node) and _size(node) <= _MOST
        if plain and all(isinstance(value, Tensor) for value in used):
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            if "device" in kwargs:
                kwargs = {**kwargs, "device": "cpu"}
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]
