"""`REG_OP` headers, read with a C++ grammar and no compiler."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from torchgraft.errors import BadPrototype, UnknownName
from torchgraft.op.constants import constant, last_name, parse
from torchgraft.op.dtypes import GROUPS, dtype_name
from torchgraft.op.prototype import (
    ATTR_TYPES,
    NAME,
    NEVER,
    Attr,
    Dtypes,
    Entry,
    Kind,
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

if TYPE_CHECKING:
    from tree_sitter import Node

_PORTS: dict[str, tuple[str, Kind]] = {
    "INPUT": ("inputs", "required"),
    "OPTIONAL_INPUT": ("inputs", "optional"),
    "DYNAMIC_INPUT": ("inputs", "dynamic"),
    "OUTPUT": ("outputs", "required"),
    "DYNAMIC_OUTPUT": ("outputs", "dynamic"),
}
_MACROS = (*_PORTS, *NEVER, "ATTR", "REQUIRED_ATTR", "DATATYPE")
_BOXES = ("TensorType", "ListTensorType", "Promote")
_MARK = re.compile(rb"\b(?:REG_OP|OP_END_FACTORY_REG)\b(?:\s*\([^()]*\))?")


def read_header(path_or_text: str | os.PathLike[str], *, where: str | None = None) -> Parsed:
    """The `REG_OP(...)` prototypes of a C++ header, given as a path or as its text.

    Needs tree-sitter, no compiler. Includes and macros are not expanded; what surrounds the
    entries does not matter. `where` is the file's name in messages.

    >>> read_header("REG_OP(Neg).INPUT(x, DT_INT8).OP_END_FACTORY_REG(Neg)").prototypes[0].inputs
    (Port(name='x', kind='required', dtypes=frozenset({'DT_INT8'}), symbol=None),)
    """
    source, path = read_source(path_or_text, where)
    notes: list[Note] = []
    return collect(_entries(source, path, notes), notes)


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


def _entries(source: bytes, path: str, notes: list[Note]) -> Iterator[Entry]:
    """Each stretch from a REG_OP to its OP_END_FACTORY_REG. Each is parsed by itself, since real
    headers have no semicolon between them and close namespaces that they never opened."""
    root = parse(source)
    line, seen = 1, 0
    begun: tuple[int, str, int] | None = None

    def broken(name: str, line: int, found: str, expected: str) -> Entry:
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
            if macro in NEVER:
                raise Unsupported(self.at(args), f".{macro}{self.say(args)}", NEVER[macro])
            if macro in _PORTS:
                group, kind = _PORTS[macro]
                groups[group].append(self.port(macro, args, kind))
            elif macro in ("ATTR", "REQUIRED_ATTR"):
                groups["attrs"].append(self.attr(macro, args))
            elif macro != "DATATYPE":
                raise self.bad(args, f".{macro}", among(_MACROS, macro))
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
        alone = len(nodes) == 2 and NAME.fullmatch(symbol) is not None
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
            raise self.bad(nodes[1], self.say(nodes[1]), among(ATTR_TYPES, type))
        name = self.say(nodes[0])
        if macro == "REQUIRED_ATTR":
            return Attr(name, type)
        try:
            return Attr(name, type, False, convert(constant(nodes[2], self.text, type), type))
        except ValueError as error:
            expected = f"a default of {type} for {name!r} ({error})"
            raise self.bad(nodes[2], self.say(nodes[2]), expected) from None


def _raise(error: BadPrototype) -> NoReturn:
    raise error
