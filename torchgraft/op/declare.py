"""`load_prototypes`: each prototype becomes an op `ge::Name` whose dtypes are checked at each call.

Kernels may come before the prototype or after it, from Python or from C++: torch keeps them per
op and device, and what is registered here only stands in where there is none.
"""

from __future__ import annotations

import keyword
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from torchgraft import _torch
from torchgraft.errors import BadFile, Clash, NoKernel, NoShapes
from torchgraft.op import guard
from torchgraft.op.builders import render
from torchgraft.op.dtypes import check_dtypes, torch_dtypes
from torchgraft.op.header import read_header
from torchgraft.op.msopgen import read_msopgen
from torchgraft.op.prototype import Attr, Parsed, Port, Prototype, Skipped, argument
from torchgraft.op.schema import registered

SPACE = "ge"
KEYS = {"cpu": "CPU", "cuda": "CUDA", "npu": "PrivateUse1"}
"""The dispatch key of a device."""

_TYPES = {"Int": "int", "Float": "float", "Bool": "bool", "String": "str", "Type": "str"}
_TYPES["Tensor"] = "Tensor?"


class Table:
    """What is declared in one namespace. Torch's own registry lives as long as the process, so
    this does too."""

    def __init__(self, space: str) -> None:
        self.space = space
        self.prototypes: dict[str, Prototype] = {}
        self.bodies: dict[str, Callable[..., Any]] = {}
        """Kernels for every device, by name; an op may get one before its prototype."""
        self.library = self._library()
        self._libraries: dict[str, Any] = {}
        make: Any = torch.library.Library  # untyped in torch
        self.refusals = make("torchgraft", "FRAGMENT")
        self._guards: dict[str, tuple[Any, list[Any]]] = {}
        """By name: the library that holds a check in Python, and the same check as data."""

    def _library(self) -> Any:
        make: Any = torch.library.Library  # untyped in torch
        return make(self.space, "FRAGMENT")

    def declare(self, prototype: Prototype) -> None:
        """Define the op, unless somebody has (an equal one; see `check`)."""
        name = prototype.name
        if registered(f"{self.space}::{name}") is None:
            self._libraries[name] = self._library()
            self._libraries[name].define(schema(prototype))
            stand_in = self._stand_in(prototype)
            self._libraries[name].impl(name, stand_in, "CompositeExplicitAutograd")
        if name not in self.prototypes:
            self._guard(prototype)
        self.prototypes.setdefault(name, prototype)

    def adopt(self, name: str, text: str, where: str) -> bool:
        """Whether a prototype has defined this op and has no body, so that the op that is being
        declared with the schema `text` only brings one. Raises when the prototype differs."""
        prototype = self.prototypes.get(name)
        if prototype is None:
            return False
        wanted = _torch.parse_schema(f"{self.space}::{schema(prototype)}")
        if not same_arguments(_torch.parse_schema(text), wanted):
            raise Clash(f"{self.space}::{name}", (prototype.where, str(wanted)), (where, text))
        there = registered(f"{self.space}::{name}") is not None
        return there and name in self._libraries and name not in self.bodies

    def check(self, prototype: Prototype) -> None:
        """Raise where the op is there already and is another one."""
        name = prototype.name
        first = self.prototypes.get(name)
        if first is not None and render(first) != render(prototype):
            raise Clash(
                f"{self.space}::{name}",
                (first.where, render(first)),
                (prototype.where, render(prototype)),
            )
        there = registered(f"{self.space}::{name}")
        if first is None and there is not None:
            wanted = _torch.parse_schema(f"{self.space}::{schema(prototype)}")
            if not same_arguments(there, wanted):
                raise Clash(
                    f"{self.space}::{name}",
                    ("an op or library that was loaded before", str(there)),
                    (prototype.where, str(wanted)),
                )

    def _stand_in(self, prototype: Prototype) -> Callable[..., Any]:
        name = prototype.name
        arguments = ", ".join(port.name for port in prototype.inputs)
        return stand_in(self.bodies, self.space, name, prototype.where, arguments)

    def _guard(self, prototype: Prototype) -> None:
        """Check dtypes, and fill in defaults that a schema cannot spell, before any kernel.

        Torch asks BackendSelect before the kernel of any device, wherever that kernel is from.
        """
        exact = {
            attr.name: attr.default
            for attr in prototype.attrs
            if not attr.required and _literal(attr) is None
        }
        ports = prototype.inputs
        if not exact and all(p.dtypes is None and p.symbol is None for p in ports):
            return
        taken = reserved(prototype)
        exact = {argument(key, taken): value for key, value in exact.items()}
        names = [port.name for port in ports]
        space, name, below = getattr(torch.ops, self.space), prototype.name, _torch.below_select()
        simple = not exact and all(p.kind == "required" and p.symbol is None for p in ports)
        sets = [None if p.dtypes is None else torch_dtypes(p.dtypes) for p in ports]
        tests = [(i, allowed) for i, allowed in enumerate(sets) if allowed is not None]
        plain = not exact and all(p.symbol is None for p in ports)
        if plain and all(guard.known(allowed) for _, allowed in tests):
            if (compiled := guard.compiled()) is not None:
                guard.install(compiled, self.space, name, tests)
                return
            self._guards[name] = (self._library(), tests)

        def check(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if simple and len(args) == len(names):  # the usual call, made cheap
                for i, allowed in tests:
                    if args[i].dtype not in allowed:
                        break
                else:
                    return getattr(space, name).default.redispatch(keys & below, *args, **kwargs)
            given = dict(zip(names, args, strict=False))
            given |= {key: kwargs[key] for key in names[len(args) :] if key in kwargs}
            error = check_dtypes(prototype, given)
            if error is not None:
                raise error
            for key, value in exact.items():
                if kwargs.get(key) is None:
                    kwargs[key] = value
            # Looked up at each call: an op may be taken back and declared again.
            return getattr(space, name).default.redispatch(keys & below, *args, **kwargs)

        library = self._guards[name][0] if name in self._guards else self.library
        library.impl(name, check, "BackendSelect", with_keyset=True)

    def compile_guard(self, name: str) -> None:
        """Let C++ check the dtypes of an op that has a kernel in C++."""
        if name in self._guards:
            compiled = guard.compiled(build=True)
            library, tests = self._guards.pop(name)
            _torch.drop_library(library)
            guard.install(compiled, self.space, name, tests)


TABLE = Table(SPACE)


def _refuse_dtypes(name: str, tensors: list[torch.Tensor], places: list[int]) -> None:
    """Raise for what the check in C++ refused: tensors, and the places of their arguments."""
    prototype = TABLE.prototypes[name.partition("::")[2]]
    given: dict[str, Any] = {}
    for tensor, place in zip(tensors, places, strict=True):
        port = prototype.inputs[place]
        if port.kind == "dynamic":
            given.setdefault(port.name, []).append(tensor)
        else:
            given[port.name] = tensor
    error = check_dtypes(prototype, given)
    if error is not None:
        raise error


TABLE.refusals.define("refuse_dtypes(str op, Tensor[] tensors, int[] places) -> ()")
TABLE.refusals.impl("refuse_dtypes", _refuse_dtypes, "CompositeExplicitAutograd")


def stand_in(
    bodies: dict[str, Callable[..., Any]], space: str, name: str, where: str, arguments: str
) -> Callable[..., Any]:
    """What runs where no kernel fits: the body for every device, or an error that helps."""
    op = f"{space}::{name}"

    def run(*args: Any, **kwargs: Any) -> Any:
        body = bodies.get(name)
        if body is not None:
            return body(*args, **kwargs)
        tensors = [x for x in _torch.flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        if any(_torch.is_fake(x) or x.is_meta for x in tensors):
            raise NoShapes(op, where, arguments)
        device = tensors[0].device.type if tensors else "cpu"
        raise NoKernel(str(registered(op) or op), where, device, devices_of(op), arguments)

    return run


class Owner(Protocol):
    """Whoever defines the ops of a namespace from files, and takes bodies for them."""

    bodies: dict[str, Callable[..., Any]]

    def adopt(self, name: str, text: str, where: str) -> bool:
        """See `Table.adopt`."""


OWNERS: dict[str, Owner] = {SPACE: TABLE}


def has_kernel(name: str, key: str) -> bool:
    """Whether the op `ns::name` has a kernel of its own for a dispatch key."""
    space, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    op = getattr(getattr(getattr(torch.ops, space), base), overload or "default")
    return bool(op.has_kernel_for_dispatch_key(key))


def devices_of(name: str) -> list[str]:
    """The devices that the op `ns::name` has a kernel of its own for."""
    return [device for device, key in KEYS.items() if has_kernel(name, key)]


def load_prototypes(path: str | os.PathLike[str], *, keep_going: bool = False) -> Parsed:
    """Declare an op `ge::Name` for each prototype of a `REG_OP` header or an msopgen JSON file.

    Inputs are positional; attributes and `size_of_<output>`, the length of a dynamic output, go by
    name. An input that is an output too is written in place and not returned. The result says
    what was declared and, with file and line, what was skipped and why. When an entry is
    malformed, nothing is declared, unless `keep_going`: then the others are. Loading a file again
    changes nothing.
    """
    return declare(read_prototypes(path), os.fspath(path), keep_going)


def declare(parsed: Parsed, path: str, keep_going: bool) -> Parsed:
    """Declare what was read from a file; see `load_prototypes`."""
    parsed = _typed(parsed)
    problems = [one.line() for one in parsed.skipped if one.malformed]
    if problems and not keep_going:
        raise BadFile(path, problems, "keep_going=True")
    for prototype in parsed.prototypes:
        TABLE.check(prototype)
    for prototype in parsed.prototypes:
        TABLE.declare(prototype)
    return parsed


def read_prototypes(path: str | os.PathLike[str], where: str | None = None) -> Parsed:
    """The prototypes of a file, read by its name: msopgen JSON, otherwise a header."""
    read = read_msopgen if os.fspath(path).endswith(".json") else read_header
    return read(Path(path), where=where)


def _typed(parsed: Parsed) -> Parsed:
    """The same, less what torch's schemas cannot say."""
    kept, skipped = [], list(parsed.skipped)
    for one in parsed.prototypes:
        if why := _unspeakable(one):
            skipped.append(Skipped(one.name, one.where, why, malformed=False))
        else:
            kept.append(one)
    return Parsed(tuple(kept), tuple(skipped), parsed.notes)


def _unspeakable(prototype: Prototype) -> str | None:
    """Why no schema can be written for a prototype, or None."""
    for attr in prototype.attrs:
        if attr.type.replace("List", "") not in _TYPES:
            return f"found attribute {attr.name!r} of {attr.type}, which no torch type can hold"
    names = [*(port.name for port in prototype.inputs), *(attr.name for attr in prototype.attrs)]
    for name in names:
        if keyword.iskeyword(name):  # torch's schemas have some of Python's
            try:
                _torch.parse_schema(f"ge::f(int {name}) -> ()")
            except RuntimeError:
                return f"found the name {name!r}, which no argument of a torch operator can have"
    return None


def schema(prototype: Prototype) -> str:
    """The prototype as a torch schema.

    >>> from torchgraft.op.header import read_header
    >>> text = "REG_OP(N).INPUT(x, DT_INT8).ATTR(eps, Float, 1e-12).OUTPUT(y, DT_INT8)"
    >>> schema(read_header(text + ".OP_END_FACTORY_REG(N)").prototypes[0])
    'N(Tensor x, *, float eps=1e-12) -> Tensor'
    """
    taken = reserved(prototype)
    mutated = prototype.mutated
    parts = [
        _input(port, "abcdefghijklmnopqrstuvwxyz"[mutated.index(port.name)])
        if port.name in mutated
        else _input(port)
        for port in prototype.inputs
    ]
    for index in reversed(range(len(parts))):  # what may be left out: a tail of optional inputs
        if prototype.inputs[index].kind != "optional":
            break
        parts[index] += "=None"
    named = [f"int size_of_{port.name}" for port in prototype.outputs if port.kind == "dynamic"]
    named += [_attribute(attr, argument(attr.name, taken)) for attr in prototype.attrs]
    results = [
        "Tensor[]" if port.kind == "dynamic" else "Tensor"
        for port in prototype.outputs
        if port.name not in mutated
    ]
    given = ", ".join([*parts, *(["*", *named] if named else [])])
    returned = results[0] if len(results) == 1 else f"({', '.join(results)})"
    return f"{prototype.name}({given}) -> {returned}"


def reserved(prototype: Prototype) -> set[str]:
    """The names of arguments that attributes cannot have."""
    sizes = {f"size_of_{port.name}" for port in prototype.outputs if port.kind == "dynamic"}
    return {port.name for port in prototype.inputs} | sizes


def _input(port: Port, alias: str = "") -> str:
    ending = {"required": "", "optional": "?", "dynamic": "[]"}[port.kind]
    return f"Tensor{f'({alias}!)' if alias else ''}{ending} {port.name}"


def _attribute(attr: Attr, name: str) -> str:
    scalar = attr.type.replace("List", "")
    depth = (len(attr.type) - len(scalar)) // 4
    type = _TYPES[scalar].rstrip("?" if depth else "") + "[]" * depth
    if attr.required:
        return f"{type} {name}"
    literal = _literal(attr)
    if literal is None:  # the guard gives the exact value to the kernel
        return f"{type.rstrip('?')}? {name}=None"
    return f"{type} {name}={literal}"


def _literal(attr: Attr) -> str | None:
    """The default as schemas write it; None where they cannot."""
    value = attr.default
    if attr.type == "Tensor":
        return "None"
    if attr.type in ("Int", "Bool"):
        return str(value)
    if attr.type == "Float":
        return repr(value) if math.isfinite(value) else None
    if attr.type in ("String", "Type"):
        plain = value.isascii() and value.isprintable() and not {'"', "\\"} & set(value)
        return f'"{value}"' if plain else None
    if attr.type == "ListInt" or (attr.type == "ListFloat" and all(map(math.isfinite, value))):
        return f"[{', '.join(map(repr, value))}]"
    return None


def same_arguments(first: Any, second: Any) -> bool:
    """Whether two schemas may be of one op."""
    return _arguments(first) == _arguments(second)


def _arguments(schema: Any) -> list[Any]:
    """What two schemas of one op must share. How an argument is passed, and whether a tensor may
    be left out, is up to the author."""
    arguments = []
    for arg in schema.arguments:
        tensor = "Tensor" in str(arg.type)
        default = arg.default_value if arg.has_default_value() and not tensor else "required"
        written = arg.alias_info is not None and arg.alias_info.is_write
        arguments.append((arg.name, str(arg.type), default, written))
    return [sorted(arguments, key=str), [str(ret.type) for ret in schema.returns]]
