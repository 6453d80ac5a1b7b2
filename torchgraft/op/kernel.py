"""Kernels of an operator: which devices there are, and which kernel a call gets."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from torchgraft import _torch
from torchgraft.errors import AmbiguousKernel, BadValue, UnknownName
from torchgraft.op.cpp import Source

DEVICES = {
    "cpu": "CPU",
    "cuda": "CUDA",
    "npu": "PrivateUse1",
    "xpu": "XPU",
    "mps": "MPS",
    "hpu": "HPU",
}
"""Devices that a kernel may be for, and torch's name of their place in the dispatcher."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Device code for an operator: a Python function (which may launch Triton), or a source."""

    device: str
    where: str
    fn: Callable[..., Any] | None = None
    source: Source | None = None
    when: Callable[..., bool] | None = None
    priority: int = 0

    def __str__(self) -> str:
        kind = "python" if self.source is None else self.source.language
        when = f", when {getattr(self.when, '__name__', self.when)}" if self.when else ""
        priority = f", priority {self.priority}" if self.priority else ""
        return f"{self.device} {kind} kernel at {self.where}{when}{priority}"


def dispatch_key(device: str) -> str:
    """Torch's name for a device; raises for one that it has no kernels for."""
    if device not in DEVICES:
        raise UnknownName("device", device, DEVICES, where="kernel")
    return DEVICES[device]


def insert(op: str, kernels: Sequence[Kernel], new: Kernel) -> tuple[Kernel, ...]:
    """The kernels of one device with another one, best first; two equals raise."""
    for old in kernels:
        if old.priority == new.priority:
            raise AmbiguousKernel(op, new.device, str(old), str(new), new.priority)
    return tuple(sorted([*kernels, new], key=lambda kernel: -kernel.priority))


def choose(kernels: Iterable[Kernel], args: Sequence[Any], kwargs: dict[str, Any]) -> Kernel | None:
    """The first kernel whose `when` accepts the call; None is the reference."""
    for kernel in kernels:
        if kernel.when is None or kernel.when(*args, **kwargs):
            return kernel
    return None


def device_of(values: Iterable[Any]) -> str | None:
    """The device type that a call runs on: that of its first tensor that is not on the CPU, else
    "cpu"; None without tensors."""
    found: str | None = None
    for value in values:
        if isinstance(value, Tensor):
            here: str | None = value.device.type
        elif isinstance(value, (list, tuple)):
            here = device_of(value)
        else:
            continue
        if here is not None and here != "cpu":
            return "npu" if here == _torch.private_device() else here
        found = found or here
    return found


def fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` whose results are new tensors: one that is a view of an input, or of another result, is
    copied, as torch asks of an operator. `x.contiguous()` is a view now and then."""
    is_alias = _torch.is_alias

    def run(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        if type(result) is Tensor:
            for value in args:
                if isinstance(value, Tensor):
                    if is_alias(result, value):
                        return result.clone()
                elif value.__class__ in _CONTAINERS:
                    return _copied(result, _tensors([args, kwargs]))
            return _copied(result, _tensors(kwargs)) if kwargs else result
        return _copied(result, _tensors([args, kwargs]))

    run.__wrapped__ = fn  # type: ignore[attr-defined]
    return run


_CONTAINERS = (list, tuple)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _copied(result: Any, seen: list[Tensor]) -> Any:
    if isinstance(result, Tensor):
        if any(_torch.is_alias(result, tensor) for tensor in seen):
            result = result.clone()
        seen.append(result)
        return result
    if isinstance(result, (list, tuple)):
        return type(result)(_copied(item, seen) for item in result)
    return result


def source_of(
    cpp: str | os.PathLike[str] | None, cuda: str | os.PathLike[str] | None, where: str
) -> Source | None:
    """The source that a kernel was given, or None. A path is from the folder of `where`."""
    if cpp is not None and cuda is not None:
        raise BadValue("kernel", "cpp= and cuda=", "one of them")
    if cpp is not None:
        return Source.read(cpp, "C++", where)
    return Source.read(cuda, "CUDA", where) if cuda is not None else None
