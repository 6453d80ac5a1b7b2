"""One rank compiles, the others load: who does what, agreed through the world's store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchgraft._torch import groups
from torchgraft.comm import wait
from torchgraft.comm.ops import collectives
from torchgraft.fx.capture import Capture
from torchgraft.package.key import Key


class Turn:
    """This rank's part in compiling a program that all ranks compile. Weights may differ: a
    package takes new ones without being compiled again."""

    def __init__(self, store: Any, seconds: float, key: Key, captures: Sequence[Capture]) -> None:
        own = {name for taken in captures for name in taken.weights}
        kept = {name: held for name, held in key["weights"].items() if name not in own}
        shared = json.dumps({**key, "weights": kept}, sort_keys=True)
        self._store, self._seconds = store, seconds
        self._name = f"torchgraft/compile/{hashlib.sha256(shared.encode()).hexdigest()}"
        self.first = store.add(f"{self._name}/ranks", 1) == 1

    def compile(self, make: Callable[[], Path | None]) -> None:
        """Compile for all; `make` gives the package, or None where there cannot be one."""
        made: Path | None = None
        try:
            made = make()
        finally:
            self._store.set(f"{self._name}/done", str(made.name) if made is not None else "")

    def package(self, folder: Path) -> Path | None:
        """What the first rank made, once it has; None where this rank must compile itself."""
        if wait.missing(self._store, [f"{self._name}/done"], self._seconds):
            return None
        name = self._store.get(f"{self._name}/done").decode()
        path = folder / Path(name).name
        return path if name and path.exists() else None


def turn(key: Key, captures: Sequence[Capture]) -> Turn | None:
    """The part of this rank; None where the program is this process's alone."""
    if not any(any(collectives(taken.gm.graph.nodes)) for taken in captures):
        return None
    known = groups.process_groups()
    if not known or known[0].size() == 1:
        return None
    seconds = groups.group_timeout(known[0]).total_seconds()
    return Turn(groups.group_store(known[0]), seconds, key, captures)
