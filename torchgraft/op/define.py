"""`@graft.op`: a typed function becomes an operator; what else it has is checked against it."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchgraft import _torch
from torchgraft.errors import BadOp, BadValue, NotRegistered
from torchgraft.op import grad
from torchgraft.op import schema as schemas
from torchgraft.op.cpp import Opened, open_kernel
from torchgraft.op.declare import OWNERS, TABLE
from torchgraft.op.kernel import (
    Kernel,
    choose,
    device_of,
    dispatch_key,
    fresh,
    insert,
    source_of,
)
from torchgraft.passes import registry

Function = Callable[..., Any]
Tolerance = tuple[float, float, str]

_LOCK = threading.RLock()  # torch's table of operators is one for the process


class Op:
    """An operator made of a reference body. Calling it calls `torch.ops.ns.name`.

    The body is the kernel where no other is given, and what every other one is held to. Its fake
    (shapes and types without data), its gradient and its rule under `vmap` come from it.
    """

    def __init__(self, spec: str, reference: Function, mutates: Sequence[str] = ()) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self.__code__ = getattr(reference, "__code__", None)  # torch.export asks where it is from
        self.where = schemas.where(reference)
        text = schemas.schema_text(spec, reference, mutates)
        self.name = text.partition("(")[0].strip()
        self.gradient: grad.Backward | None = None
        self.repeats: set[str] = set()  # arguments with which the body was seen to draw nothing
        self.make_samples: Function | None = None
        self.fake_fn: Function | None = None
        self.tolerances: dict[torch.dtype, Tolerance] = {}
        self._kernels: dict[str, tuple[Kernel, ...]] = {}
        self._unbuilt: set[str] = set()
        self._libraries: dict[str, torch.library.Library] = {}
        self._opened: dict[str, Opened] = {}
        with _LOCK:
            self._declare(text)
        registry.current().keep(self)

    def _declare(self, text: str) -> None:
        space, base = self.name.split("::")
        owner = OWNERS.get(space)
        adopted = owner is not None and owner.adopt(base, text, self.where)
        if find(self.name) is not None and not adopted:
            known = {op.name: op for op in registry.current().ops}
            at = getattr(known.get(self.name), "where", "another library")
            raise BadOp(
                self.name,
                self.where,
                f"the name is taken, by {at}.",
                "Choose another name, or declare it in `with graft.Registry():`, which takes its "
                "operators back.",
            )
        library = self._library("")
        if not adopted:
            library.define(text.partition("::")[2], tags=(torch.Tag.pt2_compliant_tag,))
        self.overload: Any = find(self.name)
        self.parsed = self.overload._schema
        self.schema = str(self.parsed)
        self._call: Function = self.overload
        if owner is not None and adopted:  # a prototype has defined it, and waits for its body
            owner.bodies[base] = self._fallback()
        else:
            library.impl(base, self._fallback(), "CompositeExplicitAutograd")
        library.impl(base, grad.autograd_kernel(self), "Autograd")
        library.impl(base, self.reference, "FuncTorchBatched")
        for key in ("AutocastCPU", "AutocastCUDA"):
            library.impl(base, self._without_autocast, key)
        self._install_fake(fresh(self.reference))
        _torch.name_in_script(self, self.name.partition(".")[0])

    def _library(self, part: str) -> Any:
        """A new home for what is registered for a part; what was there before is taken back."""
        if part in self._libraries:
            _torch.drop_library(self._libraries.pop(part))
        made: Any = torch.library.Library(  # type: ignore[no-untyped-call]
            self.name.split("::")[0], "FRAGMENT"
        )
        self._libraries[part] = made
        return made

    def _fallback(self) -> Function:
        """The reference as a kernel. A call that a source waits for builds it and goes there."""
        body, unbuilt = fresh(self.reference), self._unbuilt

        def fallback(*args: Any, **kwargs: Any) -> Any:
            if unbuilt and device_of([*args, *kwargs.values()]) in unbuilt:
                self.build()
                return self.overload(*args, **kwargs)
            return body(*args, **kwargs)

        return fallback

    def _without_autocast(self, *args: Any, **kwargs: Any) -> Any:
        """The operator in the types that it is given, as compiled programs call it."""
        with _torch.no_autocast():
            return self.overload(*args, **kwargs)

    def _install_fake(self, fn: Function) -> None:
        torch.library.register_fake(self.name, fn, lib=self._library("fake"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<graft.op {self.schema}>"

    def __copy__(self) -> Op:
        return self  # as torch has one operator of a name

    def __deepcopy__(self, memo: Any) -> Op:
        return self

    def __reduce__(self) -> Any:
        return named, (self.name,)

    # --- What an author adds ---

    def kernel(
        self,
        device: str,
        *,
        when: Callable[..., bool] | None = None,
        priority: int = 0,
        cpp: str | os.PathLike[str] | None = None,
        cuda: str | os.PathLike[str] | None = None,
    ) -> Any:
        """A kernel for a device: under `@`, a Python function; or the source of a function with
        the operator's name, in C++ (`cpp=`) or CUDA (`cuda=`), as text or as a file's path.

        `when` takes the operator's arguments and says whether the kernel is for them. Of several
        kernels, the one of the highest `priority` that accepts a call is used, then the reference.
        A source is compiled at the first call that needs it.
        """
        dispatch_key(device)
        caller = sys._getframe(1)
        at = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        source = source_of(cpp, cuda, at)
        if source is not None:
            self._add(Kernel(device, at, None, source, when, priority))
            return self

        def decorate(fn: Function) -> Function:
            schemas.check_signature(
                self.parsed, self.name, f"the {device} kernel", fn, self.reference
            )
            self._add(Kernel(device, schemas.where(fn), fn, None, when, priority))
            return fn

        return decorate

    def fake(self, fn: Function) -> Function:
        """Under `@`: the result for tensors without data. It must not return an input."""
        schemas.check_signature(self.parsed, self.name, "the fake", fn, self.reference)
        with _LOCK:
            self.fake_fn = fn
            self._install_fake(fn)
        return fn

    def backward(self, fn: Function | None = None, *, save: Sequence[str] = ()) -> Any:
        """Under `@`: the gradients of the tensor parameters, in their order.

        The function takes the gradient of each result, then by name what `save` lists (tensor
        parameters; `out`, or `out0`, `out1`, …, for results) and any parameter that is no tensor.
        """
        if isinstance(save, str):
            raise BadValue("save", save, "a tuple of names")

        def decorate(fn: Function) -> Function:
            self.gradient = grad.check_backward(self, fn, save)
            return fn

        return decorate if fn is None else decorate(fn)

    def samples(self, fn: Function) -> Function:
        """Under `@`: a generator of argument tuples for `graft.check`, given a `graft.Make`."""
        if len(inspect.signature(fn).parameters) != 1:
            raise BadOp(
                self.name, schemas.where(fn), "samples take one argument.", "def _(make): yield ..."
            )
        self.make_samples = fn
        return fn

    def tolerance(self, limits: Mapping[torch.dtype, Tolerance]) -> None:
        """How far a kernel may be from the reference: `{dtype: (rtol, atol, "reason")}`."""
        for dtype, limit in limits.items():
            if len(limit) != 3 or not str(limit[2]).strip():
                raise BadValue(f"tolerance[{dtype}]", limit, "(rtol, atol, reason)")
        self.tolerances.update(limits)

    # --- Kernels ---

    def _add(self, kernel: Kernel) -> None:
        with _LOCK:
            device = kernel.device
            self._kernels[device] = insert(self.name, self._kernels.get(device, ()), kernel)
            self._install(device)

    def _install(self, device: str) -> None:
        """Put what a device has into the dispatcher: its only kernel itself, or a choice."""
        kernels = self._kernels[device]
        only = kernels[0]
        library = self._library(device)
        self._unbuilt.discard(device)
        if device in self._opened:
            self._opened.pop(device).close()
        if only.when is not None:
            runs = [(kernel.when, self._runner(kernel, i)) for i, kernel in enumerate(kernels)]
            run = _chooser([(w, fresh(r)) for w, r in runs], fresh(self.reference))
        elif only.fn is not None:
            run = fresh(only.fn)
        else:
            self._unbuilt.add(device)
            return
        library.impl(self.name.split("::")[1], run, dispatch_key(device))

    def _runner(self, kernel: Kernel, index: int) -> Function:
        """A kernel among others, as a function. A source gets an operator of its own."""
        if kernel.fn is not None:
            return kernel.fn
        space, base = self.name.split("::")
        name = f"{space}::{base.replace('.', '_')}_{kernel.device}{index}"
        ready: list[Any] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if not ready:
                with _LOCK:
                    if not ready:
                        ready.append(self._open_apart(name, kernel))
            return ready[0](*args, **kwargs)

        return run

    def _open_apart(self, name: str, kernel: Kernel) -> Any:
        library = self._library(name)
        library.define(name.partition("::")[2] + self.schema[self.schema.index("(") :])
        assert kernel.source is not None
        function = self.name.partition("::")[2].partition(".")[0]
        key = dispatch_key(kernel.device)
        if name in self._opened:
            self._opened.pop(name).close()
        opened = open_kernel(name, key, kernel.source, autograd=False, function=function)
        self._opened[name] = opened
        return find(name)

    def build(self) -> None:
        """Compile the sources of kernels that no call has asked for yet."""
        with _LOCK:
            for device in sorted(self._unbuilt):
                kernel = self._kernels[device][0]
                assert kernel.source is not None
                fast = not schemas.written(self.parsed)
                opened = open_kernel(self.name, dispatch_key(device), kernel.source, autograd=fast)
                space, base = self.name.split("::")
                if space == TABLE.space:
                    TABLE.compile_guard(base)
                self._opened[device] = opened
                self._unbuilt.discard(device)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel, device by device, in the order in which they are asked."""
        return tuple(kernel for device in self._kernels.values() for kernel in device)

    def chosen(self, *args: Any, **kwargs: Any) -> str:
        """Which kernel a call with these arguments gets, in words."""
        device = device_of([*args, *kwargs.values()])
        kernel = choose(self._kernels.get(device or "", ()), args, kwargs)
        return str(kernel) if kernel else f"the reference at {self.where}"

    def remove(self) -> None:
        """Take the operator back from torch. Programs that hold it can no longer run."""
        with _LOCK:
            self._call = self._gone
            _torch.name_in_script(self, None)
            space, base = self.name.split("::")
            if space in OWNERS:
                OWNERS[space].bodies.pop(base, None)
            for opened in self._opened.values():
                opened.close()
            self._opened.clear()
            for part in reversed(list(self._libraries)):
                _torch.drop_library(self._libraries.pop(part))

    def _gone(self, *args: Any, **kwargs: Any) -> Any:
        fix = "Keep using it inside the `with graft.Registry():` that it was declared in."
        raise BadOp(self.name, self.where, "it was removed.", fix)


