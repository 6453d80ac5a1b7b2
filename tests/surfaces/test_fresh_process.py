"""What only a fresh process shows: nothing that another test imported helps here."""

from __future__ import annotations

import sys

import process
import pytest


@pytest.mark.slow
def test_a_pooled_convolution_is_the_first_thing_compiled() -> None:
    code = (
        "import torch, torchgraft as graft\n"
        "from torch.nn import Conv2d, MaxPool2d, Sequential\n"
        "model = Sequential(Conv2d(3, 4, 3), MaxPool2d(3, 2, 1)).eval()\n"
        "x = torch.randn(1, 3, 8, 8)\n"
        "compiled = graft.compile(model, (x,))\n"
        "torch.testing.assert_close(compiled(x), model(x).detach())\n"
        "print(compiled.report.coverage)"
    )
    assert process.output([sys.executable, "-c", code]) == "1.0\n"
