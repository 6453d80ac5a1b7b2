"""What a script asks for that has no effect here: said once for each thing, never silently."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path

_HOME = str(Path(__file__).parents[1])

_lock = threading.Lock()
_said: dict[str, str] = {}


def without_effect(where: str, found: Mapping[str, str]) -> None:
    """Warn of the settings in `found` (name to reason), except those warned of before."""
    with _lock:
        new = {name: why for name, why in found.items() if f"{where}{name}" not in _said}
        _said.update({f"{where}{name}": why for name, why in new.items()})
    if new:
        listed = "".join(f"\n  {where}{name}: {why}" for name, why in new.items())
        warnings.warn(f"accepted, without effect here:{listed}", UserWarning, stacklevel=_outside())


def _outside() -> int:
    """The stack level of the first caller that is not torchgraft, for a warning."""
    level, frame = 0, inspect.currentframe()
    while frame and frame.f_back and frame.f_code.co_filename.startswith((_HOME, "<")):
        level, frame = level + 1, frame.f_back
    return level


def said() -> dict[str, str]:
    """Every setting so far that was accepted without effect, and why."""
    with _lock:
        return dict(_said)
