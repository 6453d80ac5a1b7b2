"""Arithmetic on the 0-dim tensors in which a trace wraps sizes, done on numbers instead.

Each result has the dtype and, for float32, the rounding that the tensors would have had.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchgraft.fx.script.graph import (
    Node,
    Value,
    is_changed,
    is_constant,
    is_tensor,
    number_in,
    schema_of,
)
from torchgraft.fx.script.templates import SCALAR, each, expand
from torchgraft.fx.script.writer import Writer

NUMBERS: dict[str, str] = {
    **{
        f"aten::{name}": SCALAR[f"aten::{name}"]
        for name in ("add", "sub", "mul", "div", "remainder", "neg", "abs", "floor", "ceil")
    },
    "aten::rsub": "{1} - {0}",
    "aten::true_divide": "{0} / {1}",
    "aten::floor_divide": "{0} // {1}",
    "aten::div.floor": "{0} // {1}",
    "aten::div.trunc": "to_int({0} / {1})",
    "aten::pow": "{0} ** {1}",
    **each("{0}", "to detach clone alias contiguous lift_fresh"),
}

_READS: dict[str, str] = {
    **each("to_int({0})", "Int IntImplicit"),
    **each("to_float({0})", "Float FloatImplicit"),
    **each("{0}", "ScalarImplicit item"),
    "aten::Bool": "bool({0})",
}
"""Where such a tensor becomes a number again."""

_FREES = {"aten::add", "aten::sub", "aten::mul", "aten::div"}
"""Where the JIT's own optimiser turns a 0-dim constant operand into a number (CanonicalizeOps)."""

_TAKES_NUMBERS = {
    f"aten::{name}{suffix}"
    for name in ("add", "sub", "mul", "div", "floor_divide", "true_divide")
    for suffix in ("", "_")
}
"""Operators whose tensor operand may be a Python number (promoted as a number)."""


def wrap(w: Writer, node: Node) -> None:
    """NumToTensor: the number stands for the tensor, unless something writes to the tensor."""
    value, out = node.input(), node.output()
    dtype = {"IntType": torch.int64, "FloatType": torch.float64}.get(value.type().kind())
    if dtype is not None and not is_changed(out):
        w.numbers[out.unique()] = dtype
        w.alias(node, w.raw(value))
    else:
        kept = f", dtype={dtype}" if dtype is not None else ""
        w.assign(node, f"torch.tensor({w.raw(value)}{kept})")


def write(w: Writer, node: Node) -> bool:
    """Emit a node that computes with such numbers; False where it is not that."""
    kind, inputs = node.kind(), list(node.inputs())
    dtypes = [w.numbers[v.unique()] for v in inputs if v.unique() in w.numbers]
    if not dtypes:
        return False
    if kind in _READS:
        template = _READS[kind]
        if template == "to_int({0})" and dtypes[0] == torch.int64:
            template = "{0}"
    else:
        mode = inputs[-1].toIValue() if kind == "aten::div" and len(inputs) == 3 else None
        template = NUMBERS.get(f"{kind}.{mode}" if mode else kind, "")
        dtype = _dtype_of(w, node) if template and not is_changed(node.output()) else None
        if dtype not in (torch.int64, torch.float32, torch.float64):
            return False
        w.numbers[node.output().unique()] = dtype
        if dtype == torch.float32 and (template != "{0}" or dtype != dtypes[0]):
            template = f"single({template})"
        elif kind == "aten::to" and dtype == torch.int64 != dtypes[0]:
            template = f"to_int({template})"
    if template == "{0}":
        w.alias(node, w.raw(inputs[0]))
    else:
        w.assign(node, expand(template, [_term(w, value) for value in inputs]))
    return True


def operand(w: Writer, value: Value, kind: str, index: int) -> str:
    """An operand of a torch operator: a number where the tensor was one and torch takes it."""
    if is_tensor(value) and kind in _TAKES_NUMBERS:
        if index == 1 and w.numbers.get(value.unique()) == torch.int64:
            return w.raw(value)
        number = number_in(value)
        wrapped = number is not None and not isinstance(value.toIValue(), Tensor)
        if wrapped or (number is not None and index == 1 and kind in _FREES):
            return w.literal(number)
    return w.ref(value)


def _term(w: Writer, value: Value) -> str:
    number = number_in(value)
    return w.raw(value) if number is None else w.literal(number)


def _dtype_of(w: Writer, node: Node) -> torch.dtype | None:
    """What torch gives for 0-dim operands of these dtypes: it is asked, on ones."""
    kind = node.kind()
    operands: list[Any] = []
    for index, value in enumerate(node.inputs()):
        if value.unique() in w.numbers:
            operands.append(torch.ones((), dtype=w.numbers[value.unique()]))
        elif not is_constant(value) or (is_tensor(value) and number_in(value) is None):
            return None
        else:
            freed = index == 1 and kind in _FREES and is_tensor(value)
            operands.append(number_in(value) if freed else value.toIValue())
    if kind in ("aten::add", "aten::sub", "aten::rsub") and operands[2:] not in ([], [1]):
        return None
    if any(isinstance(o, torch.device) and o.type != "cpu" for o in operands):
        return None
    schema = schema_of(node)
    named = {a.name: o for a, o in zip(schema.arguments, operands, strict=True) if a.kwarg_only}
    packet = getattr(torch.ops.aten, kind.removeprefix("aten::"))
    function = getattr(packet, schema.overload_name or "default")
    try:
        result: Tensor = function(*operands[: len(operands) - len(named)], **named)
    except (RuntimeError, TypeError):
        return None
    return result.dtype
