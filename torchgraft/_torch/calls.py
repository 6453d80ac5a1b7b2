"""Operators as they are called, below autograd. Holds for torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class _Through(TorchDispatchMode):
    def __init__(self, call: Call) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})


def through(call: Call) -> contextlib.AbstractContextManager[Any]:
    """Inside, every operator is called by `call(operator, args, kwargs)`; what that calls in turn
    is not. Holds for the thread, and for backward passes that it starts."""
    return _Through(call)


def seeing(see: Callable[[Any], None]) -> contextlib.AbstractContextManager[Any]:
    """Show `see` every operator that is called inside, before it runs."""

    def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        see(func)
        return func(*args, **kwargs)

    return through(call)
