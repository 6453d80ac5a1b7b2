"""What a node's origin says about it: its modules, and the `with graft.fallback():` or
`with graft.stream(...):` around it."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node, traceback

from torchgraft import _torch
from torchgraft._torch.marks import inline_only
from torchgraft.errors import BadValue
from torchgraft.plan import MAIN

_KEY = "torchgraft"
_STREAM = "torchgraft_stream"
SCOPE = "torchgraft_fallback"
"""How source generated from a TorchScript trace shows a `with graft.fallback():`."""
STREAM_SCOPE = "torchgraft_stream="
"""The same for a `with graft.stream(...):`; the name follows."""


if TYPE_CHECKING:  # a return type that TorchScript can read would say less

    def fallback() -> contextlib.AbstractContextManager[Any]: ...

else:

    @inline_only
    def fallback():
        """Leave what is computed inside to torch: `with graft.fallback():` in the code of a model.

        Eager code does not notice. It holds in `torch.compile`, `torch.export`, `torch.jit.script`,
        `torch.fx.symbolic_trace` and `graft.compile`. A traced ScriptModule knows its source lines,
        so it holds there as long as the source can be read.

        >>> import torch, torchgraft as graft
        >>> def model(x):
        ...     with graft.fallback():
        ...         return x.sin()
        >>> compiled = graft.compile(model, (torch.ones(2),), require_full_compilation=True)
        Traceback (most recent call last):
        ...
        torchgraft.errors.NotCompiled: ...
        """
        if torch.jit.is_scripting():
            return ScriptedFallback()
        else:  # noqa: RET505 (TorchScript skips the branch that it does not take, nothing else)
            return _marking()


class ScriptedFallback:
    """The block in TorchScript, whose graph shows it as `prim::Enter` and `prim::Exit`."""

    def __init__(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        pass


@inline_only
def _marking() -> contextlib.AbstractContextManager[Any]:
    if torch.compiler.is_dynamo_compiling():
        return traceback.annotate({_KEY: "fallback"})
    return _Annotated({_KEY: "fallback"})


@inline_only
def stream(name: str) -> contextlib.AbstractContextManager[Any]:
    """Run what is computed inside on a stream of that name: `with graft.stream("side"):`.

    Nothing else is needed: what reads a result on another stream waits for it, and all streams are
    joined when the program returns. "main" is the stream of the caller; an inner block wins over
    an outer one. Eager code does not notice. It holds where `fallback` holds, but for
    `torch.jit.script`: scripted code takes `torch.ops.air.scope_enter` and `scope_exit`.

    >>> import torch, torchgraft as graft
    >>> def model(x):
    ...     with graft.stream("side"):
    ...         y = x @ x
    ...     return y + x.sin()
    >>> compiled = graft.compile(model, (torch.eye(2),), mode="eager")
    >>> sorted({step.stream for step in compiled.plan.launches})
    ['main', 'side']
    """
    if not isinstance(name, str) or not name:
        raise BadValue("graft.stream", name, "the name of a stream")
    if torch.compiler.is_dynamo_compiling():
        return traceback.annotate({_STREAM: name})
    return _Annotated({_STREAM: name})


class _Annotated(contextlib.ExitStack):
    """Marks what is exported inside; does nothing anywhere else."""

    def __init__(self, marks: dict[str, str]) -> None:
        super().__init__()
        self._marks = marks

    def __enter__(self) -> _Annotated:
        super().__enter__()
        if torch.compiler.is_exporting() or _torch.is_symbolic_tracing():
            if not traceback.has_preserved_node_meta():  # a nested one would end the outer marks
                self.enter_context(traceback.preserve_node_meta())
            self.enter_context(traceback.annotate(self._marks))
        return self


def stream_of(node: Node) -> str | None:
    """The stream that the code around a node asks for."""
    custom = node.meta.get("custom") or {}
    if _STREAM in custom:
        return str(custom[_STREAM])
    if isinstance(custom.get("stream"), int):
        return torch_stream(custom["stream"])
    scope = _script_scope(node)
    return scope.partition(STREAM_SCOPE)[2].partition("/")[0] or None


def mark_stream(node: Node, name: str) -> None:
    """Note on a node of Dynamo's graph what a `with graft.stream(name):` around it would."""
    node.meta["custom"] = {_STREAM: name, **(node.meta.get("custom") or {})}


def torch_stream(number: Any) -> str:
    """The name of a stream that torch.compile numbered; 0 is the caller's."""
    return f"stream{number}" if number else MAIN


def in_fallback(node: Node) -> bool:
    """Whether a node stands in a `with graft.fallback():`."""
    custom = node.meta.get("custom") or {}
    return custom.get(_KEY) == "fallback" or SCOPE in _script_scope(node)


def forget_foreign(gm: GraphModule) -> None:
    """Take off what Dynamo marks nodes with while marks are kept: what it disabled on the way."""
    for part in gm.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            marks = node.meta.pop("custom", None) or {}
            kept = {key: held for key, held in marks.items() if not key.startswith("_torchdynamo")}
            if kept:
                node.meta["custom"] = kept


def is_marked(gm: GraphModule) -> bool:
    """Whether a graph that somebody traced knows blocks or modules; its code does not show them."""
    keys = {_KEY, _STREAM}
    return any(
        node.meta.get("nn_module_stack") or keys & (node.meta.get("custom") or {}).keys()
        for node in gm.graph.nodes
    )


def scopes_in_source(frames: Iterable[tuple[str, int]]) -> list[str]:
    """What the `with` blocks around these lines (file, line) ask for, as a trace's scope has it."""
    found = [
        scope for file, line in frames for low, high, scope in _blocks(file) if low <= line <= high
    ]
    streams = [scope for scope in found if scope != SCOPE]
    return [SCOPE] * (SCOPE in found) + streams[-1:]


@functools.lru_cache(maxsize=64)
def _blocks(file: str) -> list[tuple[int, int, str]]:
    """The lines of a file's `with ...fallback():` and `with ...stream("name"):` blocks, inner ones
    last; none where it cannot be read."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    return [
        (node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno, scope)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
        if (scope := _scope_of(ast.unparse(item.context_expr)))
    ]


def _scope_of(context: str) -> str:
    if re.search(r"\bfallback\(\)$", context):
        return SCOPE
    named = re.search(r"\bstream\('([\w.-]+)'\)$", context)
    return f"{STREAM_SCOPE}{named[1]}" if named else ""


def modules_of(node: Node) -> list[tuple[str, str]]:
    """The modules around a node, outermost first: path (`layers.0`) and qualified class name."""
    found = []
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        found.append((_plain(path), name))
    scope = _script_scope(node)
    if scope:
        for part in scope.split("/"):
            if not part.startswith((SCOPE, STREAM_SCOPE)):
                path, _, name = part.partition("=")
                found.append((path, name))
    return found


def _plain(path: str) -> str:
    """A path as `named_modules` has it. Dynamo writes `L['self']._modules['layers'].0`."""
    path = re.sub(r"^[LG]\['[^']*'\]\.?", "", path)
    path = re.sub(r"\._modules\['([^']*)'\]|\[(?:'([^']*)'|(\d+))\]", r".\1\2\3", "." + path)
    return path.strip(".")


_LINE = re.compile(r'File "(<torchgraft script[^"]+)", line (\d+)')


def _script_scope(node: Node) -> str:
    """What generated source says of the modules of its line, after ` in `."""
    frames = _LINE.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    file, line = frames[-1]
    return linecache.getline(file, int(line)).rpartition("  # ")[2].partition(" in ")[2].strip()
