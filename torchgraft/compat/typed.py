"""`torch.npu.FloatTensor` and its siblings: torch's old constructors, for the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

NAMES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


class Typed(type):
    """The type of such a class. Its objects are tensors, of one dtype and on the device."""

    dtype: torch.dtype

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.is_npu and value.dtype == cls.dtype  # type: ignore[attr-defined]

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`FloatTensor(2, 3)` has these sizes, `FloatTensor([2, 3])` these values."""
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            return args[0].to("npu", cls.dtype)
        plain = getattr(torch, cls.__name__.rpartition(".")[2])
        made: torch.Tensor = plain(*args, **kwargs).to("npu")
        return made


@functools.cache
def of(name: str, prefix: str) -> Typed:
    """The class of a name. torch takes what it is called, `prefix` with it, for the type that
    `x.type(...)` is asked for."""
    return Typed(f"{prefix}.{name}", (), {"dtype": NAMES[name], "__module__": "torch.npu"})


def defaults(plain: Callable[[Any], None], kind: str) -> Callable[[Any], None]:
    """`torch.set_default_tensor_type`, which takes these too, where `kind` is the NPU."""

    @functools.wraps(plain)
    def call(t: Any) -> None:
        name = str(getattr(t, "__name__", t))
        ours = isinstance(t, Typed) or name.startswith("torch.npu.")
        if kind == "npu" and (ours or torch.get_default_device().type == "npu"):
            torch.set_default_device("npu" if ours else None)
        where = "torch.cuda" if kind == "cuda" else "torch"
        plain(f"{where}.{name.rpartition('.')[2]}" if ours else t)

    return call
