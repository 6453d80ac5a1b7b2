"""Models of the checks, and how they are split over ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class MLP(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = (p(x).view(batch, length, -1, self.size) for p in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int = 16, size: int = 4) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, size), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.one(x))
        return x + self.mlp(self.two(x))


_COLUMNS = ("attention.q", "attention.k", "attention.v", "mlp.up")
_ROWS = ("attention.out", "mlp.down")


def split_block(block: Block, mesh: Any) -> nn.Module:
    """Tensor parallel: heads and hidden units over the ranks."""
    plan: Any = {name: ColwiseParallel() for name in _COLUMNS}
    plan |= {name: RowwiseParallel() for name in _ROWS}
    return parallelize_module(copy.deepcopy(block), mesh, plan)


def split_sequence(block: Block, mesh: Any) -> nn.Module:
    """Sequence parallel: between the products, each rank has a part of the sequence."""
    whole = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
    )
    plan: Any = {name: ColwiseParallel() for name in _COLUMNS}
    plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in _ROWS}
    plan |= {name: SequenceParallel(use_local_output=True) for name in ("one", "two")}
    plan |= dict.fromkeys(("attention", "mlp"), whole)
    return parallelize_module(copy.deepcopy(block), mesh, plan)


def split_mlp(mlp: MLP, mesh: Any) -> nn.Module:
    plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(copy.deepcopy(mlp), mesh, plan)


def grads_equal(split: nn.Module, whole: nn.Module) -> None:
    """Each weight's gradient is the single process's."""
    expected = dict(whole.named_parameters())
    for name, weight in split.named_parameters():
        grad = weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad
        torch.testing.assert_close(grad, expected[name].grad, atol=1e-5, rtol=1e-5)
