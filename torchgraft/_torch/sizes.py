"""Dynamic sizes: what torch would assume of them, and need not. torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Iterator
from typing import Any

_IN_VIEW: contextvars.ContextVar[bool] = contextvars.ContextVar("in_view", default=False)


@functools.cache
def assume_nothing() -> None:
    """Let Inductor compute the strides of a view without taking a dynamic size for more than 1,
    where tracing does not (`backed_size_oblivious`); it asked for that of sizes without a hint
    alone, and a program for batches of 1 to 8 was refused 1. Once in a process is enough.

    Not where fake tensors do so: they try that first, and look at hints where it fails.
    """
    from torch._inductor import ir
    from torch._subclasses import fake_impls
    from torch.fx.experimental import _config

    plain: Any = getattr(fake_impls, "_compute_stride", None)
    if plain is None or "size_oblivious" not in inspect.signature(plain).parameters:
        return
    owner: Any = ir.View
    create = owner.create.__func__

    @functools.wraps(plain)
    def strides(*args: Any, size_oblivious: bool = False) -> Any:
        nothing = _IN_VIEW.get() and _config.backed_size_oblivious
        return plain(*args, size_oblivious=size_oblivious or nothing)

    @functools.wraps(create)
    def created(cls: Any, *args: Any, **kwargs: Any) -> Any:
        token = _IN_VIEW.set(True)
        try:
            return create(cls, *args, **kwargs)
        finally:
            _IN_VIEW.reset(token)

    vars(fake_impls)["_compute_stride"] = strides
    owner.create = classmethod(created)


@contextlib.contextmanager
def unguarded(exported: Any) -> Iterator[None]:
    """Inside, tracing an exported program again does not run what it assumes of its inputs, which
    is in its fake mode anyway. Run on symbols, `s <= min(512, s)` became `s < 512`: a table of 512
    positions was for sequences of 511."""
    before = getattr(exported, "_guards_code", [])
    exported._guards_code = []
    try:
        yield
    finally:
        exported._guards_code = before
