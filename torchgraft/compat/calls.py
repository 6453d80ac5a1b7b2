"""What is wrong with the calls of Ascend functions in a script, as far as its text shows."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torchgraft.compat.aie.spec import IDLE, Spec
from torchgraft.compat.air.config import NpuGraphExConfig, from_options
from torchgraft.errors import first_line


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """One use, with its line. `fatal`: the script will fail there."""

    path: str
    line: int
    what: str
    why: str
    fatal: bool = True

    def __str__(self) -> str:
        kind = "will not work" if self.fatal else "without effect"
        return f"{self.path}:{self.line}: {self.what}: {kind}: {self.why}"


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """`torchair.ge.Const` for an attribute of an imported name; nothing for another."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, names)
        return f"{base}.{node.attr}" if base else ""
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""


def problems(tree: ast.AST, names: dict[str, str], path: str) -> Iterator[Problem]:
    """Keywords that a function does not know, values that it refuses, arguments without effect."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func, names)
        given = {word.arg: word for word in node.keywords if word.arg is not None}
        head, _, last = called.rpartition(".")
        if head in _AIE and last in _DOORS:
            taken = _DOORS[last]
            rest = {name: _value(word.value) for name, word in given.items() if name not in taken}
            found = _of_spec(rest)
        elif called == "torch.compile":
            found = _of_options(given)
        else:
            found = _of_signature(called, given)
        for name, why, fatal in found:
            line = given[name].lineno if name in given else node.lineno
            yield Problem(path, line, f"{called}({name}=...)", why, fatal)


_UNKNOWN = object()
_AIE = ("torch_aie", "mindietorch")
_DOORS = {
    "compile": ("module", "ir", "inputs"),
    "export_engine": ("module", "method_name", "ir", "inputs", "path"),
}
"""The functions that take a `Spec`, and what else they take."""
Found = Iterator[tuple[str, str, bool]]


def _value(node: ast.expr) -> Any:
    """What an expression is, where it says so itself."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _UNKNOWN


def _of_spec(given: dict[str, Any]) -> Found:
    """What `compile` makes of its keywords, one by one."""
    default = {field.name: field.default for field in dataclasses.fields(Spec)}
    for name, value in given.items():
        if name not in default or value is not _UNKNOWN:
            why = _raised(Spec.of, {name: value})
            if why is not None:
                yield name, why, True
                continue
        if name in IDLE and value != default[name]:
            yield name, IDLE[name], False


def _of_options(given: dict[str, ast.keyword]) -> Found:
    """What a backend of an Ascend package makes of the options of `torch.compile`."""
    backend = _value(given["backend"].value) if "backend" in given else None
    options = given["options"].value if "options" in given else None
    if not isinstance(options, ast.Dict):
        return
    pairs = zip(options.keys, options.values, strict=True)
    held = {_value(key): _value(value) for key, value in pairs if key is not None}
    if backend == "mindie":
        for name, why, fatal in _of_spec({str(name): held[name] for name in held}):
            yield "options", why if name in why else f"{name}: {why}", fatal
    elif backend in ("npu", "npugraph_ex", "npugraphs"):
        known = NpuGraphExConfig().options
        for name, value in held.items():
            if name in known and value is _UNKNOWN:
                continue
            refusal = _raised(from_options, {name: value})
            if refusal is not None:
                yield "options", refusal, True
            elif known[name].idle is not None:
                yield "options", f"{name}: {known[name].idle}", False


def _of_signature(called: str, given: dict[str, ast.keyword]) -> Found:
    """The keywords that a function of an Ascend package does not have."""
    function = _function(called)
    if not given or function is None:
        return
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    for name in given:
        if name not in parameters:
            yield name, f"there is no such argument; it takes {', '.join(parameters)}", True


def _function(called: str) -> Callable[..., Any] | None:
    """A function or a class of ours by its dotted name."""
    module, _, last = called.rpartition(".")
    if module.partition(".")[0] not in (*_AIE, "torchair", "npugraph_ex"):
        return None
    try:
        found = getattr(importlib.import_module(module), last, None)
    except ImportError:
        return None
    ours = inspect.isfunction(found) or inspect.isclass(found)
    return found if ours and found.__module__.startswith("torchgraft.") else None


def _raised(make: Callable[[dict[str, Any]], object], given: dict[str, Any]) -> str | None:
    """What making something of these values raises."""
    try:
        make(given)
    except FileNotFoundError:
        return None  # it may be there when the script runs
    except (TypeError, ValueError) as error:
        return first_line(error)
    return None
