"""`Registry`: where registered extensions live, and the scope that a compile looks them up in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from torchgraft.errors import BadPass, UnknownName
from torchgraft.passes.pattern.define import Pattern
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


class Removable(Protocol):
    """An operator, as far as a registry knows it."""

    name: str

    def remove(self) -> None: ...


Entry = Pass | Pattern
"""What can be registered by name; it has `where` it was written, too."""


class Registry:
    """A set of passes and patterns, by name, and of converters and operators. Thread-safe. As a
    context manager it is the current scope.

    A new Registry is empty: inside `with Registry():` nothing registered outside is seen, so a
    test that registers a pass cannot reach its neighbours. A scope holds for its own thread (and
    the tasks it starts); hand a Registry to `Config(registry=...)` to use it anywhere. Operators
    live in torch, which has one table of them: those declared in a scope are taken back when it
    ends.

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
        self._ops: dict[str, Removable] = {}
        self._inside = 0
        self._scopes = threading.local()
        self.converters: Kept[Converter] = Kept(self._lock)
        """The converters registered here, in order."""

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

    def keep(self, op: Removable) -> None:
        """Hold an operator until the scope ends; the default registry holds it for good."""
        with self._lock:
            self._ops[op.name] = op

    @property
    def ops(self) -> tuple[Removable, ...]:
        """The operators declared here."""
        with self._lock:
            return tuple(self._ops.values())

    def __iter__(self) -> Iterator[Entry]:
        with self._lock:
            return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def __enter__(self) -> Registry:
        tokens: list[Token[Registry]] = self._scopes.__dict__.setdefault("tokens", [])
        tokens.append(_CURRENT.set(self))
        with self._lock:
            self._inside += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _CURRENT.reset(self._scopes.tokens.pop())
        with self._lock:
            self._inside -= 1
            ended = [] if self._inside else list(self._ops.values())
            for op in ended:
                del self._ops[op.name]
        for op in reversed(ended):
            op.remove()


_DEFAULT = Registry()
_CURRENT: ContextVar[Registry] = ContextVar("torchgraft_registry", default=_DEFAULT)


def visible_ops() -> tuple[Any, ...]:
    """The operators of the current registry, then those of the default one."""
    here = current()
    return here.ops if here is _DEFAULT else (*here.ops, *_DEFAULT.ops)


def current() -> Registry:
    """The registry of the surrounding `with Registry():`, or the process's default one."""
    return _CURRENT.get()


def is_default(registry: Registry) -> bool:
    """Whether it is the process's own; what C++ libraries register is seen there."""
    return registry is _DEFAULT
