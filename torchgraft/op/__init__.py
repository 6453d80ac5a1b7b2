"""Operators: prototypes and the kernels behind them."""

from torchgraft.op.lookup import execute, find_kernel, register_kernel

__all__ = ["execute", "find_kernel", "register_kernel"]
