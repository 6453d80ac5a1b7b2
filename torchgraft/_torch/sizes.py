"""Dynamic sizes: what torch would assume of them, and need not. torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def unassumed() -> Iterator[None]:
    """Inside, Inductor computes the strides of a view without taking a dynamic size for more than 1
    where tracing does not (`backed_size_oblivious`); it asked for that of sizes without a hint
    alone, and a program for batches of 1 to 8 was refused 1.

    Not where fake tensors do so: they try that first, and look at hints where it fails. For this
    thread, which must be the only one that compiles.
    """
    from torch._inductor import ir
    from torch._subclasses import fake_impls
    from torch.fx.experimental import _config

    plain: Any = getattr(fake_impls, "_compute_stride", None)
    if plain is None or "size_oblivious" not in inspect.signature(plain).parameters:
        yield
        return
    create: Any = ir.View.create.__func__  # type: ignore[attr-defined]
    here, deep = threading.get_ident(), 0

    def strides(*args: Any, size_oblivious: bool = False) -> Any:
        nothing = deep and _config.backed_size_oblivious and threading.get_ident() == here
        return plain(*args, size_oblivious=size_oblivious or bool(nothing))

    def created(cls: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal deep
        deep += 1
        try:
            return create(cls, *args, **kwargs)
        finally:
            deep -= 1

    with (
        mock.patch.object(fake_impls, "_compute_stride", strides),
        mock.patch.object(ir.View, "create", classmethod(created)),
    ):
        yield


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
