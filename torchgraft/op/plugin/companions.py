"""Files beside the functions of op-plugin: what is deprecated, and what the ATB library has."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torchgraft.errors import BadPrototype
from torchgraft.op.plugin.document import Place, read_yaml
from torchgraft.op.prototype import Note


def read_deprecated(
    text: str, path: str, entries: Collection[str]
) -> tuple[dict[str, str], list[Note], list[str]]:
    """What to use instead (may be empty) by the name of each deprecated operator among `entries`,
    a note for each other one, and what is wrong with the file."""
    found: dict[str, str] = {}
    notes: list[Note] = []
    problems: list[str] = []
    for parts, item in _items(text, path, "deprecated", ("name", "replace"), problems):
        name = parts.get("name")
        if not name:
            problems.append(str(item.bad("an entry without 'name'", "name: an operator")))
        elif name in entries:
            found[name] = parts.get("replace", "")
        else:
            notes.append(Note(name, item.where, "is deprecated, and is not among these operators"))
    return found, notes, problems


def read_atb(text: str, path: str) -> tuple[list[Note], list[str]]:
    """A note for each operator of the ATB library, which is on an NPU only, and what is wrong."""
    notes: list[Note] = []
    problems: list[str] = []
    for parts, item in _items(text, path, "functions", ("cpp_name", "impl_name"), problems):
        if "cpp_name" not in parts or "impl_name" not in parts:
            problems.append(str(item.bad("an entry of one name", "cpp_name and impl_name")))
            continue
        what = f"is {parts['cpp_name']} of the ATB library of an NPU; it has no schema to declare"
        notes.append(Note(parts["impl_name"], item.where, what))
    return notes, problems


def _items(
    text: str, path: str, key: str, known: tuple[str, ...], problems: list[str]
) -> Iterator[tuple[dict[str, str], Place]]:
    """The entries of the only list in a file; an entry that cannot be read is a problem."""
    try:
        top = read_yaml(text, path)
        if top is None:
            return
        lists = [value for _, _, value in top.entries((key,))] if top.is_map else [top]
        items = [item for one in lists for item in one.items()]
    except BadPrototype as error:
        problems.append(str(error))
        return
    for item in items:
        try:
            yield {name: value.text() for name, _, value in item.entries(known)}, item
        except BadPrototype as error:
            problems.append(str(error))
