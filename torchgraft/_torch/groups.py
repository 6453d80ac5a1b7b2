"""Process groups, their stores, and tensors that are split over them (torch 2.11 to 2.13)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def process_groups() -> list[Any]:
    """The process groups that this process is in, as they were made (torch 2.11 to 2.13)."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    from torch.distributed import distributed_c10d as c10d

    return list(c10d._world.pg_map)


def is_group_alive(group: Any) -> bool:
    """Whether a process group was not destroyed yet."""
    from torch.distributed import distributed_c10d as c10d

    return group in c10d._world.pg_map


def group_name(group: Any) -> str:
    """torch's own name of a process group, which operators take."""
    return str(group.group_name)


def group_description(group: Any) -> str:
    """What whoever made a group called it: `mesh_tp`, or `undefined`."""
    return str(group.group_desc)


def group_store(group: Any) -> Any:
    """The key-value store of a group, over a connection of its own where that is possible: a wait
    holds the connection (torch 2.11 to 2.13)."""
    from torch.distributed import distributed_c10d as c10d

    store: Any = c10d._get_process_group_store(group)
    return store.clone() if hasattr(store, "clone") else store


def group_timeout(group: Any) -> Any:
    """How long a group waits for its ranks, as a timedelta (torch 2.11 to 2.13)."""
    devices = group._device_types
    return min(group._get_backend(device).options._timeout for device in devices)


def group_backend(group: Any, device: torch.device) -> str:
    """`gloo`, `nccl`, …: who moves a group's tensors of a device."""
    return str(group._get_backend(device).name())


def wait_tensor(tensor: Tensor) -> Tensor:
    """The value of a functional collective, once it is there."""
    found: Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return found


def group_of(name: str) -> Any:
    """The process group that torch knows by this name (torch 2.11 to 2.13)."""
    from torch._C import _distributed_c10d

    return _distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def held_group(value: Any) -> Any:
    """A process group among the arguments of an operator, as one that may be let go last; other
    values as they are (torch 2.11 to 2.13).

    Whoever lets go of a group last waits for its threads, and a thread of gloo may be waiting for
    Python's lock to give a tensor back. Only torch's own object of a group gives up that lock.
    """
    boxed = isinstance(value, torch.ScriptObject)
    if not boxed or not value._type().qualified_name().endswith("c10d.ProcessGroup"):
        return value
    return torch.distributed.ProcessGroup.unbox(value)


def boxed_group(value: Any) -> Any:
    """The inverse of `held_group`: what an operator takes."""
    if not torch.distributed.is_available():
        return value
    return value.boxed() if isinstance(value, torch.distributed.ProcessGroup) else value


def keep_calls(packet: Any) -> None:
    """Let no pass of torch drop a call of this operator, whether its result is used or not."""
    torch.fx.node.has_side_effect(packet)
    torch.fx.node.has_side_effect(packet.default)


def shard_of(tensor: Any) -> Tensor | None:
    """This rank's own part of a DTensor; None: it is a plain tensor."""
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None or not isinstance(tensor, tensors.DTensor):
        return None
    shard: Tensor = tensor._local_tensor
    return shard


def shards(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, with this rank's own part of those that are DTensors."""
    own = {name: shard_of(tensor) for name, tensor in tensors.items()}
    return {name: t if (shard := own[name]) is None else shard for name, t in tensors.items()}


def export_shards() -> None:
    """Let torch.export take modules whose weights are DTensors: it asks how to write down their
    layout, which is a constant. Known to torch from then on (torch 2.11 to 2.13)."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    if DTensorSpec not in pytree.SUPPORTED_NODES:
        pytree.register_constant(DTensorSpec)


def compiled_frame() -> tuple[int, bool] | None:
    """The number of the function that torch.compile is compiling, and whether it did before."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    if current is None or current.frame_id is None:
        return None
    return current.frame_id, bool(current.frame_compile_id)
