"""The arguments of `compile`, checked, and the `graft.Config` that they mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torchgraft as graft
from torchgraft.compat import notes, settings
from torchgraft.compat.aie.enums import PRECISION, PrecisionPolicy
from torchgraft.native.frontend import rounding

SUPPORT_SOC_NAME = (
    "Ascend310P1",
    "Ascend310P2",
    "Ascend310P3",
    "Ascend310P4",
    "Ascend310P5",
    "Ascend310P7",
    *(f"Ascend910B{number}" for number in (1, 2, 3, 4)),
    "Ascend910B2C",
)
IDLE = {
    "allow_tensor_replace_int": "sizes are computed symbolically, never as tensors",
    "soc_version": "the program is compiled for the machine that it is on",
    "default_buffer_size_vec": "outputs are allocated when their sizes are known",
}
"""Arguments that are checked and change nothing here, with the reason."""
_MOST_BLOCK = 1024
_MOST_BUFFER = 36864


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything but the module and its inputs."""

    precision_policy: PrecisionPolicy = PrecisionPolicy.PREF_FP32
    truncate_long_and_double: bool = True
    require_full_compilation: bool = False
    allow_tensor_replace_int: bool = False
    min_block_size: int = 1
    torch_executed_ops: Sequence[Any] = ()
    torch_executed_modules: Sequence[Any] = ()
    default_buffer_size_vec: Sequence[int] = (500,)
    soc_version: str = "Ascend310P3"
    optimization_level: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.precision_policy, PrecisionPolicy):
            raise ValueError(
                f"precision_policy: expected a PrecisionPolicy, got {self.precision_policy!r}"
            )
        for name in (
            "truncate_long_and_double",
            "require_full_compilation",
            "allow_tensor_replace_int",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        _whole("min_block_size", self.min_block_size, 0, _MOST_BLOCK)
        _whole("optimization_level", self.optimization_level, 0, 2)
        for name in ("torch_executed_ops", "torch_executed_modules", "default_buffer_size_vec"):
            if not isinstance(getattr(self, name), (list, tuple)):
                raise ValueError(f"{name}: expected a list, got {getattr(self, name)!r}")
        for size in self.default_buffer_size_vec:
            _whole("default_buffer_size_vec", size, 1, _MOST_BUFFER)
        if self.soc_version not in SUPPORT_SOC_NAME:
            known = ", ".join(SUPPORT_SOC_NAME)
            raise ValueError(f"soc_version: expected one of {known}, got {self.soc_version!r}")

    def check_outputs(self, count: int | None) -> None:
        """Raise where the buffers are neither one for all outputs nor one for each. A count of
        None is not known before a call."""
        given = len(self.default_buffer_size_vec)
        if given != 1 and (given == 0 or count not in (None, given)):
            many = "as many as there are outputs" if count is None else f"{count} (the outputs)"
            raise ValueError(
                f"default_buffer_size_vec: expected 1 size or {many}, got {given}: "
                f"{list(self.default_buffer_size_vec)}"
            )

    @staticmethod
    def of(arguments: dict[str, Any]) -> Spec:
        """From keywords; an unknown one raises."""
        known = [field.name for field in dataclasses.fields(Spec)]
        for name in arguments:
            if name not in known:
                raise TypeError(f"compile() got an unexpected argument {name!r}; it takes {known}")
        return Spec(**arguments)

    def config(self) -> graft.Config:
        """The same as torchgraft's. Doubles are computed as floats where that is allowed; 64-bit
        integers stay exact. Where nothing is compiled, nothing is missing from it. What has no
        effect is said."""
        default = {field.name: field.default for field in dataclasses.fields(self)}
        set_ = {name: why for name, why in IDLE.items() if getattr(self, name) != default[name]}
        notes.without_effect("compile.", set_)
        mode = settings.mode("max-autotune" if self.optimization_level == 2 else "default")
        precision = PRECISION[self.precision_policy]
        if precision is None and self.truncate_long_and_double:
            precision = "float32"
        return graft.Config(
            mode=mode,
            precision=precision,
            require_full_compilation=self.require_full_compilation and mode != "eager",
            min_block_size=max(self.min_block_size, 1),
            torch_executed_ops=tuple(self.torch_executed_ops),
            torch_executed_modules=tuple(self.torch_executed_modules),
            inductor=rounding(precision),
        )


def _whole(field: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{field}: expected a whole number from {low} to {high}, got {value!r}")
