"""Operator prototypes as data, and what the readers of all formats share.

Reading is liberal about type specs (what it had to guess is in `Parsed.notes`) and strict about
structure (what it could not read is in `Parsed.skipped`, each with file, line and reason).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Literal

from torchgraft.errors import BadPrototype, BadValue, UnknownName
from torchgraft.op.dtypes import dtype_name

SCALARS = ("Int", "Float", "Bool", "String", "Type", "Tensor", "NamedAttrs", "Bytes")
ATTR_TYPES = tuple(f"{'List' * depth}{scalar}" for scalar in SCALARS for depth in range(3))
"""Every type that an attribute may have: each scalar, a list of it, a list of lists of it."""

Kind = Literal["required", "optional", "dynamic"]
Dtypes = frozenset[str] | None


@dataclasses.dataclass(frozen=True)
class Port:
    """An input or an output. `dtypes` of None is any; ports of one `symbol` share their dtype."""

    name: str
    kind: Kind = "required"
    dtypes: Dtypes = None
    symbol: str | None = None


@dataclasses.dataclass(frozen=True)
class Attr:
    """An attribute. The default is the exact value: a dtype is its DT_* name, no tensor is None."""

    name: str
    type: str
    required: bool = True
    default: Any = None


@dataclasses.dataclass(frozen=True)
class Prototype:
    """An operator as its author declared it, in the author's order. `where` is not compared."""

    name: str
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    attrs: tuple[Attr, ...] = ()
    where: str = dataclasses.field(default="", compare=False)

    @property
    def mutated(self) -> tuple[str, ...]:
        """The inputs that are written in place: those that are outputs too."""
        outputs = {port.name for port in self.outputs}
        return tuple(port.name for port in self.inputs if port.name in outputs)


@dataclasses.dataclass(frozen=True)
class Skipped:
    """An entry that was not read. Not `malformed`: it is right, but no torch op can be like it."""

    name: str
    where: str
    why: str
    malformed: bool = True

    def line(self) -> str:
        """All of it in one line, file and line first."""
        return f"{self.where}: {self.name}: {self.why}"


@dataclasses.dataclass(frozen=True)
class Note:
    """Something odd in an entry that was read, and what it was taken for."""

    name: str
    where: str
    what: str


@dataclasses.dataclass(frozen=True)
class Parsed:
    """What a file declares, in its order."""

    prototypes: tuple[Prototype, ...]
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[Note, ...] = ()


Entry = tuple[str, str, Callable[[], Prototype]]  # its name, its place, what reads it


class Unsupported(BadPrototype):
    """Well-formed, and nothing that an op can be."""


NEVER = {
    "OPTIONAL_OUTPUT": "outputs that are always there (an op returns as many at every call)",
    "GRAPH": "inputs, outputs and attributes (an op cannot hold a graph)",
    "DYNAMIC_GRAPH": "inputs, outputs and attributes (an op cannot hold a graph)",
}
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def among(known: Iterable[str], word: str) -> str:
    near = difflib.get_close_matches(word, known := tuple(known), n=1)
    return f"one of {', '.join(known)}" + (f" (did you mean {near[0]}?)" if near else "")


def read_source(given: str | os.PathLike[str], where: str | None) -> tuple[bytes, str]:
    """The bytes, and the name that messages give them. A string that looks like text is text."""
    text = isinstance(given, str) and re.search(r"\n|REG_OP\s*\(|^\s*([\[{]|$)", given)
    if isinstance(given, str) and text and ("\n" in given or not os.path.exists(given)):
        return given.encode(), where or "<text>"
    try:
        return Path(given).read_bytes(), where or str(given)
    except OSError as error:
        found = (error.strerror or "an error").lower()
        raise BadPrototype(str(given), found, "a file to read") from error


def collect(entries: Iterable[Entry], notes: list[Note]) -> Parsed:
    """What could be read. Two of one name are an error in C++: here the first one stays."""
    found: dict[str, Prototype] = {}
    skipped = []
    for name, where, read in entries:
        before = len(notes)
        try:
            prototype = _checked(read())
            first = found.setdefault(prototype.name, prototype)
            if first is not prototype:
                expected = f"one prototype per name; the first is at {first.where}"
                raise BadPrototype(where, f"a second {name}", expected)
        except BadPrototype as error:
            del notes[before:]
            why = f"found {error.found}, expected {error.expected}"
            skipped.append(Skipped(name, error.where, why, not isinstance(error, Unsupported)))
    return Parsed(tuple(found.values()), tuple(skipped), tuple(notes))


def _checked(prototype: Prototype) -> Prototype:
    """The same, with names that Python can have (up to keywords), each once in its group."""
    for group in ("", "inputs", "outputs", "attrs"):
        names = [item.name for item in (getattr(prototype, group) if group else [prototype])]
        for name in names:
            if not NAME.fullmatch(name):
                raise BadPrototype(prototype.where, repr(name), "a name of letters and digits")
            if names.count(name) > 1:
                found = f"{name!r} twice among the {group}"
                raise BadPrototype(prototype.where, found, "each name once")
    return prototype


def convert(value: Any, type: str) -> Any:
    """`value` as an attribute of this type holds it, exactly; ValueError when it cannot.

    >>> convert(1, "Float"), convert([[1], []], "ListListInt"), convert("fp16", "Type")
    (1.0, [[1], []], 'DT_FLOAT16')
    """
    if type.startswith("List"):
        if not isinstance(value, list):
            raise ValueError("not a list")
        return [convert(item, type[4:]) for item in value]
    is_number = isinstance(value, int | float)
    if type == "String" and isinstance(value, str):
        return value
    if type == "Bool" and is_number and value in (0, 1):
        return bool(value)
    if type == "Int" and is_number and math.isfinite(value) and value == int(value):
        return int(value)
    if type == "Float" and is_number:
        return float(value)
    if type == "Type" and isinstance(value, str | int):
        try:
            return dtype_name(value)
        except (BadValue, UnknownName) as error:
            raise ValueError(str(error).partition(" Known:")[0]) from None
    if type == "Bytes" and isinstance(value, list) and all(isinstance(i, int) for i in value):
        return bytes(value)
    if (type == "Tensor" and value is None) or (type == "NamedAttrs" and value in ({}, [])):
        return None if type == "Tensor" else {}
    raise ValueError(f"not {'an' if type == 'Int' else 'a'} {type}")


def argument(name: str, taken: Collection[str]) -> str:
    """The name of an attribute among the arguments of its op, where an input may have it too."""
    return f"{name}_changed_as_duplicate_with_input" if name in taken else name
