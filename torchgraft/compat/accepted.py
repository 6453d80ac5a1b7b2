"""What `torch.npu` has beside `torch.cuda`'s names, and what of those has no effect here."""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.compat.device import kind
from torchgraft.compat.notes import without_effect

__all__ = [
    "disable_deterministic_with_backward",
    "enable_deterministic_with_backward",
    "get_allocator_backend",
    "get_autocast_dtype",
    "get_device_limit",
    "get_mm_bmm_format_nd",
    "get_sync_debug_mode",
    "host_empty_cache",
    "is_autocast_enabled",
    "is_support_inf_nan",
    "memory_stats_as_nested_dict",
    "reset_stream_limit",
    "set_autocast_dtype",
    "set_autocast_enabled",
    "set_device_limit",
    "set_mm_bmm_format_nd",
    "set_sync_debug_mode",
]


# --- Autocast ---


def is_autocast_enabled() -> bool:
    return torch.is_autocast_enabled(kind())


def set_autocast_enabled(enable: bool) -> None:
    torch.set_autocast_enabled(kind(), enable)


def get_autocast_dtype() -> torch.dtype:
    return torch.get_autocast_dtype(kind())


def set_autocast_dtype(dtype: torch.dtype) -> None:
    torch.set_autocast_dtype(kind(), dtype)


# --- Asked for, with one answer ---


def is_support_inf_nan() -> bool:
    """Whether a sum that is too large is inf, and not the largest number."""
    return True


def get_allocator_backend() -> str:
    return "native"


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    """The statistics; `allocated_bytes.all.peak` is a value three dicts deep."""
    found: dict[str, Any] = {}
    for name, value in torch.npu.memory_stats(device).items():  # type: ignore[attr-defined]
        *groups, last = name.split(".")
        held = found
        for group in groups:
            held = held.setdefault(group, {})
        held[last] = value
    return found


def host_empty_cache() -> None:
    """Host memory is not cached here."""


# --- Accepted, without effect ---

_said: dict[str, Any] = {"sync": 0, "nd": True}


def _idle(name: str, why: str) -> None:
    without_effect("torch.npu.", {name: why})


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Warn of, or refuse, calls that wait for the device."""
    modes = {"default": 0, "warn": 1, "error": 2}
    mode = modes.get(debug_mode) if isinstance(debug_mode, str) else debug_mode
    if mode not in modes.values():
        raise RuntimeError(f"sync_debug_mode: expected one of {', '.join(modes)}: {debug_mode!r}")
    if mode:
        _idle("set_sync_debug_mode", "calls that wait are not watched")
    _said["sync"] = mode


def get_sync_debug_mode() -> int:
    return int(_said["sync"])


def set_mm_bmm_format_nd(is_nd: bool = True) -> None:
    """Which format products have."""
    if not isinstance(is_nd, bool):
        raise TypeError(f"set_mm_bmm_format_nd: expected True or False, got {is_nd!r}")
    if not is_nd:
        _idle("set_mm_bmm_format_nd", "tensors have one format off the NPU")
    _said["nd"] = is_nd


def get_mm_bmm_format_nd() -> bool:
    return bool(_said["nd"])


def enable_deterministic_with_backward(tensor: torch.Tensor) -> torch.Tensor:
    """From here on kernels are deterministic, and in the backward of what follows."""
    _idle("enable_deterministic_with_backward", "see torch.use_deterministic_algorithms")
    return tensor


def disable_deterministic_with_backward(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def reset_stream_limit(stream: Any) -> None:
    """A stream has no limit here."""


def set_device_limit(device: Any, cube_num: int = -1, vector_num: int = -1) -> None:
    """How many cores of the NPU this process may use."""
    _idle("set_device_limit", "the device has no cores of its own here")


def get_device_limit(device: Any) -> dict[str, int]:
    """The cores of a device: -1 is no limit."""
    return {"cube_core_num": -1, "vector_core_num": -1}
