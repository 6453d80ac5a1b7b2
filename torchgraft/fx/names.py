"""Operators by name: `aten::add`, `aten.add.Tensor`, or a schema's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchgraft import _torch
from torchgraft.errors import BadValue, NotRegistered, UnknownName


def split(name: str) -> tuple[str, str, str]:
    """Namespace, operator and overload (may be empty) of `ns::op.overload` or `ns.op.overload`."""
    text = name.split("(", 1)[0].strip().replace("::", ".", 1)
    space, _, rest = text.partition(".")
    op, _, overload = rest.partition(".")
    if not all(part.isidentifier() for part in (space, op, overload or "_")):
        raise BadValue("operator", name, "a name such as 'aten::relu' or 'aten::add.Tensor'")
    return space, op, overload


def packet(name: str) -> Any:
    """The operator of a name, its overload left open."""
    space, op, _ = split(name)
    found = getattr(getattr(torch.ops, space), op, None)
    if not _torch.is_packet(found):
        raise NotRegistered(f"{space}::{op}", dir(getattr(torch.ops, space)))
    return found


def operator_named(
    name: str, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
) -> Any:
    """The overload that a name means. Of a schema's text the name and the overload count.

    Where the name leaves the overload open, the arguments choose it, as in a Python call; without
    arguments it is `default`, which then must exist.
    """
    found = packet(name)
    space, op, overload = split(name)
    if not overload and "(" not in name and args is not None:
        overload = _torch.resolve_overload(f"{space}::{op}", args, kwargs or {})
    overload = overload or "default"
    if overload not in found.overloads():
        raise UnknownName(f"overload of {space}::{op}", overload, found.overloads())
    return getattr(found, overload)


def matches(target: Any, name: str) -> bool:
    """Whether a call's target is the operator (any overload where the name leaves it open)."""
    if not _torch.is_op(target):
        return False
    space, op, overload = split(name)
    full = target.name()  # `aten::add.Tensor`, `aten::relu`
    base, _, own = full.partition(".")
    return bool(base == f"{space}::{op}" and overload in ("", own or "default"))
