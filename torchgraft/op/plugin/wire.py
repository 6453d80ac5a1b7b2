"""Entries of op-plugin files become ops `npu::name`, run by C++ or by the kernels of prototypes."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchgraft import _torch
from torchgraft.errors import Clash
from torchgraft.op.declare import OWNERS, has_kernel, same_arguments, stand_in
from torchgraft.op.lookup import execute
from torchgraft.op.plugin.derivatives import Derivative, register_derivative
from torchgraft.op.plugin.functions import Entry, Gen, Out
from torchgraft.op.schema import registered

SPACE = "npu"


class Space:
    """The namespace `npu` and what was put into it. It lives as long as torch's own registry."""

    def __init__(self) -> None:
        make: Any = torch.library.Library  # untyped in torch
        self.library = make(SPACE, "FRAGMENT")
        self.entries: dict[str, Entry] = {}
        self.derived: set[str] = set()
        self.deprecated: dict[str, str] = {}
        self.bodies: dict[str, Callable[..., Any]] = {}
        self._waiting: set[str] = set()

    def check(self, entry: Entry) -> None:
        """Raise where the op is there already and is another one."""
        there = registered(f"{SPACE}::{entry.name}")
        if there is not None and str(there) != str(entry.parsed):
            first = self.entries.get(entry.name)
            at = first.where if first else "a library that was loaded before"
            raise Clash(f"{SPACE}::{entry.name}", (at, str(there)), (entry.where, entry.schema))

    def define(self, entry: Entry) -> None:
        """Define the op; it has no kernel yet."""
        if registered(f"{SPACE}::{entry.name}") is None:
            tags = [getattr(torch.Tag, tag) for tag in entry.tags if hasattr(torch.Tag, tag)]
            self.library.define(entry.schema, tags=tags)
            self.entries[entry.name] = entry

    def wire(self, entry: Entry, gen: Gen | None) -> None:
        """Give an op that has no C++ kernel its kernel: the prototype's, or a helpful error."""
        name = f"{SPACE}::{entry.name}"
        if self.entries.get(entry.name) is not entry or has_kernel(
            name, "CompositeExplicitAutograd"
        ):
            return
        kernel = self._waits(entry) if gen is None else _generated(entry, gen)
        if gen is None:
            self._waiting.add(entry.name)
        self.library.impl(entry.name, kernel, "CompositeExplicitAutograd")
        if gen is not None and not any(arg.alias_info for arg in entry.parsed.returns):
            torch.library.register_fake(name, kernel, lib=self.library)

    def deprecate(self, name: str, instead: str) -> None:
        """Warn at the first call of an op, wherever its kernel is from."""
        if name in self.deprecated:
            return
        self.deprecated[name] = instead
        said = f"npu::{name} is deprecated" + (f"; use {instead}" if instead else "")
        below, warned = _torch.below_select(), threading.Lock()

        def warn(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if warned.acquire(blocking=False):  # never released: once
                warnings.warn(said, FutureWarning, stacklevel=2)
            base, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.npu, base), overload or "default")
            return op.redispatch(keys & below, *args, **kwargs)

        self.library.impl(name, warn, "BackendSelect", with_keyset=True)

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The operators that op-plugin makes Python functions of (`torch_npu.npu_x`), by name."""
        exposed = {entry.name.partition(".")[0] for entry in self.entries.values() if entry.exposed}
        return {name: getattr(torch.ops.npu, name) for name in sorted(exposed)}

    def adopt(self, name: str, text: str, where: str) -> bool:
        """Whether an entry has defined this op and has no kernel; see `Table.adopt`."""
        entry = self.entries.get(name)
        if entry is None or name not in self._waiting or name in self.bodies:
            return False
        if not same_arguments(_torch.parse_schema(text), entry.parsed):
            raise Clash(f"{SPACE}::{name}", (entry.where, entry.schema), (where, text))
        return True

    def _waits(self, entry: Entry) -> Callable[..., Any]:
        arguments = ", ".join(arg.name for arg in entry.parsed.arguments)
        return stand_in(self.bodies, SPACE, entry.name, entry.where, arguments)

    def derive(self, derivative: Derivative, entry: Entry) -> None:
        if entry.name not in self.derived:
            register_derivative(derivative, entry, self.library)
            self.derived.add(entry.name)


NPU = Space()
OWNERS[SPACE] = NPU


def resolve(entry: Entry, entries: Mapping[str, Entry]) -> Gen | None:
    """How an entry is run, through what it inherits from or delegates to."""
    gen = entry.gen
    if gen is not None and gen.kernel:
        return gen
    target = entries.get(entry.delegate or (gen.inherit if gen else ""))
    if target is None or target is entry:
        return None
    base = resolve(target, entries)
    if base is None or gen is None:
        return base
    return Gen(base.kernel, base.args, gen.outs or base.outs, gen.params or base.params)


def _generated(entry: Entry, gen: Gen) -> Callable[..., Any]:
    """One call of the prototype's kernel, with outputs of the sizes and dtypes that are asked."""
    parsed = entry.parsed
    arguments = [arg.name for arg in parsed.arguments]
    defaults = {arg.name: arg.default_value for arg in parsed.arguments if arg.has_default_value()}
    written = {arg.name for arg in parsed.arguments if arg.alias_info and arg.alias_info.is_write}
    plain = [name for name in arguments if name not in written]
    # Outputs of the functional form have names of their own; those of `.out` are arguments.
    names = list(written) if len(written) == len(gen.outs) else [out.name for out in gen.outs]

    def run(*args: Any, **kwargs: Any) -> Any:
        values = defaults | dict(zip(arguments, args, strict=False)) | kwargs
        for name, formula in gen.params:
            values[name] = formula.evaluate(values)
        tensors = [x for x in _torch.flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        outs = []
        for name, out in zip(names, gen.outs, strict=True):
            values[out.name] = _output(out, values, values.get(name), tensors)
            outs.append(values[out.name])
        if not any(_torch.is_fake(x) or x.is_meta for x in tensors):
            if gen.args is None:
                given = [values[name] for name in plain]
            else:
                given = [one.evaluate(values) for one in gen.args]
                given = [x for x in given if not any(x is out for out in outs)]
            execute(gen.kernel, *given, *outs)
        return outs[0] if len(outs) == 1 else tuple(outs)

    return run


def _output(out: Out, values: dict[str, Any], given: Any, tensors: list[Tensor]) -> Tensor:
    size: Any = None if out.size is None else out.size.evaluate(values)
    dtype: Any = None if out.dtype is None else out.dtype.evaluate(values)
    size = size.shape if isinstance(size, Tensor) else size
    dtype = dtype.dtype if isinstance(dtype, Tensor) else dtype
    if isinstance(given, Tensor):
        return given if size is None else given.resize_(tuple(size))
    device = tensors[0].device if tensors else "cpu"
    shape = [size] if isinstance(size, int) else list(size)
    return torch.empty(shape, dtype=dtype, device=device)
