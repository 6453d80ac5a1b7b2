"""A hash of what a Python object does: its code, and everything that its code reaches.

Equal fingerprints mean the same behaviour; a comment or a moved line changes nothing. What torch,
torchgraft and the standard library define counts by name: their versions are in the key as well.
What cannot be told apart for sure raises `Unknowable`, and then nothing is cached.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import hashlib
import importlib
import inspect
import logging
import pathlib
import re
import struct
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from torchgraft import _torch
from torchgraft.op.define import Op


class Unknowable(Exception):
    """An object whose behaviour has no fingerprint."""


def fingerprint(value: Any) -> str:
    """The hash of an object's behaviour."""
    walk = _Walk()
    try:
        walk.visit(value, 0)
    except RecursionError:
        raise Unknowable("it reaches too far") from None
    return walk.digest.hexdigest()


_DEEPEST = 200
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice)
_CONTENT = (int, float, complex, str, bytes, tuple, list, dict, set, frozenset)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, pathlib.PurePath)
_METHODS = (types.WrapperDescriptorType, types.MethodDescriptorType)
_CACHES = type(functools.cache(len))


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
        if type(value) in _PLAIN:
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
        elif isinstance(value, enum.Enum) and _is_known_class(type(value)):
            self.say(type(value).__module__, str(value))
        elif isinstance(value, logging.Logger):
            self.say(value.name)
        elif isinstance(value, re.Pattern):
            self.say(value.pattern, value.flags)
        elif _torch.is_op(value) or _torch.is_packet(value) or _torch.is_higher_order(value):
            self.say(str(value))
        elif isinstance(value, types.BuiltinFunctionType):
            self.say(value.__module__, value.__qualname__)
            return value.__module__ is not None and _is_known(value.__module__)
        elif isinstance(value, _METHODS):
            self.say(value.__qualname__)
            return _is_known_class(value.__objclass__)
        elif isinstance(value, types.ModuleType):
            self.say(value.__name__)
            return _is_known(value.__name__)
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
            yield (value.__defaults__, value.__kwdefaults__, value.__dict__)
            yield getattr(value, "__annotate__", None) or value.__annotations__
            for cell in value.__closure__ or ():
                yield _content(cell)
            yield from _reached(value)
        elif (parts := _torch.parts_of_custom_op(value)) is not None:
            yield from parts
        elif isinstance(value, Op):
            yield from (value.schema, value.reference, value.fake_fn)
        elif isinstance(value, types.BuiltinFunctionType):
            yield value.__self__
        elif isinstance(value, _METHODS):
            yield value.__objclass__
        elif isinstance(value, types.ModuleType):
            self.say(*((one.__name__, _file(one)) for one in _modules(value)))
        elif isinstance(value, types.MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, _CACHES):
            yield value.__wrapped__
        elif isinstance(value, functools.cached_property):
            yield value.func  # it has a lock of its own, too
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords, value.__dict__)
        elif isinstance(value, (staticmethod, classmethod)):
            yield value.__func__
        elif isinstance(value, property):
            yield from (value.fget, value.fset, value.fdel)
        elif isinstance(value, types.MappingProxyType):
            yield dict(value)
        elif isinstance(value, (types.GenericAlias, types.UnionType)):
            yield from (getattr(value, "__origin__", None), value.__args__)
        elif isinstance(value, type):
            yield from self._class(value)
        else:
            yield from self._object(value)

    def _code(self, code: types.CodeType) -> Iterator[Any]:
        self.say(code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags)
        self.say(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        self.say(getattr(code, "co_exceptiontable", b""))  # Python 3.10 has it in the code
        yield from code.co_consts

    def _class(self, cls: type) -> Iterator[Any]:
        self.say(cls.__module__, cls.__qualname__)
        yield (type(cls), cls.__bases__)
        for name, held in vars(cls).items():
            if name not in _OWN and not isinstance(held, _SLOTS):
                self.say(name)
                yield held

    def _object(self, value: Any) -> Iterator[Any]:
        """What an object holds: its content, its attributes, and what its class does."""
        cls = type(value)
        content = next((kind for kind in _CONTENT if isinstance(value, kind)), None)
        slots = {name: held for c in cls.__mro__ for name, held in vars(c).items()
                 if isinstance(held, types.MemberDescriptorType)}  # fmt: skip
        if content in (set, frozenset):
            yield sorted(fingerprint(part) for part in value)
        elif content is dict:
            yield from (part for item in dict.items(value) for part in item)
            yield getattr(value, "default_factory", None)
        elif content in (list, tuple):
            yield from content.__iter__(value)
        elif content is not None:
            self.say(content.__repr__(value))
        elif _has_more(cls, len(slots)):
            if not _is_pickled(value):
                raise Unknowable(f"a {cls.__name__} cannot be told from another")
            yield value.__reduce__()
            return
        if cls is content:
            return
        yield cls
        state = getattr(value, "__dict__", {})
        yield {key: held for key, held in state.items() if not _is_cache(cls, key)}
        for name, slot in slots.items():
            with contextlib.suppress(AttributeError):  # it was never set
                yield (name, slot.__get__(value))


_OWN = {"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__firstlineno__"}
_OWN |= {"__static_attributes__", "__annotations__", "__annotate_func__", "__abstractmethods__"}
_OWN |= {"_abc_impl", "__slots__", "__parameters__", "__orig_bases__"}
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def _has_more(cls: type, slots: int) -> bool:
    """Whether objects of a class hold something that is neither in `__dict__` nor in a slot, as
    those of classes in C do."""
    places = slots + sum(offset > 0 for offset in (cls.__dictoffset__, cls.__weakrefoffset__))
    size = object.__basicsize__ + places * struct.calcsize("P")
    return cls.__basicsize__ > size or cls.__itemsize__ > 0 or not (cls.__dictoffset__ or slots)


def _is_pickled(value: Any) -> bool:
    """Whether a class of Python itself says what an object of it holds."""
    said: Any = type(value).__reduce__
    if isinstance(value, Iterator) or said is object.__reduce__:
        return False
    return _is_known_class(type(value))


def _is_cache(cls: type, name: str) -> bool:
    """Whether an attribute is what a property of torchgraft or torch has computed."""
    held = inspect.getattr_static(cls, name, None)
    return isinstance(held, functools.cached_property) and _is_known_class(cls)


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


def _modules(module: types.ModuleType) -> list[types.ModuleType]:
    """A module and those that it, and they, took something from: it hangs on all their files."""
    found: dict[str, types.ModuleType] = {}
    left = [module]
    while left:
        one = left.pop()
        if _is_known(one.__name__) or one.__name__ in found:
            continue
        found[one.__name__] = one
        for held in list(vars(one).values()):
            if isinstance(held, (types.FunctionType, type)):
                held = sys.modules.get(held.__module__ or "")
            if isinstance(held, types.ModuleType):
                left.append(held)
    return [found[name] for name in sorted(found)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "empty"


_BLIND = {
    "a name that is made up as it runs": ("eval", "exec", "globals", "locals", "__import__"),
    "a file": ("open", "input"),
}
_BLIND_ATTRIBUTES = {
    "a module that is named as it runs": ("import_module",),
    "the environment": ("environ", "getenv"),
    "a file": ("read_text", "read_bytes"),
}


def _reached(fn: types.FunctionType) -> Iterator[Any]:
    """The globals that a function names, what it imports, and what it may take from modules."""
    names: set[str] = set()
    for code in _codes(fn.__code__):
        names |= {*code.co_names}
        for step in dis.get_instructions(code):
            if step.opname == "IMPORT_NAME":
                yield from _taken(_import(fn, code, step.argval), {*code.co_names}, set())
            elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval not in fn.__globals__:
                _look(fn, step.argval, _BLIND)
    for name in sorted(names):
        _look(fn, name, _BLIND_ATTRIBUTES)
        if name in fn.__globals__:
            yield name
            yield from _taken(fn.__globals__[name], names, set())


def _look(fn: types.FunctionType, name: str, blind: Mapping[str, Sequence[str]]) -> None:
    for what, by in blind.items():
        if name in by:
            raise Unknowable(f"{fn.__qualname__} reads {what} ({name})")


def _import(fn: types.FunctionType, code: types.CodeType, name: str) -> Any:
    """The module that an import inside a function gives; it is imported as the function would."""
    home = fn.__globals__.get("__package__") or ""
    levels = [held for held in code.co_consts if type(held) is int and held > 0]
    for full in (name, *(f"{'.' * level}{name}" for level in levels if home)):
        with contextlib.suppress(ImportError):
            return importlib.import_module(full, home or None)
    raise Unknowable(f"{fn.__qualname__} imports {name}, which is not there")


def _taken(held: Any, names: Set[str], seen: set[int]) -> Iterator[Any]:
    """A value; of a module also what it has under these names, and so on."""
    yield held
    if isinstance(held, types.ModuleType) and not _is_known(held.__name__) and id(held) not in seen:
        seen.add(id(held))
        for name in sorted(names & vars(held).keys()):
            yield from _taken(vars(held)[name], names, seen)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for held in code.co_consts:
        if isinstance(held, types.CodeType):
            yield from _codes(held)


def tensor(value: Tensor) -> str:
    """The hash of a tensor's type and content."""
    from torchgraft.package.tensors import bytes_of

    kind = f"{value.dtype} {tuple(value.shape)} {value.layout} {value.device}"
    if value.layout != torch.strided or value.is_quantized:
        raise Unknowable(f"a tensor of {value.layout} has no bytes to compare")
    digest = hashlib.sha256(f"{kind} {value.stride()}".encode())
    digest.update(bytes_of(value))
    return digest.hexdigest()
