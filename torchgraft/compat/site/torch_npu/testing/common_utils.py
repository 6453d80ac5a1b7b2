"""What tests of NPU operators are written with: every test runs where there is no NPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy
import torch

from torchgraft.compat import refused

__all__ = [
    "SupportedDevices",
    "create_common_tensor",
    "create_dtype_tensor",
    "freeze_rng_state",
    "get_npu_device",
    "is_iterable",
    "set_npu_device",
]


class SupportedDevices:
    """Of a test: the NPUs it is for."""

    def __init__(self, supported_device_name_list: list[str]) -> None:
        self.supported_device_name_list = supported_device_name_list

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn


def create_common_tensor(
    item: Sequence[Any], minValue: float, maxValue: float, device: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same random values on the CPU and on the device. `item` is a dtype of numpy, a format and
    a shape."""
    dtype, _, shape = item
    drawn = numpy.random.uniform(minValue, maxValue, shape).astype(dtype)
    made = torch.from_numpy(drawn)
    return made, made.to(device or get_npu_device())


def create_dtype_tensor(
    shape: Sequence[int],
    dtype: torch.dtype,
    npu_format: int = -1,
    min_value: float = -5,
    max_value: float = 5,
    no_zero: bool = False,
    device: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Likewise, by a dtype of torch."""
    if dtype == torch.bool:
        made = torch.randint(0, 2, shape).bool()
    else:
        made = torch.empty(shape, dtype=torch.float64).uniform_(min_value, max_value).to(dtype)
        made = torch.where(made == 0, 1, made).to(dtype) if no_zero else made
    return made, made.to(device or get_npu_device())


def get_npu_device() -> str:
    """The device of tests: `$SET_NPU_DEVICE`, or the first."""
    return f"npu:{os.environ.get('SET_NPU_DEVICE', 0)}"


def set_npu_device() -> str:
    """Make it the current one."""
    torch.npu.set_device(get_npu_device())  # type: ignore[attr-defined]
    return get_npu_device()


@contextlib.contextmanager
def freeze_rng_state() -> Iterator[None]:
    """Inside, random numbers are drawn that are drawn again afterwards."""
    with torch.random.fork_rng(device_type="npu"):
        yield


def is_iterable(obj: object) -> bool:
    return isinstance(obj, Iterable)


def __getattr__(name: str) -> Any:
    return refused.refuse("torch_npu.testing.common_utils", name)
