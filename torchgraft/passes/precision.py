"""`Config(precision=...)`: compute in another floating type; inputs and outputs keep theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchgraft import _torch
from torchgraft.config import PRECISIONS, Config
from torchgraft.fx import meta
from torchgraft.passes.spec import Pass

aten = torch.ops.aten
_CAST = "precision_cast"

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# What a mixed precision leaves in float32: a small error in these becomes a large one, or a sum of
# many terms loses the small ones. The set is that of torch.autocast.
_SENSITIVE = {
    "acos asin cosh sinh tan erfinv exp expm1 log log10 log1p log2 logsumexp pow reciprocal rsqrt",
    "softplus _softmax _log_softmax softmax log_softmax sum mean var var_mean std prod cumsum",
    "cumprod norm linalg_vector_norm native_layer_norm native_group_norm native_batch_norm",
    "_native_batch_norm_legit _native_batch_norm_legit_no_training dist renorm _cdist_forward",
    "binary_cross_entropy mse_loss l1_loss smooth_l1_loss nll_loss_forward nll_loss",
}
SENSITIVE = frozenset(name for line in _SENSITIVE for name in line.split())


def precision(gm: GraphModule, example_inputs: Sequence[Any], config: Config) -> None:
    """Cast what floating-point calls take, so that each computes in the type that was asked for.

    A call that writes memory, holds a graph or is a custom operator keeps the types it was traced
    with, and so does one that cannot compute in the type.
    """
    assert config.precision is not None
    want, mixed = PRECISIONS[config.precision]
    traced = {node: _dtype(node) for node in gm.graph.nodes}
    casts = _Casts(gm)
    for node in list(gm.graph.nodes):
        if node.op == "output":
            node.args = (tuple(casts(o, traced.get(o), node) for o in node.args[0]),)
        elif node.op == "call_function" and not _writes(node):
            kept = not _is_aten(node) or (mixed and _name(node) in SENSITIVE)
            _retype(node, casts, traced, None if kept else want, None if kept or mixed else want)


def uncast(value: Node) -> None:
    """Take away the casts that `precision` put behind a value that is no longer a float: what made
    it an integer means the program to give one."""
    if _dtype(value) in _FLOATS:
        return
    for user in [user for user in value.users if _CAST in user.meta]:
        user.replace_all_uses_with(value)
        value.graph.erase_node(user)


class _Casts:
    """Casts of values, each made once."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self._made: dict[tuple[Node, torch.dtype], Node] = {}

    def __call__(self, value: Any, dtype: torch.dtype | None, user: Node) -> Any:
        if not isinstance(value, Node) or dtype not in _FLOATS:
            return value
        if _dtype(value) not in _FLOATS or _dtype(value) == dtype:
            return value
        key = (value, dtype)
        if key not in self._made:
            with self.gm.graph.inserting_before(user):
                made = self.gm.graph.call_function(
                    aten._to_copy.default, (value,), {"dtype": dtype}
                )
            meta.inherit(made, value)
            made.meta[_CAST] = True
            made.meta["val"] = meta.compute(self.gm, made)
            self._made[key] = made
        return self._made[key]


def _retype(
    node: Node,
    casts: _Casts,
    traced: dict[Node, torch.dtype | None],
    want: torch.dtype | None,
    said: torch.dtype | None = None,
) -> None:
    """Let a call compute in `want`, or (None) in the types that it was traced with. A type that it
    names itself becomes `said`."""
    before, was = (node.args, node.kwargs), node.meta.get("val")
    node.args, node.kwargs = map_arg(before, lambda n: casts(n, want or traced.get(n), node))
    if said is not None and node.kwargs.get("dtype") in _FLOATS:
        node.kwargs = {**node.kwargs, "dtype": said}
    try:
        node.meta["val"] = _sized_as(was, meta.compute(casts.gm, node), casts.gm)
    except Exception:
        if want is None:
            raise
        node.args, node.kwargs = before
        _retype(node, casts, traced, None)


def _sized_as(was: Any, made: Any, gm: GraphModule) -> Any:
    """A value anew; where its size depends on data, with the size that it had: computing it again
    gives that another name."""
    if isinstance(made, (list, tuple)):
        return type(made)(_sized_as(*both, gm) for both in zip(was, made, strict=True))
    if not isinstance(made, Tensor) or not _torch.has_unbacked(was):
        return was if _torch.has_unbacked(was) else made
    with _torch.faking(gm.meta["fake_mode"]):
        return was.to(made.dtype)


def _dtype(node: Any) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def _is_aten(node: Node) -> bool:
    return str(getattr(node.target, "namespace", "aten")) in ("aten", "prims") and not (
        _torch.is_higher_order(node.target)
    )


def _name(node: Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target)).rpartition(".")[2]


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


PRECISION = Pass("precision", "built-in", precision, before=("remove_noops",))
