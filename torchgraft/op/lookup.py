"""Kernels by name: graph code asks for `AddCustom`, eager code for `aclnnAddCustom`, both get one.

A kernel of a prototype is whatever torch holds for `ge::AddCustom`: a Python function, a C++
`TORCH_LIBRARY_IMPL(ge, CPU, m)`, in any file or library, loaded before the prototype or after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchgraft.errors import BadCall, BadValue, NotRegistered
from torchgraft.op.declare import KEYS, SPACE, TABLE, reserved
from torchgraft.op.prototype import argument

Kernel = Callable[..., Any]


def plain_name(name: str) -> str:
    """The name of a prototype, whatever it is asked by.

    >>> plain_name("aclnnAddCustom"), plain_name("ge::AddCustom"), plain_name("AddCustom")
    ('AddCustom', 'AddCustom', 'AddCustom')
    """
    return name.removeprefix(f"{SPACE}::").removeprefix("aclnn")


def find_kernel(name: str) -> Any:
    """The op that runs the kernel of a prototype: `AddCustom`, `ge::AddCustom`, `aclnnAddCustom`.

    It is an ordinary torch op: it picks the kernel by the device of its inputs.
    """
    op = getattr(torch.ops.ge, plain_name(name), None)
    if not callable(op):
        raise NotRegistered(f"{SPACE}::{plain_name(name)}", {*TABLE.prototypes, *dir(torch.ops.ge)})
    return op


def register_kernel(name: str, kernel: Kernel, device: str | None = None) -> Kernel:
    """Make `kernel` the one that `ge::Name` runs on a device, or on every device without its own.

    The prototype may be loaded before or after.
    """
    if device is None:
        TABLE.bodies[plain_name(name)] = kernel
    else:
        TABLE.library.impl(plain_name(name), kernel, KEYS.get(device, device))
    return kernel


def execute(name: str, *args: Any) -> Any:
    """Call a kernel as eager NPU code does: inputs, attributes, then the outputs it writes.

    Inputs and attributes are in the order of the prototype. Outputs may be left out; they are
    returned in any case.
    """
    op = find_kernel(name)
    prototype = TABLE.prototypes.get(plain_name(name))
    if prototype is None:
        return op(*args)
    attrs = prototype.attrs
    start, end = len(prototype.inputs), len(prototype.inputs) + len(attrs)
    fresh = [port for port in prototype.outputs if port.name not in prototype.mutated]
    if len(args) not in (end, end + len(fresh), end + len(prototype.outputs)):
        parts: tuple[Any, ...] = (*prototype.inputs, *attrs, *prototype.outputs)
        wanted = [one.name for one in parts]
        raise BadCall(name, prototype.where, len(args), wanted)
    outs = args[end:] if len(args) == end + len(fresh) else args[len(args) - len(fresh) :]
    outs = outs if len(args) > end else ()
    taken = reserved(prototype)
    names = (argument(attr.name, taken) for attr in attrs)
    named = dict(zip(names, args[start:end], strict=True))
    for port, out in zip(fresh, outs, strict=False):
        if port.kind == "dynamic":
            named[f"size_of_{port.name}"] = len(out)
    result = op(*args[:start], **named)
    if not outs:
        return result
    results = result if isinstance(result, tuple) else (result,)
    for port, out, value in zip(fresh, outs, results, strict=True):
        pairs = zip(out, value, strict=True) if isinstance(out, list | tuple) else [(out, value)]
        for into, what in pairs:
            if (into.shape, into.dtype) != (what.shape, what.dtype):
                field = f"output {port.name!r} of {name}"
                want = f"{what.dtype} of shape {tuple(what.shape)}, as the kernel gives"
                raise BadValue(field, (into.dtype, tuple(into.shape)), want)
            into.copy_(what)
    return outs[0] if len(outs) == 1 else tuple(outs)
