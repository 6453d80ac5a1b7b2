"""Fused operators of `torch_npu` that are formulas: each is its reference, on every device.

A reference computes in float32 where its inputs are halves, as the NPU does. Gradients, shapes and
graphs come from it, as for any operator of `graft.op`. What a parameter asks that only the device
has raises `NotOnThisDevice`.
"""

from __future__ import annotations

from torchgraft.compat.fused import attention, elementwise, grouped, norm, quant, routing
from torchgraft.compat.fused.table import NAMES, declare

__all__ = ["NAMES", "attention", "declare", "elementwise", "grouped", "norm", "quant", "routing"]
