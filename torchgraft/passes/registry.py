"""`Registry`: where registered extensions live, and the scope that a compile looks them up in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from torchgraft.errors import BadPass, UnknownName
from torchgraft.passes.spec import Pass

if TYPE_CHECKING:
    from torchgraft.convert.define import Converter


T = TypeVar("T")


class Kept(Generic[T]):
    """What was registered, in order, under the registry's lock."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock, self._items = lock, list[T]()

    def add(self, item: T) -> None:
        with self._lock:
            self._items.append(item)

    def remove(self, item: T) -> None:
        with self._lock:
            self._items.remove(item)

    def __iter__(self) -> Iterator[T]:
        with self._lock:
            return iter(list(self._items))


class Registry:
    """A set of passes, by name, and of converters. Thread-safe. As a context manager it is the
    current scope.

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
        self._passes: dict[str, Pass] = {}
        self._scopes = threading.local()

        self.converters: Kept[Converter] = Kept(self._lock)
        """The converters registered here, in order."""

    def register(self, spec: Pass) -> None:
        """Add a pass; a name already taken raises."""
        with self._lock:
            if spec.name in self._passes:
                raise BadPass(
                    spec.name,
                    f"the name is taken by the one at {self._passes[spec.name].where}",
                    "Choose another name=, or unregister that one first.",
                )
            self._passes[spec.name] = spec

    def unregister(self, name: str) -> None:
        """Remove a pass by name."""
        with self._lock:
            if name not in self._passes:
                raise UnknownName("pass", name, self._passes, where="Registry.unregister")
            del self._passes[name]

    def __iter__(self) -> Iterator[Pass]:
        with self._lock:
            return iter(list(self._passes.values()))

    def __len__(self) -> int:
        return len(self._passes)

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
