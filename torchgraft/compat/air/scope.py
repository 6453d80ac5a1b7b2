"""`torchair.scope`: what holds for a part of a model, as marks in its graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchgraft.compat.notes import without_effect
from torchgraft.stream.markers import LABEL

_TUNING = "this tunes the NPU; the program's result is the same"
_IDLE = {
    "_super_kernel_scope": ("super_kernel", _TUNING),
    "_op_aicore_num": ("limit_core_num", _TUNING),
    "_op_exec_never_timeout": ("op_never_timeout", "nothing times out here"),
    "torchair_enable_data_dump": ("data_dump", "dump_config keeps tensors of the whole graph"),
}


def notes(gm: GraphModule, example_inputs: Sequence[Any], config: Any) -> None:
    """A pass that changes nothing: it says which scopes of a graph have no effect."""
    for node in gm.graph.nodes:
        found = [_IDLE[key] for key in node.meta.get("scope", ()) if key in _IDLE]
        without_effect("scope.", dict(found))


@contextlib.contextmanager
def _scope(**attributes: str) -> Iterator[None]:
    torch.ops.air.scope_enter(list(attributes), list(attributes.values()))
    try:
        yield
    finally:
        torch.ops.air.scope_exit()


def npu_stream_switch(
    stream_tag: str, stream_priority: int = 0, enable_inner_parallel: bool = True
) -> contextlib.AbstractContextManager[None]:
    """Inside, operators run on the stream of this name."""
    return _scope(
        **{
            LABEL: stream_tag,
            "_user_stream_priority": str(stream_priority),
            "_enable_inner_parallel": str(enable_inner_parallel).lower(),
        }
    )


def super_kernel(scope: str | None, options: str = "") -> contextlib.AbstractContextManager[None]:
    """Operators to be fused into one kernel of the NPU; the generator here fuses what it can."""
    return _scope(_super_kernel_scope=scope or "", _super_kernel_options=options)


def limit_core_num(
    op_aicore_num: int, op_vectorcore_num: int
) -> contextlib.AbstractContextManager[None]:
    """How many cores of the NPU operators may use."""
    return _scope(_op_aicore_num=str(op_aicore_num), _op_vectorcore_num=str(op_vectorcore_num))


def op_never_timeout(enable: bool = True) -> contextlib.AbstractContextManager[None]:
    """Operators that may run for as long as they like."""
    if not isinstance(enable, bool):
        raise TypeError(f"op_never_timeout: expected True or False, got {enable!r}")
    return _scope(_op_exec_never_timeout=str(enable).lower())


def data_dump() -> contextlib.AbstractContextManager[None]:
    """Operators whose tensors a dump keeps."""
    return _scope(torchair_enable_data_dump="true")


def npu_wait_tensor(self: Tensor, dependency: Tensor) -> Tensor:
    """`self`, once `dependency` is there. Uses of `self` from here on wait, too."""
    result: Tensor = torch.ops.air.wait_tensor(self, dependency)
    return result


def __getattr__(name: str) -> Any:
    from torchgraft.compat.refused import refuse

    return refuse("torchair.scope", name)
