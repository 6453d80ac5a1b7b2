"""Options as Ascend packages have them: objects with `.value`, checked when they are set."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

NONE_HERE = "this is for the NPU's compiler, which is not part of this"


class Option:
    """The value of one option. `.value` is as the compiler of an NPU reads it: '1' for True."""

    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    @property
    def value(self) -> Any:
        return str(int(self.raw)) if isinstance(self.raw, bool) else self.raw

    def __bool__(self) -> bool:
        return bool(self.raw)

    def __eq__(self, other: object) -> bool:
        return bool(self.raw == (other.raw if isinstance(other, Option) else other))

    def __hash__(self) -> int:
        return hash(str(self.raw))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.raw(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Option({self.raw!r})"


class Kind:
    """What an option may be: its default, its check, and why it has no effect if it has none."""

    def __init__(self, default: Any, check: Callable[[Any], Any], idle: str | None = None) -> None:
        self.default, self.check, self.idle = default, check, idle


def one_of(*allowed: Any) -> Callable[[Any], Any]:
    """One of some values; True and 1 are the same, as they are to Python."""

    def check(value: Any) -> Any:
        for known in allowed:
            if value == known and isinstance(value, (type(known), int)):
                return known
        raise ValueError(
            f"Value {value!r} (type: {type(value)}) not in optional list {list(allowed)}"
        )

    return check


flag = one_of(True, False)


def whole(low: int, high: int = 2**63 - 1) -> Callable[[Any], int]:
    """A whole number of a range."""

    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"Please set integer type, but got {value!r} (type: {type(value)})")
        if not low <= value <= high:
            raise ValueError(f"Value {value} is out of range: it must be from {low} to {high}")
        return value

    return check


def existing(kind: str) -> Callable[[Any], str]:
    """The path of a file, a folder, or a `.json` file, that is there."""

    def check(value: Any) -> str:
        path: str = os.path.realpath(os.fspath(value))
        fits = os.path.isdir(path) if kind == "folder" else os.path.isfile(path)
        if not fits or (kind == "json" and not path.endswith(".json")):
            raise FileNotFoundError(f"{value!r} is no {kind} that is there ({path})")
        return path

    return check


def path(value: Any) -> str:
    """A path, there or not."""
    full: str = os.path.realpath(os.fspath(value))
    return full


def text(pattern: str) -> Callable[[Any], str]:
    """Text of a form."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise ValueError(f"Value {value!r} does not fit the form {pattern!r}")
        return value

    return check


def function(value: Any) -> Any:
    if value is not None and not callable(value):
        raise TypeError(f"expected a function or None, got {value!r} (type: {type(value)})")
    return value


def anything(value: Any) -> Any:
    return value


def instance(*types: type) -> Callable[[Any], Any]:
    """A value of some type, or None."""

    def check(value: Any) -> Any:
        if value is not None and not isinstance(value, types):
            wanted = " or ".join(t.__name__ for t in types)
            raise ValueError(f"Value {value!r} (type: {type(value)}) is no {wanted}")
        return value

    return check


class Section:
    """A group of options and of other groups; every object has values of its own."""

    options: ClassVar[dict[str, Kind]] = {}
    sections: ClassVar[dict[str, type[Section]]] = {}

    def __init__(self) -> None:
        values = {name: Option(kind.default) for name, kind in self.options.items()}
        values |= {name: make() for name, make in self.sections.items()}  # type: ignore[misc]
        object.__setattr__(self, "_values", values)

    def __getattr__(self, name: str) -> Any:
        if name in self.options or name in self.sections:
            return self._values[name]
        raise AttributeError(self._unknown(name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.sections:
            if not isinstance(value, self.sections[name]):
                raise ValueError(
                    f"{name} is a group of options: set one of them, such as "
                    f"{name}.{next(iter(self._values[name]._values))}"
                )
            self._values[name] = value
        elif name in self.options:
            given = value.raw if isinstance(value, Option) else value
            kind = self.options[name]
            unset = given is None and kind.default is None
            self._values[name] = Option(None if unset else kind.check(given))
        else:
            raise ValueError(self._unknown(name))

    def _unknown(self, name: str) -> str:
        return f"{type(self).__name__} has no option {name}, all options {list(self._values)}"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        changed = ", ".join(f"{name}={option.raw!r}" for name, option in self.changed())
        return f"{type(self).__name__}({changed})"

    def __deepcopy__(self, memo: Any) -> Any:
        copied = type(self)()
        for name, option in self._values.items():
            kept = option.__deepcopy__(memo) if isinstance(option, Section) else option
            copied._values[name] = kept
        return copied

    def changed(self, prefix: str = "") -> Iterator[tuple[str, Option]]:
        """The options that are not at their default, by dotted name."""
        for name, held in self._values.items():
            if isinstance(held, Section):
                yield from held.changed(f"{prefix}{name}.")
            elif held != self.options[name].default:
                yield f"{prefix}{name}", held

    def idle(self) -> dict[str, str]:
        """The options that were set and have no effect here, with the reason."""
        found = {}
        for name, _ in self.changed():
            section: Section = self
            *groups, last = name.split(".")
            for group in groups:
                section = section._values[group]
            why = section.options[last].idle
            if why is not None:
                found[name] = why
        return found


def idle(default: Any, check: Callable[[Any], Any], why: str = NONE_HERE) -> Kind:
    """An option that is checked and then has no effect here."""
    return Kind(default, check, why)
