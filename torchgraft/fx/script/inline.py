"""Calls of submodules inlined, so that every node knows which modules it came from."""

from __future__ import annotations

import itertools
import re
from typing import Any

from torchgraft import _torch
from torchgraft.fx.script.graph import walk

SCOPE = "torchgraft_scope"
"""The attribute of a node that has its modules: `path=Class/path.path=Class`."""


def inline(graph: Any, module: Any, path: str = "", scope: str = "") -> None:
    """Inline the calls of submodules' methods; each node that this brings in gets its `SCOPE`.

    A trace has scopes of its own, which it loses when it is saved; this holds for all.
    """
    held = {next(graph.inputs()).unique(): (module, path, scope)}
    for node in list(walk(graph)):
        owner = held.get(next(node.inputs()).unique()) if node.inputsSize() else None
        if owner is None or node.kind() not in ("prim::GetAttr", "prim::CallMethod"):
            continue
        name = node.s("name")
        if node.kind() == "prim::GetAttr":
            value = _torch.script_attribute(owner[0], name)
            if _torch.is_script_module(value):
                inner = getattr(value, "_c", value)
                where = f"{owner[1]}.{name}".strip(".")
                text = f"{owner[2]}/{where}={_class(inner)}".strip("/")
                held[node.output().unique()] = (inner, where, text)
        elif owner[0]._has_method(name):
            callee = owner[0]._get_method(name).graph.copy()
            inline(callee, *owner)
            for made in walk(callee):
                if owner[2] and not made.hasAttribute(SCOPE):
                    made.s_(SCOPE, owner[2])
            with graph.insert_point_guard(node):
                results = graph.insertGraph(callee, list(node.inputs()))
            for old, new in zip(node.outputs(), results, strict=True):
                old.replaceAllUsesWith(new)
            node.destroy()


def frozen_scope(node: Any) -> list[str]:
    """The modules of a node that `torch.jit.freeze` inlined, as far as torch remembers them: the
    names of classes are not qualified, and paths of what was scripted lack containers such as a
    ModuleList. A file remembers nothing."""
    known = re.findall(r"(\w+)\((\w+)\)", node.getModuleHierarchy())
    known = [(name, kind) for name, kind in known if name != "UNKNOWN_INSTANCE"]
    traced = [path.removeprefix("__module.") for path in node.scopeName().split("/") if path]
    paths = (
        traced
        if len(traced) == len(known)
        else itertools.accumulate((name for name, _ in known), "{}.{}".format)
    )
    return [f"{path}=?.{kind}" for path, (_, kind) in zip(paths, known, strict=True)]


def _class(module: Any) -> str:
    """The qualified name of the Python class that a ScriptModule was made of."""
    parts = module._type().qualified_name().split(".")
    return ".".join(p for p in parts if p != "__torch__" and not p.startswith("___torch_mangle"))
