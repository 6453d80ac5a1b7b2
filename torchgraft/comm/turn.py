"""One rank does what all would do alike, the others wait: agreed through the world's store."""

from __future__ import annotations

import hashlib
from typing import Any

from torchgraft._torch import groups
from torchgraft.comm import wait


class Turn:
    """This rank's part in a piece of work that has a name. Who comes first does it; nobody waits
    for a rank that has not begun."""

    def __init__(self, store: Any, seconds: float, name: str) -> None:
        self._store, self._seconds, self._name = store, seconds, name
        self.first = store.add(f"{name}/ranks", 1) == 1

    def done(self, word: str = "") -> None:
        """Tell the others that the first rank is through, and what came of it."""
        self._store.set(f"{self._name}/done", word)

    def result(self) -> str | None:
        """What the first rank said, once it has; None where it did not in the group's timeout."""
        if not wait.polled(self._store, f"{self._name}/done", self._seconds):
            return None
        word: str = self._store.get(f"{self._name}/done").decode()
        return word


def is_alone() -> bool:
    """Whether this process is all there is."""
    known = groups.process_groups()
    return not known or bool(known[0].size() == 1)


def turn(text: str) -> Turn | None:
    """The part of this rank in work that `text` describes; None in a process that is alone."""
    if is_alone():
        return None
    world = groups.process_groups()[0]
    seconds = groups.group_timeout(world).total_seconds()
    name = f"torchgraft/turns/{hashlib.sha256(text.encode()).hexdigest()}"
    return Turn(groups.group_store(world), seconds, name)
