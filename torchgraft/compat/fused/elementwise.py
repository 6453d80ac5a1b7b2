"""Activations, rotary embeddings, shapes, and writes in place."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from torchgraft.compat.fused.table import reference, refuse, wide


@reference("npu_swiglu(Tensor self, int dim=-1) -> Tensor")
def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    """silu of the first half, times the second."""
    gate, up = wide(self).chunk(2, dim)
    return (functional.silu(gate) * up).to(self.dtype)


@reference(
    "npu_geglu(Tensor self, int dim=-1, int approximate=1, bool activate_left=False) "
    "-> (Tensor, Tensor)"
)
def npu_geglu(
    self: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[Tensor, Tensor]:
    """The product of one half and gelu of the other, and that gelu."""
    left, right = wide(self).chunk(2, dim)
    gate, up = (left, right) if activate_left else (right, left)
    active = functional.gelu(gate, approximate="tanh" if approximate else "none")
    return (up * active).to(self.dtype), active.to(self.dtype)


@reference("fast_gelu(Tensor self) -> Tensor")
def fast_gelu(self: Tensor) -> Tensor:
    """x * sigmoid(1.702 x)."""
    x = wide(self)
    return (x * torch.sigmoid(1.702 * x)).to(self.dtype)


reference("npu_fast_gelu(Tensor self) -> Tensor")(fast_gelu)


@reference("npu_silu(Tensor self) -> Tensor")
def npu_silu(self: Tensor) -> Tensor:
    return functional.silu(self)


@reference("npu_mish(Tensor self) -> Tensor")
def npu_mish(self: Tensor) -> Tensor:
    return functional.mish(self)


@reference("npu_rotary_mul(Tensor self, Tensor r1, Tensor r2, str rotary_mode='half') -> Tensor")
def npu_rotary_mul(self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """x * cos + rotated(x) * sin; a rotation takes halves, or neighbours."""
    x = wide(self)
    if rotary_mode == "half":
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    elif rotary_mode == "interleave":
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        raise ValueError(
            f"npu_rotary_mul: rotary_mode is {rotary_mode!r}; here it is 'half' or 'interleave'"
        )
    return (x * wide(r1) + turned * wide(r2)).to(self.dtype)


@reference(
    "npu_apply_rotary_pos_emb(Tensor query, Tensor key, Tensor cos, Tensor sin, "
    "str layout='BSH', str rotary_mode='half') -> (Tensor, Tensor)"
)
def npu_apply_rotary_pos_emb(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: str = "BSH",
    rotary_mode: str = "half",
) -> tuple[Tensor, Tensor]:
    """Both rotated. On the NPU they are also overwritten; here the results are new tensors."""
    return (
        npu_rotary_mul(query, cos, sin, rotary_mode),
        npu_rotary_mul(key, cos, sin, rotary_mode),
    )


@reference("npu_interleave_rope(Tensor x, Tensor cos, Tensor sin) -> Tensor")
def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighbours become two halves, which are then rotated."""
    return npu_rotary_mul(torch.cat((x[..., ::2], x[..., 1::2]), -1), cos, sin)


@reference("npu_linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor")
def npu_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(input, weight, bias)


@reference("npu_bmmV2(Tensor self, Tensor mat2, int[] output_sizes) -> Tensor")
def npu_bmmV2(self: Tensor, mat2: Tensor, output_sizes: list[int]) -> Tensor:
    refuse("npu_bmmV2", "Pass [] and reshape the result.", output_sizes=output_sizes or None)
    return torch.bmm(self, mat2)


@reference("npu_dtype_cast(Tensor self, ScalarType dtype) -> Tensor")
def npu_dtype_cast(self: Tensor, dtype: torch.dtype) -> Tensor:
    return self.to(dtype)


@reference(
    "npu_confusion_transpose(Tensor self, int[] perm, int[] shape, bool transpose_first) -> Tensor"
)
def npu_confusion_transpose(
    self: Tensor, perm: list[int], shape: list[int], transpose_first: bool
) -> Tensor:
    """A transposition and a change of shape, in this order or the other."""
    if transpose_first:
        return self.permute(perm).reshape(shape)
    return self.reshape(shape).permute(perm).contiguous()


@reference("npu_transpose(Tensor self, int[] perm, bool require_contiguous=True) -> Tensor")
def npu_transpose(self: Tensor, perm: list[int], require_contiguous: bool = True) -> Tensor:
    return self.permute(perm).contiguous()


@reference("npu_broadcast(Tensor self, int[] size) -> Tensor")
def npu_broadcast(self: Tensor, size: list[int]) -> Tensor:
    return self.expand(size).contiguous()


@reference("npu_softmax_cross_entropy_with_logits(Tensor self, Tensor labels) -> Tensor")
def npu_softmax_cross_entropy_with_logits(self: Tensor, labels: Tensor) -> Tensor:
    """A loss for each row, of labels that are weights of the classes."""
    return -(wide(labels) * functional.log_softmax(wide(self), -1)).sum(-1).to(self.dtype)


def _scatter_nd(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return x.index_put_(tuple(indices.long().unbind(-1)), updates)


@reference("npu_scatter_nd_update(Tensor self, Tensor indices, Tensor updates) -> Tensor")
def npu_scatter_nd_update(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """A copy in which each row of indices is the place of a row of updates."""
    return _scatter_nd(self.clone(), indices, updates)


@reference("npu_scatter_nd_update_(Tensor(a!) self, Tensor indices, Tensor updates) -> Tensor(a!)")
def npu_scatter_nd_update_(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return _scatter_nd(self, indices, updates)


def _update(x: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """Writes each row of updates from its index on, along an axis."""
    axis %= x.ndim
    length = updates.shape[axis]
    steps = torch.arange(length, device=x.device)
    where = indices.long().reshape(-1, *[1] * (x.ndim - 1))
    where = where + steps.reshape([length if dim == axis else 1 for dim in range(x.ndim)])
    return x.scatter_(axis, where.expand(updates.shape), updates)


@reference("scatter_update(Tensor self, Tensor indices, Tensor updates, int axis) -> Tensor")
def scatter_update(self: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """A copy in which row i of updates stands from `indices[i]` on along the axis: how a cache of
    keys is written."""
    return _update(self.clone(), indices, updates, axis)


@reference(
    "scatter_update_(Tensor(a!) self, Tensor indices, Tensor updates, int axis) -> Tensor(a!)"
)
def scatter_update_(self: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    return _update(self, indices, updates, axis)


@reference("npu_silu_(Tensor(a!) self) -> Tensor(a!)")
def npu_silu_(self: Tensor) -> Tensor:
    return functional.silu(self, inplace=True)


@reference(
    "_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, "
    "Tensor(b!) value_cache, Tensor slot_indices) -> ()"
)
def _npu_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    """Write each token's key and value to its slot: caches are blocks of slots."""
    slots, size = slot_indices.long(), key_cache.shape[1]
    key_cache.index_put_((slots // size, slots % size), key)
    value_cache.index_put_((slots // size, slots % size), value)
