"""Settings of the NPU's profiler: read, checked, and without effect here."""

from __future__ import annotations

import enum
from typing import Any

from torchgraft.compat.notes import without_effect

__all__ = [
    "AiCMetrics",
    "ExportType",
    "HostSystem",
    "ProfilerLevel",
    "_ExperimentalConfig",
    "supported_ai_core_metrics",
    "supported_export_type",
    "supported_profiler_level",
]


class ProfilerLevel(enum.Enum):
    """How much the device is asked for."""

    Level_none = "Level_none"
    Level0 = "Level0"
    Level1 = "Level1"
    Level2 = "Level2"


class AiCMetrics(enum.Enum):
    """Which counters of the cores are read."""

    PipeUtilization = "PipeUtilization"
    ArithmeticUtilization = "ArithmeticUtilization"
    Memory = "Memory"
    MemoryL0 = "MemoryL0"
    MemoryUB = "MemoryUB"
    ResourceConflictRatio = "ResourceConflictRatio"
    L2Cache = "L2Cache"
    MemoryAccess = "MemoryAccess"
    AiCoreNone = "ACL_AICORE_NONE"


class ExportType(enum.Enum):
    """The files that are written."""

    Text = "text"
    Db = "db"


class HostSystem(enum.Enum):
    """What is read of the host."""

    CPU = "cpu"
    MEM = "mem"
    DISK = "disk"
    NETWORK = "network"
    OSRT = "osrt"


_DEFAULTS: dict[str, Any] = {
    "profiler_level": ProfilerLevel.Level0,
    "aic_metrics": AiCMetrics.AiCoreNone,
    "l2_cache": False,
    "msprof_tx": False,
    "mstx": False,
    "mstx_domain_include": [],
    "mstx_domain_exclude": [],
    "data_simplification": True,
    "record_op_args": False,
    "op_attr": False,
    "gc_detect_threshold": None,
    "export_type": None,
    "host_sys": [],
    "sys_io": False,
    "sys_interconnection": False,
}
_TYPES: dict[str, type[enum.Enum]] = {"profiler_level": ProfilerLevel, "aic_metrics": AiCMetrics}


class _ExperimentalConfig:
    """The settings. An unknown one raises; those that differ from the default are said once."""

    def __init__(self, **settings: Any) -> None:
        for name, value in settings.items():
            if name not in _DEFAULTS:
                raise TypeError(
                    f"_ExperimentalConfig has no setting {name!r}; it has {', '.join(_DEFAULTS)}"
                )
            if name in _TYPES and isinstance(value, str):  # what these are on the NPU
                settings[name] = value = _named(_TYPES[name], value)
            if name in _TYPES and not isinstance(value, _TYPES[name]):
                raise TypeError(f"{name} is {value!r}; it must be a {_TYPES[name].__name__}")
        self.__dict__.update(_DEFAULTS | settings)
        changed = [name for name, value in settings.items() if value != _DEFAULTS[name]]
        why = "the simulated device has no such counters"
        without_effect("torch_npu.profiler: ", dict.fromkeys(changed, why))


def _named(kind: type[enum.Enum], value: str) -> Any:
    """The member of an enum by its value; the text itself where there is none."""
    return next((one for one in kind if one.value == value), value)


def supported_profiler_level() -> set[ProfilerLevel]:
    return set(ProfilerLevel)


def supported_ai_core_metrics() -> set[AiCMetrics]:
    return set(AiCMetrics)


def supported_export_type() -> set[ExportType]:
    return set(ExportType)