def _chooser(runs: Sequence[tuple[Any, Function]], reference: Function) -> Function:
    def run(*args: Any, **kwargs: Any) -> Any:
        for when, kernel in runs:
            if when is None or when(*args, **kwargs):
                return kernel(*args, **kwargs)
        return reference(*args, **kwargs)

    return run


def find(name: str) -> Any:
    """The overload that torch knows by this name (`ns::name`, `ns::name.overload`), or None."""
    space, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, space), base, None)
    return getattr(packet, overload or "default", None)


def named(name: str) -> Op:
    """The operator declared by this name, in the current registry or in the default one."""
    known: dict[str, Op] = {op.name: op for op in reversed(registry.visible_ops())}
    if name not in known:
        raise NotRegistered(name, [known_name.rpartition("::")[2] for known_name in known])
    return known[name]


def explain_choice(overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Which kernel a call gets, in words; empty for what was not declared here.

    Where a size is not known yet, a `when=` is not asked: it would fix the size.
    """
    found = next((op for op in registry.visible_ops() if op.overload is overload), None)
    if found is None or not found.kernels:
        return ""
    values = _torch.flatten([list(args), kwargs])[0]
    if any(_torch.symbols_of(value) for value in values):
        return "its kernel is chosen at each call"
    return str(found.chosen(*args, **kwargs))


def op(spec: str, *, mutates: Sequence[str] = ()) -> Callable[[Function], Op]:
    """Under `@`: a torch operator from a typed function, its reference.

    `spec` is `ns::name`, or a whole schema: `ns::name(Tensor x, float alpha=1.0) -> Tensor`.
    `mutates` names the tensor parameters that the body writes.

    >>> import torch, torchgraft as graft
    >>> with graft.Registry():
    ...     @graft.op("docs::scale_add")
    ...     def scale_add(x: torch.Tensor, y: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    ...         return x + alpha * y
    ...     x = torch.ones(2, requires_grad=True)
    ...     torch.ops.docs.scale_add(x, x, 2.0).sum().backward()
    ...     x.grad
    tensor([3., 3.])
    """
    return lambda reference: Op(spec, reference, mutates)
