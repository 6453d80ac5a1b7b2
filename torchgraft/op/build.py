"""What a builder calls: the check of dtypes against a prototype, and the op itself."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.traceback import annotate

from torchgraft.errors import NotRegistered, WrongDtype
from torchgraft.op.dtypes import dtype_name as dtype_name
from torchgraft.op.dtypes import order_dtypes, spell, torch_dtypes

if TYPE_CHECKING:
    from torchgraft.op.prototype import Port, Prototype


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    if value is None:
        return ()
    return (value,) if isinstance(value, torch.Tensor) else value


def check_dtypes(
    prototype: Prototype, tensors: Mapping[str, Any] | Sequence[Any]
) -> WrongDtype | None:
    """The error of the first input whose dtype the prototype does not allow; None when all fit.

    `tensors` holds a tensor, a list of them, or None per input, by name or in order. Inputs that
    share a symbol must also share their dtype. It is returned, not raised: the caller knows the
    line to blame.
    """
    values = tensors
    if not isinstance(values, Mapping):
        values = dict(zip((port.name for port in prototype.inputs), values, strict=False))
    bound: dict[str, tuple[Port, torch.dtype]] = {}
    for port in prototype.inputs:
        allowed = None if port.dtypes is None else torch_dtypes(port.dtypes)
        for tensor in _tensors(values.get(port.name)):
            dtype = tensor.dtype
            if allowed is not None and dtype not in allowed:
                names = order_dtypes(port.dtypes or ())
                return WrongDtype(prototype.name, port.name, spell(dtype), names)
            if port.symbol is None:
                continue
            first, agreed = bound.setdefault(port.symbol, (port, dtype))
            if dtype != agreed:
                why = f"{port.symbol!r} was bound by input {first.name!r}"
                return WrongDtype(prototype.name, port.name, spell(dtype), [spell(agreed)], why)
    return None


def argument(name: str, taken: Collection[str]) -> str:
    """The name of an attribute among the arguments of its op, where an input may have it too."""
    return f"{name}_changed_as_duplicate_with_input" if name in taken else name


def build(
    name: str,
    *,
    inputs: Mapping[str, Any],
    outputs: Sequence[str | tuple[str, int]],
    attrs: Mapping[str, Any],
    dependencies: Sequence[Any] = (),
    node_name: str | None = None,
) -> Any:
    """What `torch.ops.ge.<name>` returns for these inputs and attributes.

    Inputs go by position, in the order of the prototype. Attributes go by name, since torch wants
    required arguments first and prototypes do not; None leaves one at its default. A dynamic
    output `("ys", 3)` goes as `size_of_ys=3`. A node traced from the call carries `node_name` in
    `meta["custom"]`. Calls run in program order, so `dependencies` are behind this one already.
    """
    op = getattr(torch.ops.ge, name, None)
    if not callable(op):
        raise NotRegistered(f"ge::{name}", dir(torch.ops.ge))
    named = {f"size_of_{out[0]}": out[1] for out in outputs if isinstance(out, tuple)}
    taken = {*inputs, *named}
    named |= {argument(key, taken): value for key, value in attrs.items() if value is not None}
    label = contextlib.nullcontext() if node_name is None else annotate({"node_name": node_name})
    with label:
        return op(*inputs.values(), **named)
