"""`build`, what the generated builders call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx.traceback import annotate

from torchgraft.convert.net import CURRENT
from torchgraft.errors import UnknownName
from torchgraft.op.declare import TABLE
from torchgraft.op.lookup import find_kernel
from torchgraft.op.prototype import argument


def build(
    name: str,
    *,
    inputs: Mapping[str, Any],
    outputs: Sequence[str | tuple[str, int]],
    attrs: Mapping[str, Any],
    dependencies: Sequence[Any] = (),
    node_name: str | None = None,
) -> Any:
    """The outputs of `torch.ops.ge.<name>` for these inputs and attributes.

    Inputs go by position, in the order of the prototype. Attributes go by name, since torch wants
    required arguments first and prototypes do not; None leaves one at its default. A dynamic
    output `("ys", 3)` goes as `size_of_ys=3`. An output that has the name of an input is that
    input, written in place. A node traced from the call carries `node_name` in `meta["custom"]`.
    Calls run in program order, so `dependencies` are behind this one already. Inside a converter
    inputs are values of the graph, and the call is added to the converter's net.
    """
    net = CURRENT.get()
    op: Any = find_kernel(name)
    if net is not None:  # inside a converter the call becomes a node
        op = functools.partial(net.add, op)
    prototype = TABLE.prototypes.get(name)
    if prototype is not None:
        known = {attr.name for attr in prototype.attrs}
        for key in attrs:
            if key not in known:
                raise UnknownName(f"attribute of ge::{name}", key, known, prototype.where)
    named = {f"size_of_{out[0]}": out[1] for out in outputs if isinstance(out, tuple)}
    taken = {*inputs, *named}
    named |= {argument(key, taken): value for key, value in attrs.items() if value is not None}
    label = contextlib.nullcontext() if node_name is None else annotate({"node_name": node_name})
    with label:
        result = op(*inputs.values(), **named)
    if prototype is None or not prototype.mutated:
        return result
    fresh = iter(result if isinstance(result, tuple) else [] if result is None else [result])
    every = [inputs[o.name] if o.name in inputs else next(fresh) for o in prototype.outputs]
    return every[0] if len(every) == 1 else tuple(every)
