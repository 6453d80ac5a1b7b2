"""The modules, parameters and buffers, under the names that the ScriptModule gave them."""

from __future__ import annotations

import itertools
import re
from typing import Any

import torch
from torch import Tensor, nn

from torchgraft import _torch
from torchgraft.errors import UnsupportedScript
from torchgraft.fx import mark
from torchgraft.fx.script.graph import Node, Value, frames_of, is_changed, walk
from torchgraft.fx.script.inline import SCOPE, frozen_scope

Path = tuple[str, ...]

_TAKEN = frozenset(dir(nn.Module()))


class Tree:
    """A module without a forward yet, and which of the graph's values are modules in it.

    Parameters that are nn.Parameters are the ScriptModule's own objects; those of a loaded module
    are bare tensors in Python, and get a Parameter on the same memory.
    """

    def __init__(self, script: Any) -> None:
        self.script = script
        self.paths: dict[int, Path] = {}  # of values that are modules
        self._written: set[tuple[Path | None, str]] = set()
        self._changed: set[tuple[Path | None, str]] = set()
        name = re.sub(r"\W", "_", getattr(script, "original_name", "") or "Script")
        self.root: nn.Module = type(name, (nn.Module,), {})()
        if script is None:
            return
        for path, module in script.named_modules(remove_duplicate=False):
            self._at(_split(path)).training = getattr(module, "training", False)
        parameters = list(script.named_parameters(remove_duplicate=False))
        own = {id(tensor): _parameter(tensor) for _, tensor in parameters}  # tied ones stay tied
        for path, tensor in parameters:
            *scope, leaf = _split(path)
            self._at(scope).register_parameter(_free(leaf), own[id(tensor)])
        for path, tensor in script.named_buffers(remove_duplicate=False):
            *scope, leaf = _split(path)
            self._at(scope).register_buffer(_free(leaf), tensor)

    def bind(self, graph: Any) -> None:
        """Find what each module-valued value is, and make constants of plain attributes."""
        if self.script is not None:
            self.paths[next(graph.inputs()).unique()] = ()
        read = []
        for node in walk(graph):
            owner = self.path_of(next(node.inputs(), None))
            if owner is not None and node.kind() == "prim::SetAttr":
                self._written.add((owner, node.s("name")))
            elif owner is not None and node.kind() == "prim::GetAttr":
                value = self.value(owner, node.s("name"))
                if _torch.is_script_module(value):
                    self.paths[node.output().unique()] = (*owner, node.s("name"))
                elif value is None or isinstance(value, (bool, int, float, str, torch.device)):
                    read.append((node, value))
                elif is_changed(node.output()):
                    self._changed.add((owner, node.s("name")))
        for node, value in read:
            if not self.is_written(node):
                with graph.insert_point_guard(node):
                    node.output().replaceAllUsesWith(graph.insertConstant(value))
                node.destroy()

    def path_of(self, value: Value) -> Path | None:
        """Where a module-valued value is; None for any other value."""
        return None if value is None else self.paths.get(value.unique())

    def scope_of(self, node: Node) -> str:
        """The modules that a node comes from, as `path=Class/...`. `with graft.fallback():` and
        `with graft.stream(...):` that a trace went through are shown last."""
        parts = node.s(SCOPE).split("/") if node.hasAttribute(SCOPE) else frozen_scope(node)
        safe = [re.sub(r"[^\w./=]", "?", part, flags=re.ASCII) for part in parts]
        return "/".join([*safe, *mark.scopes_in_source(frames_of(node))])

    def is_written(self, node: Node) -> bool:
        """Whether the attribute that a node reads is also assigned somewhere."""
        return (self.path_of(node.input()), node.s("name")) in self._written

    def is_state(self, node: Node) -> bool:
        """Whether a call may change the attribute that a node reads, by assignment or in place."""
        return (self.path_of(node.input()), node.s("name")) in self._written | self._changed

    def value(self, path: Path, name: str) -> Any:
        """What an attribute of the ScriptModule is now."""
        module = self.script
        for step in (*path, name):
            module = _torch.script_attribute(module, step)
        return module

    def hold(self, path: Path, name: str) -> Any:
        """Keep an attribute, which may be neither parameter nor buffer; what it is."""
        module, value = self._at(path), self.value(path, name)
        if name in module._parameters or name in module._buffers or name == "training":
            return value
        if isinstance(value, Tensor):
            module.register_buffer(_free(name), value, persistent=False)
        else:
            setattr(module, _free(name), value)
        return value

    def find(self, tensor: Tensor) -> Path:
        """The path of a tensor that a list or the graph holds; nn.LSTM lists its weights so."""
        named = itertools.chain(self.root.named_parameters(), self.root.named_buffers())
        for path, held in named:
            if held is tensor or _same(held, tensor):
                return _split(path)
        names = map("_constant{}".format, itertools.count())
        name = next(name for name in names if not hasattr(self.root, name))
        self.root.register_buffer(name, tensor, persistent=False)
        return (name,)

    def _at(self, path: Path | list[str]) -> nn.Module:
        """The module of a path, made if it is not there yet."""
        module = self.root
        for name in path:
            if name not in module._modules:
                module.add_module(_free(name), nn.Module())
            module = module.get_submodule(name)
        return module


def _split(path: str) -> Path:
    return tuple(path.split(".")) if path else ()


def _free(name: str) -> str:
    """The name, unless it would hide something that nn.Module needs."""
    if name in _TAKEN or name.startswith("__"):
        raise UnsupportedScript("attribute", "", f"the name {name!r} is taken by nn.Module")
    return name


def _parameter(tensor: Tensor) -> nn.Parameter:
    """The tensor itself, or a Parameter on its memory: a user's object is left as it is."""
    if isinstance(tensor, nn.Parameter) and tensor.is_leaf:
        return tensor
    return nn.Parameter(tensor.detach(), tensor.requires_grad)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same elements in memory."""
    return (
        (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        and a.numel() > 0
        and a.data_ptr() == b.data_ptr() != 0
    )
