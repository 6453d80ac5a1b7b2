"""What `torch.npu` is on every device: settings that nothing comes of, and what is refused."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchgraft.compat import accepted, device, paths, typed
from torchgraft.compat.notes import without_effect
from torchgraft.compat.refused import missing
from torchgraft.compat.simulated import amp

__all__ = [
    "amp",
    "config",
    "conv",
    "get_amp_supported_dtype",
    "get_stream_limit",
    "init",
    "ipc_collect",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "is_jit_compile_false",
    "matmul",
    "mstx",
    "set_compile_mode",
    "set_option",
    "set_per_process_memory_fraction",
    "set_stream_limit",
]


def is_available() -> bool:
    """Whether there is a device; where this module is, there is one."""
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """The device is ready when it is loaded."""


def is_bf16_supported() -> bool:
    return True


def is_jit_compile_false() -> bool:
    """Whether operators are compiled ahead of time; here they always are."""
    return True


def ipc_collect() -> None:
    """No process holds memory of another's device."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def check_stream(stream: Any, kind: type) -> None:
    """Refuse what is no stream: a number, say, of which later calls would know nothing."""
    if not isinstance(stream, kind):
        raise TypeError(f"expected a torch.npu.Stream, got {stream!r}")


# --- Accepted, without effect ---


def set_compile_mode(jit_compile: bool = False) -> None:
    """How the NPU compiles operators."""
    without_effect("torch.npu.", {"set_compile_mode": "operators are compiled ahead of time here"})


def set_option(option: dict[str, Any]) -> None:
    """Options of the NPU's compiler."""
    where = "torch.npu.set_option: "
    without_effect(where, dict.fromkeys(option, "an option of the real device"))


def set_stream_limit(stream: Any, cube_num: int = -1, vector_num: int = -1) -> None:
    """How many cores of the NPU a stream may use."""
    without_effect("torch.npu.", {"set_stream_limit": "streams have no cores of their own here"})


def get_stream_limit(stream: Any) -> dict[str, int]:
    """The cores of a stream: -1 is no limit."""
    return {"cube_core_num": -1, "vector_core_num": -1}


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """How much of the device's memory the process may take."""
    without_effect(
        "torch.npu.",
        {"set_per_process_memory_fraction": "TORCHGRAFT_NPU_MEMORY limits a simulated device"},
    )


class mstx:
    """Marks in a trace of the NPU's tools."""

    @staticmethod
    def mark(message: str = "", stream: Any = None) -> None:
        without_effect("torch.npu.mstx.", {"mark": "use torch.profiler.record_function"})

    @staticmethod
    def range_start(message: str, stream: Any = None) -> int:
        without_effect("torch.npu.mstx.", {"range_start": "use torch.profiler.record_function"})
        return 0

    @staticmethod
    def range_end(range_id: int) -> None:
        """Nothing was begun."""

    @staticmethod
    def mstx_range(message: str, stream: Any = None) -> Callable[[Any], Any]:
        """Over a function: a range each time it runs."""
        without_effect("torch.npu.mstx.", {"mstx_range": "use torch.profiler.record_function"})
        return lambda function: function


class _Accepted:
    """Settings of the real device: they keep what is written, and say that nothing comes of it."""

    _where: str

    def __init__(self, where: str, **values: Any) -> None:
        self.__dict__.update(values, _where=where)

    def __setattr__(self, name: str, value: Any) -> None:
        without_effect(f"torch.npu.{self._where}.", {name: "a setting of the real device"})
        self.__dict__[name] = value


config = _Accepted("config", allow_internal_format=True)
matmul = _Accepted("matmul", allow_hf32=False)
conv = _Accepted("conv", allow_hf32=True)


# --- Refused ---

REFUSED = {
    "make_graphed_callables": "torch.npu.graph captures, and torch.compile(backend='npugraph_ex') "
    "compiles.",
    "ExternalEvent": "Update a graph before it is replayed: NPUGraph.update, "
    "torch.npu.graph_task_update_begin.",
    **dict.fromkeys(
        ("caching_allocator_alloc", "caching_allocator_delete"),
        "Use torch.empty(..., device='npu').",
    ),
    "memory_snapshot": "Use torch.npu.memory_stats.",
    "utilization": "Use torch_npu.profiler.",
    **dict.fromkeys(
        ("npu_check_overflow", "get_npu_overflow_flag", "clear_npu_overflow_flag"),
        "Use torch.isfinite.",
    ),
    "get_soc_version": "There is no chip here; ask for the operator that you need.",
    **dict.fromkeys(
        ("init_dump", "set_dump", "finalize_dump"),
        "Use CompilerConfig().debug.data_dump, or graft.compile(..., verify=...).",
    ),
    **dict.fromkeys(
        ("stress_detect", "check_uce_in_memory", "restart_device", "stop_device"),
        "There is no chip here to test or to restart.",
    ),
    "get_cann_version": "There is no CANN here; torch_npu.__version__ is torch's.",
    "current_blas_handle": "Use torch.matmul.",
    "set_aoe": "mode='max-autotune' of graft.compile measures and keeps the fastest.",
    **dict.fromkeys(
        ("obfuscation_initialize", "obfuscation_calculate", "obfuscation_finalize"),
        "Weights are not hidden here. Use the tensor as it is.",
    ),
    **dict.fromkeys(
        ("MemPool", "MemPoolContext", "use_mem_pool", "change_current_allocator"),
        "Memory of a captured graph is its own: torch.npu.graph_pool_handle.",
    ),
    **dict.fromkeys(
        [name.replace("Tensor", "Storage") for name in typed.NAMES],
        "Use tensor.untyped_storage(), or torch.UntypedStorage(..., device='npu').",
    ),
    "NPUPluggableAllocator": "TORCHGRAFT_NPU_MEMORY sets how much memory a simulated device has.",
}
"""Of `torch.npu`, with the nearest that works."""


def attribute(name: str, known: Iterable[str]) -> Any:
    """`torch.npu.name` where the module has no such name; raises, and knows a typing error."""
    if name == "npugraph_ex":
        return importlib.import_module(name)
    if name in paths.ALIASES["torch_npu.npu"]:  # modules of torch_npu.npu, which is one here
        return torch.npu  # type: ignore[attr-defined]
    if name in ("aclnn", "backends"):
        return paths.Refusing(f"torch_npu.npu.{name}", paths.REFUSED[f"torch_npu.npu.{name}"])
    if name in accepted.__all__:
        return getattr(accepted, name)
    if name in typed.NAMES:
        return typed.of(name, "torch.npu" if device.kind() == "npu" else "torch")
    if name in REFUSED:
        raise missing(f"torch.npu.{name}", REFUSED[name])
    public = [one for one in known if not one.startswith("_")]
    close = difflib.get_close_matches(name, public, 1)
    hint = f". Did you mean {close[0]!r}?" if close else ""
    raise AttributeError(f"module 'torch.npu' has no attribute {name!r}{hint}")
