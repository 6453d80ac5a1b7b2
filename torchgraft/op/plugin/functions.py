"""The functions file of op-plugin, as data: which operators there are and what each entry asks.

Every key of the format is known here. Those that mean something only on an NPU become notes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from torchgraft import _torch
from torchgraft.errors import BadPrototype
from torchgraft.op.plugin.document import Place, read_yaml
from torchgraft.op.plugin.expression import Expression
from torchgraft.op.prototype import Note, among
from torchgraft.op.schema import registered

SECTIONS = ("official", "autograd", "custom", "symint", "quant", "tocpu", "unsupported")
VERSIONED = ("acl_op", "op_api", "dvm", "sparse", "exposed", "internal_format_opapi")
KEYS = (
    "func", *VERSIONED, "impl_ns", "gen_opapi", "structured", "structured_delegate",
    "device_check", "dispatch", "tags", "use_const_ref_for_mutable_tensors",
)  # fmt: skip
GEN_KEYS = (
    "new_params", "exec", "structured_inherit", "cpu_scalar_h2d", "cpu_scalar_op",
    "integral_identity_tensor",
)  # fmt: skip
_NPU_ONLY = {
    "dvm": "which operators an NPU compiler fuses",
    "sparse": "kernels for sparse tensors on an NPU",
    "internal_format_opapi": "which kernels take the private formats of an NPU",
    "device_check": "generated checks that inputs share one NPU",
    "structured": "how C++ is generated",
    "use_const_ref_for_mutable_tensors": "how C++ is generated",
    "cpu_scalar_h2d": "copies of scalars to an NPU",
    "cpu_scalar_op": "another kernel for scalars that are not on an NPU",
    "integral_identity_tensor": "a shortcut of an NPU kernel",
}


@dataclasses.dataclass(frozen=True)
class Out:
    """An output that `gen_opapi` allocates."""

    name: str
    size: Expression | None
    dtype: Expression | None


@dataclasses.dataclass(frozen=True)
class Gen:
    """How an entry becomes one call of a kernel."""

    kernel: str = ""
    args: tuple[Expression, ...] | None = None
    outs: tuple[Out, ...] = ()
    params: tuple[tuple[str, Expression], ...] = ()
    inherit: str = ""


@dataclasses.dataclass(frozen=True)
class Entry:
    """An operator of the file. `name` has the overload: `npu_add`, `npu_add.out`."""

    name: str
    schema: str
    section: str
    where: str
    gen: Gen | None = None
    dispatch: tuple[tuple[str, str], ...] = ()
    tags: tuple[str, ...] = ()
    delegate: str = ""
    kernels: tuple[str, ...] = ("op_api", "acl_op")
    exposed: bool = True

    @property
    def parsed(self) -> Any:
        return _torch.parse_schema(f"npu::{self.schema}")

    @property
    def function(self) -> str:
        """The C++ function that implements it."""
        base, _, overload = self.name.partition(".")
        return f"{base}_out" if overload.endswith("out") else base


@dataclasses.dataclass(frozen=True)
class Functions:
    """What a functions file declares for one version of torch."""

    entries: tuple[Entry, ...]
    notes: tuple[Note, ...] = ()
    problems: tuple[str, ...] = ()
    version: str = ""


class Versions:
    """The versions that a file is written for, and the one that it is read for."""

    def __init__(self, known: Iterable[str], wanted: str) -> None:
        self.known = sorted({*known}, key=number) or [wanted]
        below = [one for one in self.known if number(one) <= number(wanted)]
        self.wanted = wanted
        self.chosen = below[-1] if below else self.known[0]

    def has(self, spec: Place) -> bool:
        """Whether `all_version`, `v2.1, v2.2` or `[v2.1, newest]` holds the chosen version."""
        if spec.is_list:
            ends = [self._one(item) for item in spec.items()]
            if len(ends) != 2:
                raise spec.bad(f"{len(ends)} versions", "a range, [first, last]")
            return ends[0] <= number(self.chosen) <= ends[1]
        if spec.text() == "all_version":
            return True
        words = [word.strip() for word in spec.text().split(",") if word.strip()]
        return number(self.chosen) in [self._parse(spec, word) for word in words]

    def _one(self, place: Place) -> tuple[int, ...]:
        return self._parse(place, place.text())

    def _parse(self, place: Place, word: str) -> tuple[int, ...]:
        if word == "newest":
            return number(self.known[-1])
        if not re.fullmatch(r"v\d+\.\d+", word):
            raise place.bad(repr(word), "a version such as v2.7, all_version or newest")
        return number(word)


def number(version: str) -> tuple[int, ...]:
    """A version to compare.

    >>> number("v2.10") > number("v2.9")
    True
    """
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def read_functions(text: str, path: str, version: str) -> Functions:
    """The entries that hold for a version of torch (`v2.13`), and what is wrong with the file.

    A file that is a bare list of entries is taken for the `custom` section.
    """
    notes: list[Note] = []
    problems: list[str] = []
    try:
        top = read_yaml(text, path)
        sections = [] if top is None else list(_sections(top, version))
    except BadPrototype as error:
        return Functions((), (), (str(error),))
    versions = next((one for name, one in sections if name == "all_version"), None)
    versions = versions or Versions([], version)
    if versions.chosen != version:
        what = f"{version} is not among its versions: read as {versions.chosen}"
        notes.append(Note("all_version", f"{path}:1", what))
    entries: dict[str, Entry] = {}
    for section, value in sections:
        if section == "all_version":
            continue
        for item in value.items():
            try:
                entry = read_entry(item, section, versions, notes)
                if entry is None:
                    continue
                first = entries.setdefault(entry.name, entry)
                if first is not entry:
                    raise item.bad(f"a second {entry.name}", f"one; the first is at {first.where}")
            except BadPrototype as error:
                problems.append(str(error))
    for entry in entries.values():
        for target in (entry.delegate, entry.gen.inherit if entry.gen else ""):
            if target and target not in entries and not registered(f"aten::{target}"):
                expected = among(sorted(entries), target)
                problems.append(str(BadPrototype(entry.where, f"{target!r}", expected)))
    return Functions(tuple(entries.values()), tuple(notes), tuple(problems), versions.chosen)


def _sections(top: Place, version: str) -> Any:
    if top.is_list:
        yield "custom", top
        return
    for name, _, value in top.entries(("all_version", *SECTIONS)):
        if name == "all_version":
            words = [item.text() for item in value.items()]
            for word in words:
                if not re.fullmatch(r"v\d+\.\d+", word):
                    raise value.bad(repr(word), "a version such as v2.7")
            yield name, Versions(words, version)
        elif value.is_list or value.text():
            value.items()
            yield name, value


def read_entry(item: Place, section: str, versions: Versions, notes: list[Note]) -> Entry | None:
    """One entry; None where it is not for this version, or not for anything but an NPU."""
    parts = {key: (place, value) for key, place, value in item.entries(KEYS)}
    if "func" not in parts:
        raise item.bad("an entry without 'func'", "func: name(Tensor x, ...) -> Tensor")
    schema = parts["func"][1].text()
    try:
        parsed = _torch.parse_schema(f"npu::{schema}")
    except RuntimeError as error:
        said = " ".join(str(error).split())
        raise parts["func"][1].bad(schema, f"a schema ({said[:160]})") from None
    name = schema.partition("(")[0].strip()
    holds = {key: versions.has(parts[key][1]) for key in VERSIONED if key in parts}
    if "impl_ns" in parts:  # files for torch 2.1 to 2.4 say it so, without versions
        spaces = _spaces(parts["impl_ns"][1])
        holds |= {key: key in spaces for key in ("op_api", "acl_op", "sparse")}
    kernels = [key for key in ("op_api", "acl_op") if holds.get(key, key not in parts)]
    declared = [key for key in ("op_api", "acl_op", "sparse", "dvm") if key in holds]
    if declared and not any(holds[key] for key in declared):
        return None
    fresh: list[Note] = []
    for key, why in _NPU_ONLY.items():
        if key in parts:
            fresh.append(Note(name, parts[key][0].where, f"{key!r} has no effect here: {why}"))
    gen = None
    if "gen_opapi" in parts:
        place, value = parts["gen_opapi"]
        if "structured_delegate" in parts:
            raise place.bad("gen_opapi and structured_delegate", "one of them")
        gen = _gen(value, name, parsed, fresh)
    if section == "official" or registered(f"aten::{name}") is not None:
        what = "is an operator of torch itself, whose own kernels are used here"
        notes.append(Note(name, item.where, what))
        return None
    notes += fresh
    tags = parts["tags"][1] if "tags" in parts else None
    words = [] if tags is None else [t.text() for t in tags.items()] if tags.is_list else [
        word.strip() for word in tags.text().split(",")
    ]  # fmt: skip
    dispatch = parts["dispatch"][1].entries() if "dispatch" in parts else ()
    return Entry(
        name,
        schema,
        section,
        item.where,
        gen,
        tuple((key, value.text()) for key, _, value in dispatch),
        tuple(words),
        parts["structured_delegate"][1].text() if "structured_delegate" in parts else "",
        tuple(kernels),
        holds.get("exposed", True),
    )


def _spaces(value: Place) -> list[str]:
    """The namespaces of C++ functions that `impl_ns: acl_op, op_api` lists."""
    words = [word.strip() for word in value.text().split(",")]
    for word in words:
        if word not in VERSIONED:
            raise value.bad(repr(word), among(["acl_op", "op_api", "sparse"], word))
    return words


def _gen(value: Place, name: str, parsed: Any, notes: list[Note]) -> Gen:
    """Read `gen_opapi`. Expressions may use arguments, new parameters and outputs, no others."""
    known = [arg.name for arg in parsed.arguments]
    returns = [ret.name for ret in parsed.returns if ret.name]
    outs: list[Out] = []
    params: list[tuple[str, Expression]] = []
    call: Place | None = None
    inherit = ""
    for key, place, inside in value.entries():
        if key in _NPU_ONLY and key in GEN_KEYS:
            notes.append(Note(name, place.where, f"{key!r} has no effect here: {_NPU_ONLY[key]}"))
        elif key == "exec":
            call = inside
        elif key == "structured_inherit":
            inherit = inside.text()
        elif key == "new_params":
            for param, _, formula in inside.entries():
                params.append((param, _expression(formula, known)))
                known.append(param)
        elif re.fullmatch(r"out\d*", key) or key in returns or key in known:
            outs.append(_out(key, inside, known))
        else:
            raise place.bad(f"unknown key {key!r}", among((*GEN_KEYS, "out", *returns), key))
    tensors = sum("Tensor" in str(ret.type) for ret in parsed.returns)
    if outs and len(outs) != tensors:
        raise value.bad(f"{len(outs)} outputs", f"{tensors}, as many as the schema returns")
    if call is None:
        if not inherit:
            raise value.bad("gen_opapi without 'exec'", "exec: aclnnName, or structured_inherit")
        return Gen("", None, tuple(outs), tuple(params), inherit)
    if not outs and tensors and not inherit:
        raise value.bad("no outputs", f"{tensors}, as many as the schema returns")
    kernel, *words = _split(call.text())
    known += [out.name for out in outs]
    args = tuple(_expression(call, known, word) for word in words) if words else None
    return Gen(kernel, args, tuple(outs), tuple(params), inherit)


def _out(key: str, value: Place, known: list[str]) -> Out:
    parts = {name: inside for name, _, inside in value.entries(("size", "dtype", "name"))}
    name = parts["name"].text() if "name" in parts else key
    for needed in ("size", "dtype"):
        if needed not in parts and name not in known:
            raise value.bad(f"output {name!r} without {needed!r}", "size and dtype")
    size, dtype = (
        _expression(parts[one], known) if one in parts else None for one in ("size", "dtype")
    )
    return Out(name, size, dtype)


def _expression(place: Place, known: Iterable[str], text: str | None = None) -> Expression:
    try:
        expression = Expression(place.text() if text is None else text)
    except ValueError as error:
        raise place.bad(str(error), "an expression that torchgraft can evaluate") from None
    known = tuple(known)
    for name in expression.names:
        if name not in known:
            raise place.bad(f"unknown name {name!r}", among(known, name))
    return expression


def _split(text: str) -> list[str]:
    """Split at commas that are in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "({[<") - (letter in ")}]>")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]
