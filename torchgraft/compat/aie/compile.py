"""`compile` and `export_engine` of Torch-AIE."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

import torchgraft as graft
from torchgraft import _torch
from torchgraft.compat.aie import builtin, engine
from torchgraft.compat.aie.inputs import native_inputs
from torchgraft.compat.aie.spec import Spec
from torchgraft.compat.watch import watch

_IRS = ("default", "torchscript", "ts", "dynamo", "torch_compile")


def compile(module: Any, ir: Any = "default", inputs: Any = None, **kwargs: Any) -> Any:
    """Compile a module for its inputs. A ScriptModule stays one, to save, load and run.

    The inputs may come second, as in versions before there was an `ir`.
    """
    if isinstance(ir, (list, tuple)) and inputs is None:
        ir, inputs = "default", ir
    kind = _kind(module, ir)
    spec = Spec.of(kwargs)
    config = spec.config()
    if kind == "torch_compile":
        return torch.compile(module, backend=graft.backend(config))
    if kind == "dynamo":
        where = engine.device()
        compiled = graft.compile(
            engine.moved(module, where), _inputs(module, inputs), config=config
        )
        builtin.check(builtin.of_program(compiled), config)
        spec.check_outputs(compiled.signature(0).out_tree.num_leaves)
        return Compiled(compiled, where)
    spec.check_outputs(engine.outputs(module))
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
    if kind == "torch_compile":
        raise ValueError("export_engine: ir='torch_compile' compiles when it is called")
    spec = Spec.of({**kwargs, "require_full_compilation": True})
    config = spec.config()
    compiled, data = engine.package(module, _inputs(module, inputs), config)
    spec.check_outputs(compiled.signature(0).out_tree.num_leaves)
    builtin.check(builtin.of_program(compiled), config)
    if path is not None:
        with open(path, "wb") as file:
            file.write(data)
    return bytes(data)


class Compiled(torch.nn.Module):
    """A compiled program as a module."""

    def __init__(self, program: graft.Compiled, device: torch.device) -> None:
        super().__init__()
        self.program, self.device = program, device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = _torch.flatten((args, kwargs))
        there = [one.to(self.device) if isinstance(one, Tensor) else one for one in leaves]
        args, kwargs = _torch.unflatten(there, tree)
        return self.program(*args, **kwargs)


def _inputs(module: Any, given: Any) -> tuple[graft.Input, ...] | None:
    """The inputs on the device; an exported program knows its own."""
    if isinstance(module, ExportedProgram):
        return None
    gears = isinstance(module, torch.jit.ScriptModule)
    return native_inputs(given, engine.device(), gears=gears)


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
    config = Spec.of(dict(options or {})).config()
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
