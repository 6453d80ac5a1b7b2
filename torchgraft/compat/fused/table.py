"""The references by their schemas, and how they become operators `npu::name`."""

from __future__ import annotations

import contextvars
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchgraft import _torch
from torchgraft.errors import Clash, NotOnThisDevice
from torchgraft.op.define import find, op
from torchgraft.op.plugin.wire import NPU
from torchgraft.op.schema import registered

F = TypeVar("F", bound=Callable[..., Any])
SPACE = "npu"
NAMES: dict[str, tuple[str, Callable[..., Any]]] = {}
"""By name: the schema of an operator that returns new tensors, and its reference."""
_WRITING: dict[str, tuple[str, Callable[..., Any]]] = {}
"""Likewise, of one that writes an argument and returns it: torch sees what it is made of."""


def reference(schema: str, by_name: bool = False) -> Callable[[F], F]:
    """Under `@`: the meaning of a fused operator. With `by_name` it takes one object that has the
    arguments: some have thirty."""
    name = schema.partition("(")[0]
    table = _WRITING if "!" in schema else NAMES

    def keep(fn: F) -> F:
        table[name] = (schema, _by_name(schema, fn) if by_name else fn)
        return fn

    return keep


def _by_name(schema: str, fn: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function with the parameters of a schema."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    arguments = _torch.parse_schema(f"{SPACE}::{schema}").arguments
    tensors = [a.name for a in arguments if a.type.kind() == "TensorType"]
    signature = inspect.Signature(
        [
            inspect.Parameter(
                a.name,
                kinds[a.kwarg_only],
                default=a.default_value if a.has_default_value() else inspect.Parameter.empty,
            )
            for a in arguments
        ]
    )

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name in tensors:
            if bound.arguments[name] is None:  # the dispatcher lets it pass for an empty tensor
                raise TypeError(f"{schema.partition('(')[0]}: {name} must be a tensor, not None")
        return fn(types.SimpleNamespace(**bound.arguments))

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def declare() -> None:
    """Declare each for the whole process, unless a project has declared it."""
    contextvars.Context().run(_declare)  # outside of any `with graft.Registry():`


def _declare() -> None:
    for name, (schema, fn) in NAMES.items():
        full = f"{SPACE}::{name}"
        if find(full) is None or _waits(name, f"{SPACE}::{schema}"):
            op(f"{SPACE}::{schema}")(fn)
    for name, (schema, fn) in _WRITING.items():
        if registered(f"{SPACE}::{name}") is None:
            NPU.library.define(schema)
            NPU.library.impl(name, fn, "CompositeImplicitAutograd")


def _waits(name: str, schema: str) -> bool:
    """Whether a file has declared the operator alike and has nothing that computes it."""
    try:
        return NPU.adopt(name, schema, "torch_npu")
    except Clash:  # of another version: what the file says holds
        return False


def refuse(name: str, nearest: str, **given: Any) -> None:
    """`NotOnThisDevice` for the first argument that is given."""
    for argument, value in given.items():
        if value is not None and value is not False:
            raise NotOnThisDevice(f"torch_npu.{name}({argument}=...)", nearest)


def wide(x: Tensor) -> Tensor:
    """The tensor in the precision that it is computed in: halves in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
