"""Operators of our own: each stands in a graph for what the generator is taught to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchgraft._torch import generator


def declared(schema: str, plain: Callable[..., Any], **kernels: Callable[..., Any]) -> Any:
    """The operator `torchgraft::` of a schema, `plain` torch for every device without a kernel of
    its own. It goes with the object that is returned."""
    library: Any = torch.library.Library("torchgraft", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(schema)
    name = schema.partition("(")[0]
    for key, kernel in {"CompositeExplicitAutograd": plain, **kernels}.items():
        library.impl(name, kernel, key)
    op: Any = getattr(torch.ops.torchgraft, name).default
    op.library = library
    return op


def is_ahead(*vendors: str) -> bool:
    """Whether this is a processor of those on which some loop of ours was measured, and is ahead of
    a library's."""
    return generator.vendor() in vendors and torch.backends.cpu.get_cpu_capability() == "AVX512"
