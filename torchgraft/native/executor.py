"""The C++ executor as Python's: what `torchgraft::load` runs in a C++ program, run here.

A program from a package, or a fresh one of operators alone, is walked by it wherever it has been
built (`torchgraft native`) and can run every step: then Python and C++ have one path.
`TORCHGRAFT_EXECUTOR=python` keeps to Python's own, `native` insists on this one, and builds it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from torchgraft import _torch
from torchgraft.errors import BadValue, NativeBuild, NotSavable
from torchgraft.native import driver
from torchgraft.package import codec
from torchgraft.plan import Buffer, Plan
from torchgraft.run.host import Kernel

CHOICES = ("auto", "python", "native")
NOTE = "its plan is walked in C++"
_CONTROL = ("cond", "while_loop")
_LOCK = threading.Lock()  # a module in C++ is imported once


def module() -> Any:
    """The module `torchgraft_executor`; None where it is not built, or not wanted."""
    choice = os.environ.get("TORCHGRAFT_EXECUTOR", "auto")
    if choice not in CHOICES:
        raise BadValue("TORCHGRAFT_EXECUTOR", choice, f"one of {', '.join(CHOICES)}")
    if choice == "python":
        return None
    given = os.environ.get("TORCHGRAFT_NATIVE")
    root = driver.build("runtime") if choice == "native" else _built(given)
    with _LOCK:
        found = _imported(root.lib) if root is not None else None
    if found is None and choice == "native":
        raise NativeBuild("runtime", "it has no module for this Python; install Python's headers")
    return found


def capture() -> Callable[..., _torch.Flat] | None:
    """What captures a program as CUDA graphs, and replays them, in C++; None where it is not built,
    or was built without CUDA's headers."""
    found = module()
    return found.capture if found is not None and found.captures else None


def check() -> Callable[..., Callable[[tuple[Any, ...]], bool]] | None:
    """What makes a check of a call's tensors, in C++; None where it is not built."""
    found = module()
    return None if found is None else found.check


def can_walk(plan: Plan, kernels: Iterable[Mapping[str, Any]]) -> bool:
    """Whether C++ runs every step, and gives what Python would: not where ranks must agree first,
    or a result is text. A stream's thread there could not tell what Python raised, so no operator
    that may be Python's is called on several."""
    several = len(plan.streams) > 1
    for kernel in kernels:
        if kernel["kind"] == "higher" and kernel["name"] not in _CONTROL:
            if several or kernel["name"] != "auto_functionalized_v2":  # it may call Python, too
                return False
        elif kernel["kind"] == "op" and several and not codec.is_torchs(kernel["name"]):
            return False
    return not plan.collectives and _are_numbers(plan.outputs)


def _are_numbers(results: Any) -> bool:
    if isinstance(results, (list, tuple)):
        return all(map(_are_numbers, results))
    return results is None or isinstance(results, (Buffer, bool, int, float, complex))


def walked(
    plan: Plan, kernels: Mapping[str, Kernel], constants: Mapping[str, Any]
) -> _torch.Flat | None:
    """A plan of operators on the CPU, walked in C++; None: it is not built, or the plan launches
    something else. Generated code of this process is Python functions, which are better called
    from Python."""
    values: list[Tensor] = []
    bound: dict[str, Any] = {}
    called = {launch.kernel: codec.target(kernels[launch.kernel].fn) for launch in plan.launches}
    for _, name in plan.constants:
        if isinstance(held := constants[name], Tensor):
            bound[name] = {"kind": "value", "value": len(values)}
            values.append(held)
        else:
            bound[name] = codec.target(held)
    known = [target for target in called.values() if target is not None]
    if not known or len(known) < len(called) or None in bound.values():
        return None
    if not can_walk(plan, known) or (found := module()) is None:
        return None
    try:
        text = json.dumps({"plan": codec.plan(plan), "kernels": called, "constants": bound})
        run: _torch.Flat = found.link(text, 0, values, [], {}, "cpu")
    except (NotSavable, RuntimeError):  # an argument, or an operator, that only Python knows
        return None
    return run


@functools.cache
def _built(given: str | None) -> driver.Root | None:
    """The root as this process first finds it; working out its name reads every source."""
    return driver.Root(Path(given)) if given else driver.built("runtime")


@functools.cache
def _imported(folder: Path) -> Any:
    path = folder / f"torchgraft_executor{driver.MODULE}"
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("torchgraft_executor", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
