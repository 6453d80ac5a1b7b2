"""`Registry`: where registered extensions live, and the scope that a compile looks them up in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextvars import ContextVar, Token
from types import TracebackType

from torchgraft.errors import BadPass, UnknownName
from torchgraft.passes.pattern.define import Pattern
from torchgraft.passes.spec import Pass

Entry = Pass | Pattern
"""What can be registered: it has a `name`, and `where` it was written."""


class Registry:
    """A set of passes and patterns, by name. Thread-safe. As a context manager it is the current
    scope.

    A new Registry is empty: inside `with Registry():` nothing registered outside is seen, so a
    test that registers a pass cannot reach its neighbours. A scope holds for its own thread (and
    the tasks it starts); hand a Registry to `Config(registry=...)` to use it anywhere.

    >>> import torchgraft as graft
    >>> with graft.Registry() as registry:
    ...     @graft.fx_pass(stage="pre")
    ...     def nothing(graph: graft.Graph) -> None: ...
    >>> [p.name for p in registry]
    ['nothing']
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._scopes = threading.local()

    def register(self, spec: Entry) -> None:
        """Add a pass or a pattern; a name already taken raises."""
        with self._lock:
            if spec.name in self._entries:
                raise BadPass(
                    spec.name,
                    f"the name is taken by the one at {self._entries[spec.name].where}",
                    "Choose another name=, or unregister that one first.",
                )
            self._entries[spec.name] = spec

    def unregister(self, name: str) -> None:
        """Remove a pass or a pattern by name."""
        with self._lock:
            if name not in self._entries:
                raise UnknownName(
                    "pass or pattern", name, self._entries, where="Registry.unregister"
                )
            del self._entries[name]

    def __iter__(self) -> Iterator[Entry]:
        with self._lock:
            return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def __enter__(self) -> Registry:
        tokens: list[Token[Registry]] = self._scopes.__dict__.setdefault("tokens", [])
        tokens.append(_CURRENT.set(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _CURRENT.reset(self._scopes.tokens.pop())


_DEFAULT = Registry()
_CURRENT: ContextVar[Registry] = ContextVar("torchgraft_registry", default=_DEFAULT)


def current() -> Registry:
    """The registry of the surrounding `with Registry():`, or the process's default one."""
    return _CURRENT.get()
