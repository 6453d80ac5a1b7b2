"""Operator prototypes as data, read from `REG_OP` headers and from msopgen JSON.

Reading is liberal about type specs (what it had to guess is in `Parsed.notes`) and strict about
structure (what it could not read is in `Parsed.skipped`, each with file, line and reason).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from torchgraft.errors import BadPrototype, UnknownName
from torchgraft.op.build import ATTR_TYPES, GROUPS, constant, convert, dtype_name, last_name, parse

if TYPE_CHECKING:
    from tree_sitter import Node

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


_Entry = tuple[str, str, Callable[[], Prototype]]  # its name, its place, what reads it


class _Unsupported(BadPrototype):
    """Well-formed, and nothing that an op can be."""


_PORTS: dict[str, tuple[str, Kind]] = {
    "INPUT": ("inputs", "required"),
    "OPTIONAL_INPUT": ("inputs", "optional"),
    "DYNAMIC_INPUT": ("inputs", "dynamic"),
    "OUTPUT": ("outputs", "required"),
    "DYNAMIC_OUTPUT": ("outputs", "dynamic"),
}
_NEVER = {
    "OPTIONAL_OUTPUT": "outputs that are always there (an op returns as many at every call)",
    "GRAPH": "inputs, outputs and attributes (an op cannot hold a graph)",
    "DYNAMIC_GRAPH": "inputs, outputs and attributes (an op cannot hold a graph)",
}
_MACROS = (*_PORTS, *_NEVER, "ATTR", "REQUIRED_ATTR", "DATATYPE")
_BOXES = ("TensorType", "ListTensorType", "Promote")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MARK = re.compile(rb"\b(?:REG_OP|OP_END_FACTORY_REG)\b(?:\s*\([^()]*\))?")


def _among(known: Iterable[str], word: str) -> str:
    near = difflib.get_close_matches(word, known := tuple(known), n=1)
    return f"one of {', '.join(known)}" + (f" (did you mean {near[0]}?)" if near else "")


def _source(given: str | os.PathLike[str], where: str | None) -> tuple[bytes, str]:
    """The bytes, and the name that messages give them. A string that looks like text is text."""
    text = isinstance(given, str) and re.search(r"\n|REG_OP\s*\(|^\s*([\[{]|$)", given)
    if isinstance(given, str) and text and ("\n" in given or not os.path.exists(given)):
        return given.encode(), where or "<text>"
    try:
        return Path(given).read_bytes(), where or str(given)
    except OSError as error:
        found = (error.strerror or "an error").lower()
        raise BadPrototype(str(given), found, "a file to read") from error


def _raise(error: BadPrototype) -> NoReturn:
    raise error


def _collect(entries: Iterable[_Entry], notes: list[Note]) -> Parsed:
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
            skipped.append(Skipped(name, error.where, why, not isinstance(error, _Unsupported)))
    return Parsed(tuple(found.values()), tuple(skipped), tuple(notes))


def _checked(prototype: Prototype) -> Prototype:
    """The same, with names that Python can have (up to keywords), each once in its group."""
    for group in ("", "inputs", "outputs", "attrs"):
        names = [item.name for item in (getattr(prototype, group) if group else [prototype])]
        for name in names:
            if not _NAME.fullmatch(name):
                raise BadPrototype(prototype.where, repr(name), "a name of letters and digits")
            if names.count(name) > 1:
                found = f"{name!r} twice among the {group}"
                raise BadPrototype(prototype.where, found, "each name once")
    return prototype


def read_header(path_or_text: str | os.PathLike[str], *, where: str | None = None) -> Parsed:
    """The `REG_OP(...)` prototypes of a C++ header, given as a path or as its text.

    Needs tree-sitter, no compiler. Includes and macros are not expanded; what surrounds the
    entries does not matter. `where` is the file's name in messages.

    >>> read_header("REG_OP(Neg).INPUT(x, DT_INT8).OP_END_FACTORY_REG(Neg)").prototypes[0].inputs
    (Port(name='x', kind='required', dtypes=frozenset({'DT_INT8'}), symbol=None),)
    """
    source, path = _source(path_or_text, where)
    notes: list[Note] = []
    return _collect(_entries(source, path, notes), notes)


def _is_code(node: Node | None) -> bool:
    """False in a comment, a string, a macro definition and under `#if 0`."""
    if node is None or node.type in ("comment", "preproc_arg") or "string" in node.type:
        return False
    if node.parent is not None and node.parent.type.startswith("preproc"):
        return False
    while node.parent is not None:
        child, node = node, node.parent
        if node.type == "preproc_if" and child != node.child_by_field_name("alternative"):
            condition = node.child_by_field_name("condition")
            if condition is not None and condition.text == b"0":
                return False
    return True


def _entries(source: bytes, path: str, notes: list[Note]) -> Iterator[_Entry]:
    """Each stretch from a REG_OP to its OP_END_FACTORY_REG. Each is parsed by itself, since real
    headers have no semicolon between them and close namespaces that they never opened."""
    root = parse(source)
    line, seen = 1, 0
    begun: tuple[int, str, int] | None = None

    def broken(name: str, line: int, found: str, expected: str) -> _Entry:
        where = f"{path}:{line}"
        return name, where, functools.partial(_raise, BadPrototype(where, found, expected))

    for mark in _MARK.finditer(source):
        at = mark.start()
        if not _is_code(root.descendant_for_byte_range(at, at + 1)):
            continue
        line, seen = line + source.count(b"\n", seen, at), at
        argument = re.search(rb"\(\s*(\w+)", mark[0])
        name = argument[1].decode() if argument else "?"
        if mark[0].startswith(b"REG_OP"):
            if begun is not None:
                found = f"REG_OP({name}) at line {line}"
                yield broken(begun[1], begun[2], found, "OP_END_FACTORY_REG before it")
            begun = at, name, line
        elif begun is None:
            yield broken(name, line, f"OP_END_FACTORY_REG({name})", "a REG_OP before it")
        else:
            start, name, first = begun
            begun = None
            chain = _Chain(source[start : mark.end()], path, first, name, notes)
            yield name, f"{path}:{first}", chain.read
    if begun is not None:
        yield broken(begun[1], begun[2], "the end of the file", "OP_END_FACTORY_REG before it")


@dataclasses.dataclass
class _Chain:
    """One `REG_OP(Name).INPUT(...)...OP_END_FACTORY_REG(Name)` while it is read."""

    text: bytes
    path: str
    line: int
    name: str
    notes: list[Note]
    symbols: dict[str, Dtypes] = dataclasses.field(default_factory=dict)
    lists: set[str] = dataclasses.field(default_factory=set)

    def read(self) -> Prototype:
        calls = self.calls()
        for macro, args in (calls[0], calls[-1]):
            if self.say(args).strip("() ") != self.name:
                raise self.bad(args, f"{macro}{self.say(args)}", f"{macro}({self.name})")
        for macro, args in calls:
            if macro == "DATATYPE":
                self.symbol(args)
        groups: dict[str, list[Any]] = {"inputs": [], "outputs": [], "attrs": []}
        for macro, args in calls[1:-1]:
            if macro in _NEVER:
                raise _Unsupported(self.at(args), f".{macro}{self.say(args)}", _NEVER[macro])
            if macro in _PORTS:
                group, kind = _PORTS[macro]
                groups[group].append(self.port(macro, args, kind))
            elif macro in ("ATTR", "REQUIRED_ATTR"):
                groups["attrs"].append(self.attr(macro, args))
            elif macro != "DATATYPE":
                raise self.bad(args, f".{macro}", _among(_MACROS, macro))
        parts = {group: tuple(items) for group, items in groups.items()}
        return Prototype(self.name, **parts, where=f"{self.path}:{self.line}")

    def at(self, node: Node) -> str:
        return f"{self.path}:{self.line + node.start_point.row}"

    def say(self, node: Node) -> str:
        said = self.text[node.start_byte : node.end_byte].decode(errors="replace")
        return " ".join(said.split())

    def bad(self, node: Node, found: str, expected: str) -> BadPrototype:
        return BadPrototype(self.at(node), found, expected)

    def note(self, node: Node, what: str) -> None:
        note = Note(self.name, self.at(node), what)
        if note not in self.notes[-1:]:
            self.notes.append(note)

    def word(self, node: Node | None) -> str:
        return last_name(self.say(node)) if node else ""

    def items(self, node: Node | None) -> list[Node]:
        children = node.named_children if node else []
        return [child for child in children if child.type != "comment" and not child.is_missing]

    def calls(self) -> list[tuple[str, Node]]:
        """The macros of the chain with their arguments, in order; errors only in type specs."""
        root = parse(self.text + b";")
        calls: list[tuple[str, Node]] = []
        node = root.children[0].children[0] if root.children[0].children else root
        while node.type == "call_expression":
            function, args = (node.child_by_field_name(key) for key in ("function", "arguments"))
            if function is None or args is None:
                break
            for part in (*node.children, *function.children, *args.children):
                comma = part.is_named and (part.is_missing or self.say(part) == ",")
                if (part.type == "ERROR" or part.is_missing) and not comma:
                    at = args if part.is_missing else part
                    raise self.bad(at, self.around(at), "a whole macro call")
            calls.append((self.word(function.child_by_field_name("field") or function), args))
            node = function.child_by_field_name("argument") or function
        calls.reverse()
        whole = [macro for macro, _ in calls[:1] + calls[-1:]] == ["REG_OP", "OP_END_FACTORY_REG"]
        if root.child_count != 1 or not whole:
            at = root.children[min(1, root.child_count - 1)]
            raise self.bad(at, self.around(at), "macro calls joined by dots")
        for macro, args in calls:
            if args.has_error and macro not in _PORTS and macro != "DATATYPE":
                for arg in args.children:
                    if arg.has_error and not arg.is_missing:
                        raise self.bad(arg, self.say(arg), f"an argument of {macro}")
        return calls

    def around(self, node: Node) -> str:
        lines = self.text.decode(errors="replace").splitlines()
        return repr(lines[min(node.start_point.row, len(lines) - 1)].strip())

    def symbol(self, args: Node) -> None:
        """Remember `.DATATYPE(T, spec)`. What is bound to a list of types is not one dtype."""
        nodes = self.items(args)
        if len(nodes) < 2:
            raise self.bad(args, f".DATATYPE{self.say(args)}", "a symbol and its types")
        name = self.say(nodes[0]).strip('"')
        self.symbols[name] = self.union(args, nodes[1:])
        if self.word(nodes[1].child_by_field_name("function")) == "ListTensorType":
            self.lists.add(name)

    def port(self, macro: str, args: Node, kind: Kind) -> Port:
        nodes = self.items(args)
        if len(nodes) < 2:
            raise self.bad(args, f".{macro}{self.say(args)}", "a name and its types")
        dtypes = self.union(args, nodes[1:])
        symbol = self.say(nodes[1]).strip('"')
        known = nodes[1].type == "string_literal" or symbol in self.symbols
        alone = len(nodes) == 2 and _NAME.fullmatch(symbol) is not None
        shared = known and alone and symbol not in self.lists
        return Port(self.say(nodes[0]), kind, dtypes, symbol if shared else None)

    def union(self, parent: Node, nodes: list[Node]) -> Dtypes:
        sets = [self.types(node) for node in nodes]
        found = frozenset[str]().union(*(dtypes for dtypes in sets if dtypes is not None))
        if not sets:
            self.note(parent, f"{self.say(parent)} names no dtype: taken for any")
        return None if None in sets or not sets else found

    def types(self, node: Node) -> Dtypes:
        """The dtypes that a type spec names; None is any."""
        callee = node.child_by_field_name("function") or node.child_by_field_name("type")
        inside = node.child_by_field_name("arguments") or node.child_by_field_name("value")
        if node.type in ("call_expression", "compound_literal_expression"):
            word, nodes = self.word(callee), self.items(inside)
            if nodes and word not in _BOXES:
                self.note(node, f"{word} taken for TensorType")
            return self.union(node, nodes) if nodes or word in _BOXES else self.named(node, word)
        if node.type == "string_literal":
            return self.named(node, self.say(node).strip('"'))
        if "identifier" in node.type:
            return self.named(node, self.word(node))
        if node.type != "initializer_list":
            self.note(node, f"{self.around(node)}: read around a syntax error")
        return self.union(node, self.items(node))

    def named(self, node: Node, word: str) -> Dtypes:
        """The dtypes behind one word: a symbol, a group, a dtype, or what is nearest to it."""
        if word in self.symbols:
            return self.symbols[word]
        if word in GROUPS:
            return GROUPS[word]
        if word.startswith("DT_"):
            try:
                name = dtype_name(word)
            except UnknownName:
                self.note(node, f"{word} is no dtype that torchgraft knows: no tensor will fit it")
                return frozenset({word})
            if name != word:
                self.note(node, f"{word} taken for {name}")
            return frozenset({name})
        near = difflib.get_close_matches(word, GROUPS, n=1, cutoff=0.8)
        self.note(node, f"{word} taken for {near[0] if near else 'any dtype'}")
        return GROUPS[near[0]] if near else None

    def attr(self, macro: str, args: Node) -> Attr:
        nodes = self.items(args)
        wanted = ["a name", "a type"] + ["a default"] * (macro == "ATTR")
        if len(nodes) != len(wanted):
            raise self.bad(args, f".{macro}{self.say(args)}", ", ".join(wanted))
        type = self.word(nodes[1]).replace("AscendString", "String").replace("DataType", "Type")
        if type not in ATTR_TYPES:
            raise self.bad(nodes[1], self.say(nodes[1]), _among(ATTR_TYPES, type))
        name = self.say(nodes[0])
        if macro == "REQUIRED_ATTR":
            return Attr(name, type)
        try:
            return Attr(name, type, False, convert(constant(nodes[2], self.text, type), type))
        except ValueError as error:
            expected = f"a default of {type} for {name!r} ({error})"
            raise self.bad(nodes[2], self.say(nodes[2]), expected) from None


def read_msopgen(path_or_text: str | os.PathLike[str], *, where: str | None = None) -> Parsed:
    """The prototypes of an msopgen JSON file, given as a path or as its text.

    Formats are not read: torch tensors have none. A file that is not JSON raises `BadPrototype`.
    """
    source, path = _source(path_or_text, where)
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
    return _collect(entries, notes)


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
            notes.append(Note(name, where, f"{key!r} is not read; expected {_among(known, key)}"))
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
        raise BadPrototype(where, found, _among(("required", "optional", "dynamic"), kind))
    if group == "output" and kind == "optional":
        raise _Unsupported(where, f"optional output {name!r}", _NEVER["OPTIONAL_OUTPUT"])
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
        raise BadPrototype(where, f"type {spelled!r} of {name!r}", _among(ATTR_TYPES, spelled))
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
