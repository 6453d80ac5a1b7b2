"""TorchScript front end: a ScriptModule becomes an nn.Module whose forward is Python source.

The source is generated from the IR, so `torch.export` and `torch.compile` trace it like code that
somebody wrote. TorchScript is deprecated upstream; this package is all there is to remove.

`graph` reads the IR, `inline` opens submodules, `tree` holds modules and weights, `branches` tells
what control flow hangs on. The source comes from `writer` (names and expressions), `nodes`
(structure and control flow), `operators` (by the `templates`, which call `runtime`) and `sizes`
(a trace's wrapped numbers).
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchgraft import _torch
from torchgraft.errors import UnsupportedScript
from torchgraft.fx.script import branches, nodes
from torchgraft.fx.script.branches import Branch
from torchgraft.fx.script.graph import Value
from torchgraft.fx.script.inline import inline
from torchgraft.fx.script.tree import Tree
from torchgraft.fx.script.writer import Writer, is_name, pack

__all__ = ["Branch", "Translated", "to_function", "to_module"]

_serial = itertools.count()


@dataclass(frozen=True)
class Translated:
    """The module, its source, and the control flow that a tracer will meet in it.

    The module has the ScriptModule's parameter and buffer names and shares their memory: a change
    in place is seen on both sides. A parameter of a loaded ScriptModule has a gradient of its own.
    A loop that counts to a constant is not in `branches`: it unrolls, whatever the inputs.
    """

    module: nn.Module
    source: str
    branches: tuple[Branch, ...]


def to_module(script: Any) -> Translated:
    """An ordinary module that computes what the ScriptModule (or ScriptFunction) computes.

    `training` and other plain attributes are read now and are constants from here on. Sizes in
    a trace are computed as Python numbers, so what the trace kept dynamic stays dynamic.

    >>> double = torch.jit.trace(lambda x: x + x, torch.ones(1))
    >>> to_module(double).module(torch.ones(1))
    tensor([2.])
    """
    function = isinstance(script, torch.jit.ScriptFunction)
    if not function and not hasattr(script, "forward"):
        name = getattr(script, "original_name", type(script).__name__)
        raise UnsupportedScript(name, "", "it has no forward; script a module that calls it")
    graph = _torch.script_graph(script, inline)
    tree = Tree(None if function else script)
    tree.bind(graph)
    _torch.fold_script(graph)
    inputs = list(zip(graph.inputs(), _torch.script_schema(script).arguments, strict=True))
    writer = Writer(tree)
    source = _forward(writer, graph, inputs if function else inputs[1:])
    _load(source, writer)
    return Translated(tree.root, source, branches.find(graph, tree))


def to_function(graph: Any) -> Callable[..., Any]:
    """The function that a graph without a module computes, its arguments by position."""
    writer = Writer(Tree(None))
    given = []
    for value in graph.inputs():
        name = writer.name(value.debugName())
        writer.names[value.unique()] = name
        given.append(name)
    if nodes.write(writer, graph):
        writer.emit(f"return {pack([writer.ref(out) for out in graph.outputs()])}")
    source = f"def forward({', '.join(['self', *given])}):\n" + "\n".join(writer.lines) + "\n"
    _load(source, writer)
    function: Callable[..., Any] = writer.tree.root.forward
    return function


def _forward(writer: Writer, graph: Any, inputs: list[tuple[Value, Any]]) -> str:
    """The source of forward, with the argument names and defaults of the original."""
    given, renamed = ["self"], {"self": "self"}
    for index, (value, argument) in enumerate(inputs):
        name = argument.name if is_name(argument.name) else f"argument{index}"
        name = f"{name}_{index}" if name in renamed else name
        renamed[name] = writer.names[value.unique()] = writer.name(name)
        default = argument.has_default_value()
        given.append(f"{name}={writer.literal(argument.default_value)}" if default else name)
    if nodes.write(writer, graph):
        (result,) = graph.outputs()
        writer.emit(f"return {writer.ref(result)}")
    header, body = f"def forward({', '.join(given)}):\n", "\n".join(writer.lines) + "\n"
    if all(name == inside for name, inside in renamed.items()):
        return header + body
    run = writer.name("run")  # an argument hides a name that the body needs
    return (
        f"{header}    return {run}({', '.join(renamed)})\n\n\n"
        f"def {run}({', '.join(renamed.values())}):\n{body}"
    )


def _load(source: str, writer: Writer) -> None:
    """Make the source the tree's forward, and show it in tracebacks."""
    root = type(writer.tree.root)
    file = f"<torchgraft script {root.__name__} {next(_serial)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), writer.namespace)
    root.forward = writer.namespace.pop("forward")
