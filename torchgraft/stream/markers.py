"""The marker operators `torch.ops.air.*`: streams and order written into a program as calls.

In eager code they do nothing. In a graph `fx.label` reads them: a scope names the stream of the
nodes in it, a record is a point that its stream has reached, a wait holds the stream it stands on.
They are Ascend's names; where its own package is installed, they are left to it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SCHEMAS = (
    "scope_enter(str[] keys, str[] values, bool need_execute=False) -> ()",
    "scope_exit(bool need_execute=False) -> ()",
    "record(*, Device? device=None) -> Tensor",
    "wait(Tensor[] x) -> ()",
    "wait_tensor(Tensor self, Tensor dependency) -> Tensor",
)
LABEL = "_user_stream_label"
"""The key of a scope that names its stream."""


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _token(*, device: torch.device | None = None) -> Tensor:
    return torch.empty(0, device=device)


def _copy(value: Tensor, dependency: Tensor) -> Tensor:
    return value.clone()


def _itself(value: Tensor, dependency: Tensor) -> Tensor:
    # The same object: whoever traces lets later uses of `value` come after the wait, too, also
    # where the program drops the result.
    return value


_KERNELS = {
    "scope_enter": _nothing,
    "scope_exit": _nothing,
    "record": _token,
    "wait": _nothing,
    "wait_tensor": _copy,
}


def define() -> Any:
    """Define the operators; None where somebody else has, or will."""
    if _elsewhere() or hasattr(torch.ops.air, "scope_enter"):
        return None
    library: Any = torch.library.Library("air", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in SCHEMAS:
        name = schema.partition("(")[0]
        # Otherwise TorchScript takes those that give nothing for dead.
        library.define(schema, alias_analysis="CONSERVATIVE")
        library.impl(name, _KERNELS[name], "CompositeExplicitAutograd")
        if name != "wait_tensor":  # an unused record stays, to be reported
            torch.fx.node.has_side_effect(getattr(torch.ops.air, name).default)
    library.impl("wait_tensor", _itself, "Meta")
    return library


def _elsewhere() -> bool:
    """Whether the real package is installed; the folder beside this one stands in for it."""
    spec = importlib.util.find_spec("torchair")
    home = Path(__file__).parents[1]
    return spec is not None and not Path(spec.origin or "").is_relative_to(home)


_LIBRARY = define()  # lives as long as the process, as operators do
