"""The C++ executor as Python's: what `torchgraft::load` runs in a C++ program, run here.

A program from a package is walked by it wherever it has been built (`torchgraft native`) and can
run every step: then Python and C++ have one path. `TORCHGRAFT_EXECUTOR=python` keeps to Python's
own, `native` insists on this one, and builds it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from pathlib import Path
from typing import Any

from torchgraft.errors import BadValue, NativeBuild
from torchgraft.native import driver

CHOICES = ("auto", "python", "native")
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
