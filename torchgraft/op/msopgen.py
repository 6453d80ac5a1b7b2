"""msopgen JSON prototypes."""

from __future__ import annotations

import functools
import json
import os
import re
from typing import Any

from torchgraft.errors import BadPrototype, UnknownName
from torchgraft.op.dtypes import dtype_name
from torchgraft.op.prototype import (
    ATTR_TYPES,
    NEVER,
    Attr,
    Note,
    Parsed,
    Port,
    Prototype,
    Unsupported,
    among,
    collect,
    convert,
    read_source,
)


def read_msopgen(path_or_text: str | os.PathLike[str], *, where: str | None = None) -> Parsed:
    """The prototypes of an msopgen JSON file, given as a path or as its text.

    Formats are not read: torch tensors have none. A file that is not JSON raises `BadPrototype`.
    """
    source, path = read_source(path_or_text, where)
    text = source.decode("utf-8-sig", errors="replace")
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadPrototype(f"{path}:{error.lineno}", error.msg, "JSON") from None
    if not isinstance(whole, list | dict):
        raise BadPrototype(f"{path}:1", repr(whole), "a list of operators")
    notes: list[Note] = []
    entries = []
    at = text.index("[") + 1 if isinstance(whole, list) else 0
    for item in whole if isinstance(whole, list) else [whole]:
        while text[at].isspace() or text[at] == ",":
            at += 1
        place = f"{path}:{text.count(chr(10), 0, at) + 1}"
        name = item.get("op", "?") if isinstance(item, dict) else "?"
        entries.append((str(name), place, functools.partial(_json_prototype, item, place, notes)))
        at = json.JSONDecoder().raw_decode(text, at)[1]
    return collect(entries, notes)


def _field(item: Any, key: str, kind: type, where: str, default: Any = None) -> Any:
    value = item.get(key, default) if isinstance(item, dict) else None
    if not isinstance(value, kind):
        found = f"{key}: {json.dumps(value)}" if value is not None else f"no {key!r} in {item!r}"
        raise BadPrototype(where, found, f"{key!r} to be a {kind.__name__}")
    return value


def _json_prototype(item: Any, where: str, notes: list[Note]) -> Prototype:
    name = _field(item, "op", str, where)
    known = ("op", "language", "input_desc", "output_desc", "attr")
    for key in item:
        if key not in known:
            notes.append(Note(name, where, f"{key!r} is not read; expected {among(known, key)}"))
    parts = (_field(item, key, list, where, []) for key in ("input_desc", "output_desc", "attr"))
    inputs, outputs, attrs = parts
    return Prototype(
        name,
        tuple(_json_port(port, "input", where, name, notes) for port in inputs),
        tuple(_json_port(port, "output", where, name, notes) for port in outputs),
        tuple(_json_attr(attr, where) for attr in attrs),
        where,
    )


def _json_port(item: Any, group: str, where: str, op: str, notes: list[Note]) -> Port:
    name = _field(item, "name", str, where)
    kind = _field(item, "param_type", str, where, "required").lower()
    if kind not in ("required", "optional", "dynamic"):
        found = f"param_type {kind!r} of {name!r}"
        raise BadPrototype(where, found, among(("required", "optional", "dynamic"), kind))
    if group == "output" and kind == "optional":
        raise Unsupported(where, f"optional output {name!r}", NEVER["OPTIONAL_OUTPUT"])
    types = [item["type"]] if isinstance(item.get("type"), str) else item.get("type")
    dtypes = set()
    for word in _field({"type": types}, "type", list, where):
        try:
            dtypes.add(dtype_name(str(word)))
        except UnknownName:
            dtypes.add(f"DT_{word}".upper())
            notes.append(Note(op, where, f"{word!r} is no dtype that torchgraft knows"))
    return Port(name, kind, frozenset(dtypes) or None)


def _json_attr(item: Any, where: str) -> Attr:
    name = _field(item, "name", str, where)
    spelled = _field(item, "type", str, where)
    bare = spelled.replace("_", "").lower()
    bare = re.sub(r"str$", "string", re.sub(r"d(ata)?type$", "type", bare))
    type = {known.lower(): known for known in ATTR_TYPES}.get(bare)
    if type is None:
        raise BadPrototype(where, f"type {spelled!r} of {name!r}", among(ATTR_TYPES, spelled))
    kind = "optional" if "default_value" in item else "required"
    kind = _field(item, "param_type", str, where, kind).lower()
    if kind == "required":
        return Attr(name, type)
    value = item.get("default_value")
    if kind != "optional" or value is None:
        found = f"param_type {kind!r} of {name!r}" + " without default_value" * (value is None)
        raise BadPrototype(where, found, "'required', or 'optional' with a default_value")
    try:
        if isinstance(value, str) and type not in ("String", "Type"):
            value = json.loads(value.replace("{", "[").replace("}", "]").lower())
        return Attr(name, type, False, convert(value, type))
    except ValueError as error:
        found = f"default_value {json.dumps(item['default_value'])} of {name!r}"
        raise BadPrototype(where, found, f"{type} ({error})") from None
