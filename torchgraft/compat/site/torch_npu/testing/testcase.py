"""`TestCase` and `run_tests`, as tests of NPU operators import them."""

from __future__ import annotations

import unittest
from typing import Any

import torch

__all__ = ["TestCase", "run_tests"]


class TestCase(unittest.TestCase):
    """A test case that compares tensors and arrays."""

    def assertRtolEqual(
        self,
        x: Any,
        y: Any,
        prec: float = 1e-4,
        prec16: float = 1e-3,
        auto_trans_dtype: bool = False,
        message: str | None = None,
    ) -> None:
        """Let both be equal up to `prec`, or `prec16` for halves, of their values."""
        found, expected = (torch.as_tensor(value).detach().cpu() for value in (x, y))
        halves = (torch.float16, torch.bfloat16)
        near = prec16 if {found.dtype, expected.dtype} & set(halves) else prec
        torch.testing.assert_close(
            found, expected, rtol=near, atol=near, check_dtype=not auto_trans_dtype, msg=message
        )

    def assertEqual(self, first: Any, second: Any, msg: Any = None, **kwargs: Any) -> None:
        """Let both be equal; tensors up to what their dtype gives, or `atol` and `rtol`. A number
        in third place, or `prec`, is both."""
        prec = kwargs.pop("prec", None if isinstance(msg, str) else msg)
        msg = kwargs.pop("message", msg if isinstance(msg, str) else None) or None
        if prec is not None:
            kwargs |= {"rtol": prec, "atol": prec}
        if kwargs:
            first, second = torch.as_tensor(first), torch.as_tensor(second)
        if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
            torch.testing.assert_close(first, second, msg=msg, **kwargs)
        else:
            super().assertEqual(first, second, msg)  # noqa: PT009  (it is a unittest one)


def run_tests() -> None:
    """Run the tests of the script."""
    unittest.main()
