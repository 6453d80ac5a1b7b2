"""Patterns written as TorchScript IR text: `graph(%0 : Tensor): ... return (%1)`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchgraft import _torch
from torchgraft.errors import BadPattern, UnsupportedScript
from torchgraft.fx import script
from torchgraft.passes.pattern.slots import Slot

_KINDS: dict[str, type] = {
    "Tensor": Tensor,
    "float": float,
    "Scalar": float,
    "number": float,
    "int": int,
    "bool": bool,
}
_ARROW = re.compile(r"\n( *)~+ *<--- HERE")


def parse(name: str, text: str) -> tuple[Callable[..., Any], tuple[Slot, ...]]:
    """The function that IR text describes, and its arguments.

    A `Tensor` of IR text also binds a number: TorchScript writes `x * 8.8` with a 0-dim tensor,
    which a graph holds as a number.
    """
    try:
        graph = _torch.parse_ir(text)
    except RuntimeError as error:
        message = str(error).strip()
        said = message.splitlines()[0].removesuffix(" here:").removesuffix(":").strip()
        line, column = _place(text, message)
        unknown = re.search(r"variable with name '(.+?)'", said)
        if unknown is not None:  # torch points behind the call
            column = text.splitlines()[line - 1].find(f"%{unknown[1]}") + 1
        raise BadPattern(name, said, _shown(text, line), line, column) from None
    for node in graph.nodes():
        _check(name, text, node)
    slots = tuple(_slot(name, value) for value in graph.inputs())
    try:
        fn = script.to_function(graph)
    except UnsupportedScript as error:
        fix = "Write this pattern as a Python function."
        raise BadPattern(name, f"{error.kind}: {error.why}", fix) from None
    return fn, slots


_NONE = "(no schema)"
_OUT = re.compile(r"\*, .*Tensor\(\w!\).* -> ")
"""An argument for an overload to write its result to: torch takes one too many for that."""


def _check(name: str, text: str, node: Any) -> None:
    """Raise unless an operator of that name takes these arguments."""
    kind = node.kind()
    if kind.startswith("prim::") or not (_OUT.search(node.schema()) or node.schema() == _NONE):
        return
    line, column = _place(text, node.sourceRange())
    known = [schema for schema in _torch.schemas_of(kind) if not _OUT.search(str(schema))]
    given = ", ".join(str(value.type()) for value in node.inputs())
    if known:
        fix = "There are:\n" + "\n".join(f"  {schema}" for schema in known)
        raise BadPattern(name, f"no {kind} takes ({given})", fix, line, column)
    near = difflib.get_close_matches(kind, _torch.operator_names(), n=1)
    fix = f"Did you mean {near[0]!r}? " if near else ""
    fix += "A custom operator must be loaded before the pattern is made."
    raise BadPattern(name, f"there is no operator {kind}", fix, line, column)


def _slot(name: str, value: Any) -> Slot:
    kind = str(value.type())
    optional = kind.endswith("?") or kind.startswith("Optional[")
    kind = kind.removesuffix("?").removeprefix("Optional[").removesuffix("]" if optional else "")
    many = kind.endswith("[]") or kind.startswith("List[")
    kind = kind.removesuffix("[]").removeprefix("List[").removesuffix("]" if many else "")
    if kind not in _KINDS:
        why = f"%{value.debugName()} is {value.type()}"
        raise BadPattern(name, why, f"An argument is one of {', '.join(_KINDS)}, T[] or T?.")
    found = _KINDS[kind]
    return Slot(value.debugName(), found, many, optional, number=found is Tensor)


def _place(text: str, shown: str) -> tuple[int, int]:
    """Line and column, from 1, of what torch points at with an arrow under the quoted text."""
    arrow = _ARROW.search(shown)
    lines = text.splitlines() or [""]
    if arrow is None:
        return len(lines), len(lines[-1]) + 1
    quoted = shown[: arrow.start()].splitlines()
    # torch quotes some lines before, too: enough of them to tell equal lines apart
    for keep in range(len(quoted), 0, -1):
        for end in range(keep, len(lines) + 1):
            if lines[end - keep : end] == quoted[-keep:]:
                return end, len(arrow[1]) + 1
    return len(lines), len(arrow[1]) + 1


def _shown(text: str, line: int) -> str:
    lines = text.splitlines()
    return f"  {lines[line - 1].strip()}" if line <= len(lines) else "  (the text ends here)"
