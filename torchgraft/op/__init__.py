"""Operators: prototypes and the kernels behind them."""

from torchgraft.op.kernels import execute, find_kernel, register_kernel

__all__ = ["execute", "find_kernel", "register_kernel"]
