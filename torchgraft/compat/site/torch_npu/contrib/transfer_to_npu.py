"""Importing this runs code that says `cuda` on the device `npu`: names, methods, `torch.cuda`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import distributed
from torch.overrides import TorchFunctionMode

import torch_npu
from torchgraft.compat import device, typed

_NAMES = (
    "Stream", "Event", "stream", "current_stream", "default_stream", "set_stream", "synchronize",
    "is_available", "device_count", "current_device", "set_device", "device", "device_of",
    "get_device_name", "get_device_properties", "empty_cache", "memory_allocated",
    "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats",
    "memory_summary", "reset_peak_memory_stats", "mem_get_info", "manual_seed", "manual_seed_all",
    "get_rng_state", "set_rng_state", "get_rng_state_all", "set_rng_state_all", "initial_seed",
    "is_bf16_supported", "is_initialized", "init", "get_device_capability", "graph",
    "graph_pool_handle", "is_current_stream_capturing",
)  # fmt: skip


def renamed(value: Any) -> Any:
    """A device that says `cuda`, as one that says `npu`; anything else as it is."""
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "npu" + value[4:]
    if isinstance(value, str) and value.startswith("torch.cuda."):  # a type, as torch names it
        return value.replace("cuda", "npu", 1)
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("npu", value.index) if value.index is not None else torch.device("npu")
    return value


class FromCuda(TorchFunctionMode):
    """Replaces the device in every call of torch."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = {key: renamed(value) for key, value in (kwargs or {}).items()}
        return device.traceable(func)(*[renamed(arg) for arg in args], **named)


def _with_hccl(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes process groups, for which `nccl` is `hccl`."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        named = {key: "hccl" if _says_nccl(value) else value for key, value in kwargs.items()}
        return plain(*["hccl" if _says_nccl(arg) else arg for arg in args], **named)

    return call


def _says_nccl(value: Any) -> bool:
    return isinstance(value, str) and value.lower() in ("nccl", "cuda:nccl", "cpu:gloo,cuda:nccl")


def _renaming(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one device, for which `cuda` is `npu`."""

    @functools.wraps(plain)
    def call(given: Any = None) -> Any:
        return plain(renamed(given))

    return call


def _moves(owner: Any) -> Callable[..., Any]:
    def cuda(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        return owner.npu(self, renamed(device), *args, **kwargs)

    return cuda


def _restored(storage: Any, location: str) -> Any:
    """For torch.load: what a file or a `map_location` says of a storage, with `npu` for `cuda`."""
    if not location.startswith("cuda"):
        return None
    restore: Any = torch.serialization.default_restore_location  # untyped in torch
    return restore(storage, renamed(location))


def transfer() -> None:
    """What importing does; where CUDA itself stands for the NPU there is nothing to do."""
    if device.kind() == "cuda":
        return
    for owner in (torch.Tensor, torch.nn.Module):
        owner.cuda = _moves(owner)  # type: ignore[method-assign]
    torch.Tensor.is_cuda = torch.Tensor.is_npu  # type: ignore[attr-defined]
    for name in (*_NAMES, *typed.NAMES):
        if hasattr(torch_npu.npu, name):
            setattr(torch.cuda, name, getattr(torch_npu.npu, name))
    torch.cuda.CUDAGraph = torch_npu.npu.NPUGraph  # type: ignore[misc]
    torch.Generator = device.generators(renamed)  # type: ignore[misc]
    if distributed.is_available():
        for name in ("init_process_group", "new_group"):
            setattr(distributed, name, _with_hccl(getattr(distributed, name)))
    for name in ("get_device_module", "set_default_tensor_type"):
        setattr(torch, name, _renaming(getattr(torch, name)))
    for name in ("autocast", "GradScaler"):
        setattr(torch.cuda.amp, name, getattr(torch_npu.npu.amp, name))
    torch.serialization.register_package(6, lambda storage: None, _restored)
    torch.amp.autocast.__init__ = device.autocasts(renamed)  # type: ignore[method-assign]
    mode: Any = FromCuda()
    mode.__enter__()


transfer()
