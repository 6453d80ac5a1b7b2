"""An operator in Python: a reference, a faster kernel, a gradient, samples, and the proof.

Run it: python examples/ops/python_op.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import torchgraft as graft


@graft.op("examples::rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """x over its root mean square, times weight. Everything else is held to this."""
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (x * scale * weight).contiguous()  # as the kernel below gives it


def in_floating_point(x: Tensor, weight: Tensor, eps: float = 1e-6) -> bool:
    return x.is_floating_point() and x.ndim > 0


@rms_norm.kernel("cpu", when=in_floating_point)
def _(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


@rms_norm.backward(save=("x", "weight"))
def _(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    scaled = grad * weight
    along = (scaled * x).mean(-1, keepdim=True) * scale**2
    rows = tuple(range(x.ndim - 1))
    return (scaled - x * along) * scale, (grad * x * scale).sum(rows)


@rms_norm.samples
def _(make: graft.Make) -> Iterator[tuple[Tensor, Tensor, float]]:
    yield make(4, 8), make(8), 1e-6
    yield make(2, 3, 8), make(8), 1e-2


rms_norm.tolerance({torch.bfloat16: (3e-2, 3e-2, "the reference rounds three times, it once")})


def main() -> None:
    x, weight = torch.randn(2, 8, requires_grad=True), torch.ones(8)
    print(rms_norm.chosen(x, weight))
    torch.compile(rms_norm, backend="aot_eager")(x, weight).sum().backward()
    result = graft.check(rms_norm)
    print(result)
    result.assert_ok()


if __name__ == "__main__":
    main()
