"""An operator with a Triton kernel. Needs a CUDA device.

Run it: python examples/ops/triton_op.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

import torchgraft as graft


@graft.op("examples::scale_add")
def scale_add(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
    """x + alpha * y."""
    return x + alpha * y


@triton.jit
def _scale_add(x, y, out, alpha, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < count  # the last block is rarely full
    value = tl.load(x + at, inside).to(tl.float32) + alpha * tl.load(y + at, inside).to(tl.float32)
    tl.store(out + at, value, inside)


def fits(x: Tensor, y: Tensor, alpha: float = 1.0) -> bool:
    dense = x.is_contiguous() and y.is_contiguous() and x.shape == y.shape
    return dense and x.dtype == y.dtype and x.dtype in (torch.float16, torch.float32)


@scale_add.kernel("cuda", when=fits)
def _(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
    out = torch.empty_like(x)
    count, block = x.numel(), 1024
    if count:
        _scale_add[(triton.cdiv(count, block),)](x, y, out, alpha, count, block=block)
    return out


def main() -> None:
    result = graft.check(scale_add)
    print(result)
    result.assert_ok()


if __name__ == "__main__":
    main()
