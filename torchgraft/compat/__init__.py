"""Ascend scripts off the NPU: `install()` makes their packages importable.

`torchair`, `npugraph_ex`, `torch_aie`, `mindietorch` and `torch_npu` are folders under `site`, thin
over what is here, which is thin over torchgraft. Nothing in torchgraft imports them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import site
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from torchgraft.errors import WouldShadow

SITE = Path(__file__).parent / "site"
NAMES = ("torchair", "npugraph_ex", "torch_aie", "mindietorch", "torch_npu")
"""The packages that are made importable."""


class Finder(importlib.abc.MetaPathFinder):
    """Finds exactly the packages of `NAMES`; what is inside them, Python finds itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if path is not None or name not in NAMES:
            return None
        return importlib.machinery.PathFinder.find_spec(name, [str(SITE)])


_FINDER = Finder()


def install(*, force: bool = False) -> None:
    """Make the Ascend packages importable, and their string backends known to torch.compile.

    Raises `WouldShadow` where one of them is really installed, unless `force`. Calling it again
    changes nothing.

    >>> import torchgraft.compat
    >>> torchgraft.compat.install()
    >>> import torchair
    >>> torchair.CompilerConfig().mode.value
    'max-autotune'
    >>> torchgraft.compat.uninstall()
    """
    if _FINDER in sys.meta_path:
        return
    found = installed()
    if found and not force:
        raise WouldShadow(found)
    for name in found:
        _forget(name)
    sys.meta_path.insert(0, _FINDER)
    from torchgraft.compat import backends

    backends.register()


def uninstall() -> None:
    """Take back what `install` did; modules already imported stay with whoever holds them."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
        for name in NAMES:
            _forget(name)


def installed() -> dict[str, str]:
    """The real packages that Python would import by these names, and where they are."""
    found = {}
    for name in NAMES:
        if name in sys.modules:
            origin = getattr(sys.modules[name], "__file__", None)
        else:
            spec = importlib.machinery.PathFinder.find_spec(name)
            origin = spec.origin or name if spec is not None else None
        if origin is not None and not _ours(origin):
            found[name] = origin
    return found


def python_path(*, force: bool = False) -> str:
    """What `PYTHONPATH` must hold for a process to import the packages, and torchgraft itself."""
    found = installed()
    if found and not force:
        raise WouldShadow(found)
    home = str(SITE.parents[2])
    own = [] if home in site.getsitepackages() else [home]  # run from its sources
    return os.pathsep.join([str(SITE), *own])


def _ours(origin: str) -> bool:
    return Path(origin).resolve().is_relative_to(SITE.resolve())


def _forget(name: str) -> None:
    for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        del sys.modules[loaded]
