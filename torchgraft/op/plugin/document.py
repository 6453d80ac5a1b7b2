"""YAML with places: every value knows its file and line, and what it must be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchgraft.errors import BadPrototype, MissingPackage
from torchgraft.op.prototype import among


class Place:
    """A value of a YAML file and where it stands. Asking for what it is not raises, with both."""

    def __init__(self, node: Any, path: str) -> None:
        self._node, self._path = node, path

    @property
    def where(self) -> str:
        return f"{self._path}:{self._node.start_mark.line + 1}"

    def bad(self, found: str, expected: str) -> BadPrototype:
        return BadPrototype(self.where, found, expected)

    @property
    def is_list(self) -> bool:
        return type(self._node).__name__ == "SequenceNode"

    @property
    def is_map(self) -> bool:
        return type(self._node).__name__ == "MappingNode"

    def text(self) -> str:
        """A scalar, as it is written."""
        if self.is_list or self.is_map:
            raise self.bad("a map" if self.is_map else "a list", "a single value")
        return str(self._node.value).strip()

    def flag(self) -> bool:
        if self.text().lower() not in ("true", "false"):
            raise self.bad(repr(self.text()), "True or False")
        return self.text().lower() == "true"

    def items(self) -> list[Place]:
        if not self.is_list:
            raise self.bad(repr(self._short()), "a list")
        return [Place(node, self._path) for node in self._node.value]

    def entries(self, known: tuple[str, ...] | None = None) -> Iterator[tuple[str, Place, Place]]:
        """Each key, where it stands, and its value. A key twice, or not `known`, raises."""
        if not self.is_map:
            raise self.bad(repr(self._short()), "keys and values")
        seen: set[str] = set()
        for key_node, value_node in self._node.value:
            key = Place(key_node, self._path)
            name = key.text()
            if name in seen:
                raise key.bad(f"{name!r} twice", "each key once")
            if known is not None and name not in known:
                raise key.bad(f"unknown key {name!r}", among(known, name))
            seen.add(name)
            yield name, key, Place(value_node, self._path)

    def _short(self) -> str:
        return "a map" if self.is_map else "a list" if self.is_list else self.text()


def read_yaml(text: str, path: str) -> Place | None:
    """The top of a YAML document; None when it is empty. Nothing in it is ever executed."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingPackage("reading op-plugin files", "pyyaml", "plugin") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise BadPrototype(f"{path}:{line}", str(error.problem), "YAML") from None
    return None if node is None else Place(node, path)
