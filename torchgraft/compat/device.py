"""The device `npu` as another one: `x.npu()`, `"npu:0"` and `device="npu"` mean cpu or cuda."""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.overrides import TorchFunctionMode

from torchgraft.compat import typed
from torchgraft.errors import NotOnThisDevice, UnknownName

VARIABLE = "TORCHGRAFT_DEVICE"
"""Where a process, and those it starts, learn which device stands for the NPU."""
CHOICES = ("auto", "cpu", "cuda", "npu")
_has_cuda = torch.cuda.is_available  # torch's own: `transfer_to_npu` puts another in its place


class Mapped(TorchFunctionMode):
    """Replaces the device `npu` in every call of torch; a compiler traces through it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        func = traceable(func)
        if func is torch.device:
            return _device(self.kind, *args, **(kwargs or {}))
        args = tuple([mapped(arg, self.kind) for arg in args])
        named = {key: mapped(value, self.kind) for key, value in (kwargs or {}).items()}
        if self.kind == "cpu":
            return _on_host(func, args, named)
        return func(*args, **named)


def traceable(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch as a compiler can trace it through a mode: Dynamo does not follow the
    `super()` in `Tensor.unflatten` (torch 2.13)."""
    return torch.unflatten if func is torch.Tensor.unflatten else func


