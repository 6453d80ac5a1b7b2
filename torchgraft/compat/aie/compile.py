"""`compile` and `export_engine` of Torch-AIE."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

import torchgraft as graft
from torchgraft.compat import settings
from torchgraft.compat.aie import builtin, engine
from torchgraft.compat.aie.inputs import native_inputs
from torchgraft.compat.aie.spec import Spec
from torchgraft.compat.watch import watch

_IRS = ("default", "torchscript", "ts", "dynamo", "torch_compile")


def compile(module: Any, ir: str = "default", inputs: Any = None, **kwargs: Any) -> Any:
    """Compile a module for its inputs. A ScriptModule stays one, to save, load and run."""
    kind = _kind(module, ir)
    spec = Spec.of(kwargs)
    config = spec.config(None)
    config = config.replace(mode=settings.mode(config.mode))
    if kind == "torch_compile":
        return torch.compile(module, backend=graft.backend(config))
    if kind == "dynamo":
        given = None if isinstance(module, ExportedProgram) else native_inputs(inputs, gears=False)
        compiled = graft.compile(module, given, config=config)
        named = [node.op.split(".") for node in compiled.report.nodes]
        builtin.check([words[1] for words in named if words[0] == builtin.SPACE], config)
        return Compiled(compiled)
    builtin.check(builtin.of_script(module), config)
    given = native_inputs(inputs, engine.device())
    return engine.module(module, given, config, narrow=spec.truncate_long_and_double)


def export_engine(
    module: Any,
    method_name: str = "forward",
    ir: str = "default",
    inputs: Any = None,
    path: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> bytes:
    """The bytes of a wholly compiled program; with `path` they are written there, too.

    They are a package of torchgraft, for `graft.load` and the C++ runtime, not a model for the
    NPU's tools.
    """
    if method_name != "forward":
        raise ValueError(f"method_name: expected 'forward', got {method_name!r}")
    kind = _kind(module, ir)
    if kind != "ts":
        raise ValueError("export_engine: expected a ScriptModule (torch.jit.trace or script it)")
    spec = Spec.of({**kwargs, "require_full_compilation": True})
    config = spec.config(None)
    mode = settings.mode(config.mode)
    config = config.replace(mode=mode, require_full_compilation=mode != "eager")
    builtin.check(builtin.of_script(module), config)
    _, data = engine.package(module, native_inputs(inputs, engine.device()), config)
    if path is not None:
        with open(path, "wb") as file:
            file.write(data)
    return bytes(data)


class Compiled(torch.nn.Module):
    """A compiled program as a module."""

    def __init__(self, program: graft.Compiled) -> None:
        super().__init__()
        self.program = program

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.program(*args, **kwargs)


def _kind(module: Any, ir: str) -> str:
    """How a module is compiled: `ts`, `dynamo` or `torch_compile`."""
    if ir not in _IRS:
        raise ValueError(f"ir: expected one of {', '.join(_IRS)}, got {ir!r}")
    script = isinstance(module, torch.jit.ScriptModule)
    other = isinstance(module, (torch.nn.Module, ExportedProgram)) and not script
    if ir in ("torchscript", "ts") and not script:
        raise TypeError(f"ir={ir!r} takes a ScriptModule, got {type(module).__name__}")
    if ir == "dynamo" and not other:
        raise TypeError(f"ir='dynamo' takes an nn.Module or an ExportedProgram, got {module!r}")
    if not script and not other:
        raise TypeError(f"compile takes a module or an exported program, got {module!r}")
    if ir == "torch_compile":
        return ir
    return "ts" if script else "dynamo"


def mindie_backend(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Tensor],
    *,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """The backend `mindie` of torch.compile; `options` are arguments of `compile`."""
    config = Spec.of(dict(options or {})).config(None)
    config = config.replace(mode=settings.mode(config.mode))
    made: Callable[..., Any] = graft.backend(config, on_program=watch)(gm, example_inputs)
    return made


def set_device(npu_id: int) -> None:
    """Choose the device by number."""
    if not isinstance(npu_id, int) or isinstance(npu_id, bool) or not 0 <= npu_id <= 1024:
        raise ValueError(f"set_device: expected a number from 0 to 1024, got {npu_id!r}")
    from torchgraft.compat import device

    device.activate()
    torch.npu.set_device(npu_id)  # type: ignore[attr-defined]


def finalize() -> None:
    """Let go of every program that compiled modules hold in this process."""
    engine.forget()
