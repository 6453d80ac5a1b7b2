"""An operator with a C++ kernel, compiled at its first call and kept for the next run.

Run it: python examples/ops/cpp_op.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import torchgraft as graft
from torchgraft.op.samples import FLOATS


@graft.op("examples::swiglu")
def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) * y."""
    return torch.nn.functional.silu(x) * y


swiglu.kernel("cpu", cpp="csrc/swiglu.cpp")


@swiglu.fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(x.shape)  # dense, as the kernel makes it, whatever the strides of x


def main() -> None:
    x, y = torch.randn(4, 1000, requires_grad=True), torch.randn(4, 1000)
    torch.testing.assert_close(swiglu(x, y), swiglu.reference(x, y))
    torch.ops.examples.swiglu(x, y).sum().backward()  # the gradient is the reference's
    result = graft.check(swiglu, dtypes=FLOATS)
    print(result)
    result.assert_ok()


if __name__ == "__main__":
    main()