def _on_host(func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A call where the CPU is every device: its memory has no need to be pinned, and a
    number names it."""
    if func is torch.Tensor.pin_memory:
        return args[0].clone()
    if named.get("pin_memory") is True:
        named["pin_memory"] = False
    if type(named.get("device")) is int:
        named["device"] = torch.device("cpu")
    if getattr(func, "__name__", "") in ("to", "_parse_to"):  # of tensors and of modules
        args = tuple([torch.device("cpu") if type(arg) is int else arg for arg in args])
    return func(*args, **named)


def _device(kind: str, type: Any = None, index: int | None = None, **kwargs: Any) -> torch.device:
    """`torch.device(...)`, for which `npu` and, on a CPU, a number are the device that stands
    for the NPU."""
    named = type if type is not None else kwargs.get("device")
    if kind == "cpu" and builtins.type(named) is int:
        return torch.device("cpu")
    where = mapped(named, kind)
    if where is named:
        given = [] if type is None else [type]
        return torch.device(*given, *([] if index is None else [index]), **kwargs)
    return where if kind == "cpu" or index is None else torch.device(kind, index)


def mapped(arg: Any, kind: str) -> Any:
    """An argument as it is, or the device that stands for an NPU it names. On a CPU any number
    names one: each rank of a job has its own."""
    if isinstance(arg, str) and (arg == "npu" or arg.startswith("npu:")):
        _, colon, index = arg.partition(":")
        if colon and not index.isdigit():
            raise RuntimeError(f"Invalid device string: '{arg}'")  # as torch says it
        return torch.device(f"{kind}:{index}" if index and kind != "cpu" else kind)
    if isinstance(arg, str) and arg.startswith("torch.npu."):  # of `x.type("torch.npu.LongTensor")`
        return arg.replace("npu.", "" if kind == "cpu" else "cuda.", 1)
    return arg


def kind() -> str:
    """What stands for the NPU in this process: `cpu`, `cuda` or `npu` (the simulated one)."""
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in CHOICES:
        raise UnknownName("device", wanted, CHOICES, where=VARIABLE)
    if wanted == "auto":
        return "cuda" if _has_cuda() else "cpu"
    if wanted == "cuda" and not _has_cuda():
        raise NotOnThisDevice(f"{VARIABLE}=cuda (no CUDA device is here)", "Use cpu, or auto.")
    return wanted


def is_mapped() -> bool:
    """Whether another device stands for the NPU, rather than the simulated one."""
    return kind() != "npu"


_UNDO = contextlib.ExitStack()


def activate() -> None:
    """Give this process the device `npu`: `torch.npu`, `x.npu()`, `"npu:0"`. Once is enough."""
    if not is_mapped():
        from torchgraft.compat import simulated

        simulated.activate()
        return
    if getattr(torch, "npu", None) is not None:
        return
    from torchgraft.compat import cuda, npu

    chosen = kind()
    _UNDO.enter_context(Mapped(chosen))
    _set(torch, "npu", cuda if chosen == "cuda" else npu)
    _set(torch.Tensor, "npu", _mover(chosen))
    _set(torch.nn.Module, "npu", _mover(chosen))
    _set(torch.Tensor, "is_npu", property(lambda self: self.device.type == chosen))
    _set(threading.Thread, "start", _in_threads(chosen, threading.Thread.start))
    _set(torch.amp.autocast, "__init__", autocasts(lambda name: mapped(name, chosen)))
    _set(torch, "Generator", generators(lambda where: mapped(where, chosen)))
    _set(torch, "get_device_module", modules(torch.get_device_module))
    _set(torch, "set_default_tensor_type", typed.defaults(torch.set_default_tensor_type, chosen))
    if chosen == "cpu":
        _set(torch.Tensor, "record_stream", lambda self, stream: None)  # it waits for nobody
        _set(DistributedDataParallel, "__init__", _without_ids(DistributedDataParallel.__init__))
        _set(DataParallel, "__init__", undivided(DataParallel.__init__))
    _files()


def deactivate() -> None:
    """Take back what `activate` did, where another device stands for the NPU."""
    _UNDO.close()


def _set(owner: Any, name: str, value: Any) -> None:
    before = owner.__dict__.get(name)
    setattr(owner, name, value)
    _UNDO.callback(lambda: setattr(owner, name, before) if before else delattr(owner, name))


@functools.cache
def _files() -> None:
    """Let a file that says `npu` be loaded to where the NPU is now."""

    def tag(storage: Any) -> None:  # no file is written that says so
        return None

    def restore(storage: Any, location: str) -> Any:
        if not location.startswith("npu") or not is_mapped():
            return None
        where = mapped(location, kind())
        return storage if where.type == "cpu" else storage.cuda(where.index)

    torch.serialization.register_package(5, tag, restore)


def _mover(chosen: str) -> Callable[..., Any]:
    """`.npu()`, where torch_npu puts it."""

    def npu(self: Any, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        where = f"npu:{device}" if isinstance(device, int) else device or "npu"
        if isinstance(self, torch.nn.Module):
            return self.to(mapped(where, chosen))
        return self.to(mapped(where, chosen), non_blocking=non_blocking, **kwargs)

    return npu


def autocasts(change: Callable[[str], Any]) -> Callable[..., None]:
    """`torch.autocast.__init__`, for the device that `change` makes of the named one. An NPU
    computes in float16 where no dtype is said."""
    plain: Any = torch.amp.autocast.__init__

    @functools.wraps(plain)
    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        to = str(change(device_type))
        if to != device_type and dtype is None:
            dtype = torch.float16
        plain(self, to, dtype, *args, **kwargs)

    return init


def modules(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.get_device_module`, which finds `torch.npu` by its name."""

    @functools.wraps(plain)
    def call(device: torch.device | str | None = None) -> Any:
        if isinstance(device, str) and device.partition(":")[0] == "npu":
            return torch.npu  # type: ignore[attr-defined]
        return plain(device)

    return call


def generators(change: Callable[[Any], Any]) -> Any:
    """`torch.Generator`, for the device that `change` makes of the named one. Its objects are
    torch's own."""
    plain = torch.Generator

    class Of(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, plain)

    class Generator(metaclass=Of):
        def __new__(cls, device: Any = "cpu") -> Any:
            return plain(change(device))

    return Generator


def _without_ids(plain: Callable[..., None]) -> Callable[..., None]:
    """`DistributedDataParallel(model, device_ids=[0])` of a model on a CPU, which has no number."""

    @functools.wraps(plain)
    def init(
        self: Any,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        plain(self, module, None, None, *args, **kwargs)

    return init


def undivided(plain: Callable[..., None]) -> Callable[..., None]:
    """`DataParallel(model)` where no kernels divide a batch among devices: one device computes all
    of it."""

    @functools.wraps(plain)
    def init(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, dim: int = 0
    ) -> None:
        plain(self, module, device_ids, output_device, dim)
        self.module, self.device_ids = module, []

    return init


def _in_threads(chosen: str, start: Callable[..., None]) -> Callable[..., None]:
    """A mode holds for one thread: let every thread started from now on have its own."""

    def started(self: threading.Thread) -> None:
        run = self.run

        def inside() -> None:
            with Mapped(chosen):
                run()

        self.run = inside  # type: ignore[method-assign]
        start(self)

    return started
