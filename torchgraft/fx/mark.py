"""What a node's origin says about it: its modules, and `with graft.fallback():` around it."""

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

_KEY = "torchgraft"
SCOPE = "torchgraft_fallback"
"""How source generated from a TorchScript trace shows a `with graft.fallback():`."""


if TYPE_CHECKING:  # a return type that TorchScript can read would say less

    def fallback() -> contextlib.AbstractContextManager[Any]: ...

else:

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


def _marking() -> contextlib.AbstractContextManager[Any]:
    if torch.compiler.is_dynamo_compiling():
        return traceback.annotate({_KEY: "fallback"})
    return _Fallback()


class _Fallback(contextlib.ExitStack):
    def __enter__(self) -> _Fallback:
        super().__enter__()
        if torch.compiler.is_exporting() or _torch.is_symbolic_tracing():
            self.enter_context(traceback.preserve_node_meta())
            self.enter_context(traceback.annotate({_KEY: "fallback"}))
        return self


def in_fallback(node: Node) -> bool:
    """Whether a node stands in a `with graft.fallback():`."""
    custom = node.meta.get("custom") or {}
    return custom.get(_KEY) == "fallback" or SCOPE in _script_scope(node)


def is_marked(gm: GraphModule) -> bool:
    """Whether a graph that somebody traced knows blocks or modules; its code does not show them."""
    return any(n.meta.get("nn_module_stack") or in_fallback(n) for n in gm.graph.nodes)


def in_source(frames: Iterable[tuple[str, int]]) -> bool:
    """Whether one of these lines (file, line) stands in a `with graft.fallback():`."""
    return any(low <= line <= high for file, line in frames for low, high in _blocks(file))


@functools.lru_cache(maxsize=64)
def _blocks(file: str) -> list[tuple[int, int]]:
    """The lines of a file's `with ...fallback():` blocks; none where it cannot be read."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    return [
        (node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
        if re.search(r"\bfallback\(\)$", ast.unparse(item.context_expr))
    ]


def modules_of(node: Node) -> list[tuple[str, str]]:
    """The modules around a node, outermost first: path (`layers.0`) and qualified class name."""
    found = []
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        found.append((_plain(path), name))
    scope = _script_scope(node)
    if scope:
        for part in scope.split("/"):
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
