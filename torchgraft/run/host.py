"""The executor: a plan becomes one straight-line Python function over its kernels."""

from __future__ import annotations

import dataclasses
import linecache
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchgraft import _torch
from torchgraft.errors import BadPlan
from torchgraft.plan import MAIN, Buffer, Free, Launch, Plan, buffers, literal


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a launch calls. `boxed`: it takes one list and may empty it, to free inputs early."""

    fn: Callable[..., Any]
    boxed: bool = False


def link(plan: Plan, kernels: Mapping[str, Kernel], constants: Mapping[str, Any]) -> _torch.Flat:
    """A function that runs the plan on the caller's stream: list of inputs in, outputs out."""
    if (only := _only_kernel(plan, kernels)) is not None:
        return only
    names = {name: f"k{i}" for i, name in enumerate(kernels)}
    scope: dict[str, Any] = {names[name]: kernel.fn for name, kernel in kernels.items()}
    for buffer, name in plan.constants:
        scope[repr(buffer)] = constants[name]
    run: _torch.Flat = define("run", _source(plan, kernels, names), scope)
    return run


def _only_kernel(plan: Plan, kernels: Mapping[str, Kernel]) -> _torch.Flat | None:
    """The kernel itself where the plan is one call that takes and gives what the plan does."""
    if len(launches := plan.launches) != 1:
        return None
    [launch] = launches
    kernel = kernels[launch.kernel]
    if (
        kernel.boxed
        and launch.args == plan.inputs
        and launch.outputs == plan.outputs
        and launch.stream == MAIN
    ):
        return kernel.fn
    return None


def _source(plan: Plan, kernels: Mapping[str, Kernel], names: Mapping[str, str]) -> str:
    lines = ["def run(args):"]
    if plan.inputs:
        lines.append(f"    {', '.join(map(repr, plan.inputs))}, = args")
    lines.append("    args.clear()")
    constants = {buffer for buffer, _ in plan.constants}
    freed: set[Buffer] = set()
    for i, step in enumerate(plan.steps):
        if step.stream != MAIN:
            raise BadPlan(f"step {i} ({step})", f"this executor has no stream {step.stream!r}")
        if isinstance(step, Launch):
            kernel, name = kernels[step.kernel], names[step.kernel]
            dying = _dying(plan, i) - constants if kernel.boxed else set()
            if dying:
                held = f"[{', '.join(map(literal, step.args))}]"
                gone = ", ".join(sorted(map(repr, dying)))
                lines.append(f"    a = {held}; del {gone}")
                call = f"{name}(a)"
                freed |= dying
            elif kernel.boxed:
                call = f"{name}([{', '.join(map(literal, step.args))}])"
            else:
                parts = [*map(literal, step.args)]
                parts += [f"{key}={literal(arg)}" for key, arg in step.kwargs]
                call = f"{name}({', '.join(parts)})"
            left = ", ".join("_" if out is None else repr(out) for out in step.outputs)
            lines.append(f"    {left}{',' * step.unpack} = {call}" if left else f"    {call}")
        elif isinstance(step, Free):
            if step.buffer not in freed and step.buffer not in constants:
                lines.append(f"    del {step.buffer}")
        else:
            raise BadPlan(f"step {i} ({step})", "this executor runs one stream")
    return "\n".join([*lines, f"    return {literal(plan.outputs)}"]) + "\n"


def _dying(plan: Plan, index: int) -> set[Buffer]:
    """Arguments of a launch that the steps right after it free."""
    used = set(buffers(plan.steps[index].args))  # type: ignore[union-attr]
    gone: set[Buffer] = set()
    for step in plan.steps[index + 1 :]:
        if not isinstance(step, Free):
            break
        gone.add(step.buffer)
    return used & gone


def define(name: str, source: str, scope: dict[str, Any]) -> Any:
    """The function `name` of generated source; tracebacks show the source while it lives."""
    scope |= {"torch": torch, "device": torch.device}
    file = f"<torchgraft {name} {id(scope):x}>"
    exec(compile(source, file, "exec"), scope)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    weakref.finalize(scope[name], linecache.cache.pop, file, None)
    return scope[name]
