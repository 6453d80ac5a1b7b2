"""A hash of what a Python object does: its code, and everything that its code reaches.

Equal fingerprints mean the same behaviour; a comment or a moved line changes nothing. What torch,
torchgraft and the standard library define counts by name: their versions are in the key as well.
What cannot be told apart for sure raises `Unknowable`, and then nothing is cached.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import logging
import pathlib
import re
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchgraft import _torch


class Unknowable(Exception):
    """An object whose behaviour has no fingerprint."""


def fingerprint(value: Any) -> str:
    """The hash of an object's behaviour."""
    walk = _Walk()
    walk.visit(value, 0)
    return walk.digest.hexdigest()


_DEEPEST = 200
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, pathlib.PurePath)


class _Walk:
    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.seen: dict[int, int] = {}
        self.kept: list[Any] = []

    def say(self, *texts: object) -> None:
        for text in texts:
            data = repr(text).encode()
            self.digest.update(b"%d:" % len(data) + data)

    def visit(self, value: Any, depth: int) -> None:
        if depth > _DEEPEST:
            raise Unknowable("it reaches too far")
        if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
            return self.say(type(value).__name__, value)
        if isinstance(value, _NAMED):
            return self.say(type(value).__name__, str(value))
        if id(value) in self.seen:
            return self.say("again", self.seen[id(value)])
        self.seen[id(value)] = len(self.seen)
        self.kept.append(value)
        self.say(type(value).__qualname__)
        if not self._leaf(value):
            for part in self._parts(value):
                self.visit(part, depth + 1)
        return None

    def _leaf(self, value: Any) -> bool:
        """Tell an object that is known by a name or by its bytes."""
        if isinstance(value, Tensor):
            self.say(tensor(value))
        elif isinstance(value, enum.Enum):
            self.say(type(value).__module__, str(value))
        elif isinstance(value, logging.Logger):
            self.say(value.name)
        elif isinstance(value, re.Pattern):
            self.say(value.pattern, value.flags)
        elif _torch.is_op(value) or _torch.is_packet(value) or _torch.is_higher_order(value):
            self.say(str(value))
        elif isinstance(value, (types.BuiltinFunctionType, types.WrapperDescriptorType)):
            self.say(getattr(value, "__module__", None), value.__qualname__)
        elif isinstance(value, types.ModuleType):
            self.say(value.__name__)
            if not _is_known(value.__name__):
                self.say(_file(value))
        elif isinstance(value, type) and _is_known_class(value):
            self.say(value.__module__, value.__qualname__)
        elif isinstance(value, types.FunctionType) and _is_known_file(value.__code__.co_filename):
            self.say(value.__code__.co_filename, value.__qualname__, value.__code__.co_firstlineno)
            return not value.__closure__ and not value.__defaults__
        else:
            return False
        return True

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, types.CodeType):
            yield from self._code(value)
        elif isinstance(value, types.FunctionType):
            yield value.__code__
            yield (value.__defaults__, value.__kwdefaults__)
            for cell in value.__closure__ or ():
                yield _content(cell)
            yield from _reached(value)
        elif isinstance(value, types.MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, (staticmethod, classmethod)):
            yield value.__func__
        elif isinstance(value, property):
            yield from (value.fget, value.fset, value.fdel)
        elif isinstance(value, (list, tuple)):
            yield from value
        elif isinstance(value, (dict, types.MappingProxyType)):
            yield from (part for item in value.items() for part in item)
        elif isinstance(value, (set, frozenset)):
            yield sorted(fingerprint(part) for part in value)
        elif isinstance(value, type):
            yield from self._class(value)
        else:
            yield from self._object(value)

    def _code(self, code: types.CodeType) -> Iterator[Any]:
        self.say(code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags)
        yield from code.co_consts

    def _class(self, cls: type) -> Iterator[Any]:
        self.say(cls.__module__, cls.__qualname__)
        yield cls.__bases__
        for name, held in vars(cls).items():
            if name not in _OWN and not isinstance(held, _SLOTS):
                self.say(name)
                yield held

    def _object(self, value: Any) -> Iterator[Any]:
        state = getattr(value, "__dict__", None)
        names = [s for c in type(value).__mro__ for s in vars(c).get("__slots__", ())]
        if state is None and not names:
            raise Unknowable(f"a {type(value).__name__} cannot be told from another")
        yield type(value)
        yield {key: held for key, held in (state or {}).items() if not _is_cache(type(value), key)}
        yield [getattr(value, name) for name in names if hasattr(value, name)]


_OWN = {"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__firstlineno__"}
_OWN |= {"__static_attributes__", "__annotations__", "__annotate_func__", "__abstractmethods__"}
_OWN |= {"_abc_impl", "__slots__", "__parameters__", "__orig_bases__"}
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def _is_cache(cls: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(cls, name, None), functools.cached_property)


def _is_known(module: str | None) -> bool:
    """Whether a module is part of Python, torch or torchgraft."""
    top = (module or "builtins").partition(".")[0]
    return top in ("torch", "torchgraft", "builtins") or top in sys.stdlib_module_names - {
        "__main__"
    }


def _is_known_class(cls: type) -> bool:
    """Whether a class is the one that a known module has under its name."""
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is cls and _is_known(cls.__module__)


@functools.cache
def _is_known_file(path: str) -> bool:
    """Whether a function's code is part of Python, torch or torchgraft; names could be borrowed."""
    import torchgraft

    homes = [pathlib.Path(str(module.__file__)).parent for module in (torch, torchgraft)]
    standard = pathlib.Path(sysconfig.get_path("stdlib"))
    parents = pathlib.Path(path).parents
    inside = standard in parents and not any(p.name == "site-packages" for p in parents)
    return inside or any(home in parents for home in homes)


def _file(module: types.ModuleType) -> str:
    path = getattr(module, "__file__", None)
    if path is None:
        return "no file"
    try:
        return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    except OSError:
        raise Unknowable(f"the source of module {module.__name__} cannot be read") from None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "empty"


def _reached(fn: types.FunctionType) -> Iterator[Any]:
    """The globals that a function names, and what it may take from modules among them."""
    names = sorted(_names(fn.__code__))
    for name in names:
        if name in fn.__globals__:
            held = fn.__globals__[name]
            yield name
            yield held
            if isinstance(held, types.ModuleType) and not _is_known(held.__name__):
                yield from (vars(held)[inner] for inner in names if inner in vars(held))


def _names(code: types.CodeType) -> set[str]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def tensor(value: Tensor) -> str:
    """The hash of a tensor's type and content."""
    from torchgraft.package.tensors import bytes_of

    kind = f"{value.dtype} {tuple(value.shape)} {value.layout} {value.device}"
    if value.layout != torch.strided or value.is_quantized:
        raise Unknowable(f"a tensor of {value.layout} has no bytes to compare")
    digest = hashlib.sha256(f"{kind} {value.stride()}".encode())
    digest.update(bytes_of(value))
    return digest.hexdigest()
