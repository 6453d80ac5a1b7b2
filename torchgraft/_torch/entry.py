"""Kernels of a generated module that follow one another, behind one call; what lies between them in
one piece of memory, which is kept from call to call. torch 2.11 to 2.13."""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchgraft._torch import Flat

KEPT = 1 << 26
"""Bytes between kernels that a program keeps. The system takes longer to give memory, page by page,
than many kernels take to fill it; with more there is more to do, too."""
_ALIGN = 64  # as torch's own memory
_BYTES = "uint8_t*"
_CALL, _RUN, _MEMORY, _POOL, _TABLE = (
    f"_joined{name}" for name in ("", "_run", "_memory", "_pool", "_kernels")
)  # no input is called so


@dataclasses.dataclass(frozen=True)
class Run:
    """Kernels that are called one after the other: their numbers, and what each is given."""

    count: int  # of arguments
    calls: tuple[tuple[int, tuple[str, ...]], ...]

    @property
    def types(self) -> tuple[str, ...]:
        return ("int64_t", *(_BYTES,) * self.count)

    @property
    def source(self) -> str:
        """A function in C++; its first argument is where the kernels are. All of theirs are
        addresses, of whatever."""
        params = ", ".join(f"{_BYTES} arg{i}" for i in range(self.count))
        params = ", ".join(filter(None, ("int64_t at", params)))
        lines = (
            f"    reinterpret_cast<void (*)({', '.join([_BYTES] * len(given))})>"
            f"(kernels[{number}])({', '.join(given)});"
            for number, given in self.calls
        )
        start = "    const auto kernels = reinterpret_cast<const uintptr_t*>(at);"
        return "\n".join(
            ["#include <cstdint>", f'extern "C" void kernel({params})', "{", start, *lines, "}\n"]
        )


@dataclasses.dataclass(frozen=True)
class Entry:
    """What takes the place of a module's `call`: its runs, and a function in Python."""

    runs: tuple[Run, ...]
    text: str

    def define(
        self,
        scope: dict[str, Any],
        runs: Sequence[Callable[..., None]],
        kernels: Sequence[Callable[..., None]],
    ) -> None:
        """Put the function into the namespace of a module."""
        scope |= {f"{_RUN}{i}": run for i, run in enumerate(runs)}
        table = (ctypes.c_void_p * len(kernels))(*map(_address, kernels))
        scope |= {_TABLE: ctypes.addressof(table), f"{_TABLE}_held": table, _POOL: []}
        exec(compile(self.text, scope.get("__file__", "<joined>"), "exec"), scope)


def _address(kernel: Any) -> int | None:
    """Where the function in C++ begins that one of Python calls."""
    function = getattr(ctypes.CDLL(kernel.__self__.__file__), kernel.__name__)
    return ctypes.cast(function, ctypes.c_void_p).value


def joined(call: Flat) -> Flat:
    """What takes the place of a generated module's `call`, or that."""
    scope: dict[str, Any] = getattr(call, "__globals__", {})
    found: Flat | None = scope.get(_CALL)
    return found if found is not None and scope.get("call") == call else call


def read(module: str, kernels: Mapping[str, Sequence[str]]) -> Entry | None:
    """What a module does, with its kernels in runs, given its text and the types of their
    arguments. None where that would change nothing."""
    functions = [
        node
        for node in ast.walk(ast.parse(module))
        if isinstance(node, ast.FunctionDef) and node.name == "call"
    ]
    if len(functions) != 1 or any(_is_method(node) for node in ast.walk(functions[0])):
        return None
    return _Reader(kernels).read(functions[0])


def _is_method(node: ast.AST) -> bool:
    """Whether a call needs the object that it is a method of."""
    return isinstance(node, ast.Name) and node.id == "self"


class _Unread(Exception):
    """What is not understood, and stays as it is."""


@dataclasses.dataclass(frozen=True)
class _Value:
    """A tensor: elements from the beginning of an input, a constant or a buffer; and from that of
    what it is called where it is used."""

    root: str
    offset: int = 0
    name: str = ""
    more: int = 0


@dataclasses.dataclass
class _Buffer:
    """Memory that the module asks for, and the first and the last kernel that has it."""

    size: int
    first: int = -1
    last: int = -1
    place: int = 0


@dataclasses.dataclass
class _Calls:
    """Calls of kernels, what must come before them, and what may come after."""

    before: list[ast.stmt] = dataclasses.field(default_factory=list)
    calls: list[tuple[str, list[_Value]]] = dataclasses.field(default_factory=list)
    after: list[ast.stmt] = dataclasses.field(default_factory=list)


class _Reader:
    def __init__(self, kernels: Mapping[str, Sequence[str]]) -> None:
        self.kernels = kernels
        self.numbers = {name: number for number, name in enumerate(kernels)}
        self.values: dict[str, _Value] = {}
        self.buffers: dict[str, _Buffer] = {}
        self.fixed: set[str] = set()  # roots that others than kernels may see
        self.parts: list[_Calls | ast.stmt] = []
        self.count = 0

    def read(self, function: ast.FunctionDef) -> Entry | None:
        for statement in function.body:
            try:
                self._understand(statement)
            except _Unread:
                self._leave(statement)
        held = {name: b for name, b in self.buffers.items() if name not in self.fixed}
        held = {name: b for name, b in held.items() if b.first >= 0 and b.size}
        runs = [part for part in self.parts if isinstance(part, _Calls) and part.calls]
        if not held and all(len(run.calls) < 2 for run in runs):
            return None
        return _Writer(self, held).written(_placed(list(held.values())))

    @property
    def _calls(self) -> _Calls:
        if not self.parts or not isinstance(self.parts[-1], _Calls):
            self.parts.append(_Calls())
        last = self.parts[-1]
        assert isinstance(last, _Calls)
        return last

    def _understand(self, node: ast.stmt) -> None:
        match node:
            case ast.Delete():
                self._calls.after.append(node)
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=args, keywords=[])):
                self._call(name, args)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._assign(name, value)
                self._calls.before.append(node)
            case _:
                raise _Unread

    def _assign(self, name: str, value: ast.expr) -> None:
        match value:
            case ast.Call(func=ast.Name(id="empty_strided_cpu"), args=[size, stride, dtype]):
                self.buffers[name] = _Buffer(_bytes(size, stride, dtype))
                self.values[name] = _Value(name)
            case _:
                self.values[name] = self._value(value)

    def _value(self, node: ast.expr) -> _Value:
        match node:
            case ast.Name(id=name):
                value = self.values.get(name, _Value(name))
                return _Value(value.root, value.offset, name)
            case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[base, _, _, offset]):
                value, more = self._value(base), _literal(offset)
                return _Value(value.root, value.offset + more, value.name, value.more + more)
        raise _Unread

    def _call(self, name: str, args: Sequence[ast.expr]) -> None:
        if not all(_item(kind) for kind in self.kernels.get(name, [""])):
            raise _Unread
        values = [self._value(arg) for arg in args]
        for value in values:
            if buffer := self.buffers.get(value.root):
                buffer.first = self.count if buffer.first < 0 else buffer.first
                buffer.last = self.count
        self._calls.calls.append((name, values))
        self.count += 1

    def _leave(self, node: ast.stmt) -> None:
        """Keep a statement, and all that it names as it is."""
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                self.fixed.add(self.values.get(part.id, _Value(part.id)).root)
                if isinstance(part.ctx, ast.Store):
                    self.values.pop(part.id, None)
        self.parts.append(node)


class _Writer:
    def __init__(self, found: _Reader, held: Mapping[str, _Buffer]) -> None:
        self.found, self.held = found, held
        self.runs: list[Run] = []

    def written(self, total: int) -> Entry:
        lines = [line for part in self.found.parts for line in self._lines(part)]
        fresh = f"{_MEMORY} = empty_strided_cpu(({total},), (1,), torch.uint8)"
        start = [fresh] if total else []
        if 0 < total <= KEPT:
            start = ["try:", f"    {_MEMORY} = {_POOL}.pop()", "except IndexError:", f"    {fresh}"]
            lines.insert(-1, f"{_POOL}.append({_MEMORY})")  # before they are returned
        return Entry(tuple(self.runs), "\n    ".join([f"def {_CALL}(args):", *start, *lines]))

    def _lines(self, part: _Calls | ast.stmt) -> Iterator[str]:
        if isinstance(part, ast.stmt):
            yield from ast.unparse(part).splitlines()
            return
        yield from map(ast.unparse, filter(self._stays, part.before))
        if part.calls:
            yield self._run(part.calls)
        for node in part.after:
            assert isinstance(node, ast.Delete)
            names = [ast.unparse(name) for name in node.targets]
            if left := [name for name in names if self._root(name) not in self.held]:
                yield f"del {', '.join(left)}"

    def _root(self, name: str) -> str:
        return self.found.values.get(name, _Value(name)).root

    def _stays(self, node: ast.stmt) -> bool:
        assert isinstance(node, ast.Assign)
        return self._root(ast.unparse(node.targets[0])) not in self.held

    def _run(self, calls: Sequence[tuple[str, list[_Value]]]) -> str:
        values = [value for _, values in calls for value in values]
        outer = dict.fromkeys(value.name for value in values if value.root not in self.held)
        inner = [_MEMORY] if any(value.root in self.held for value in values) else []
        names = {name: f"arg{i}" for i, name in enumerate((*inner, *outer))}

        def pointer(value: _Value, kind: str) -> str:
            if buffer := self.held.get(value.root):
                at, offset = f"{names[_MEMORY]} + {buffer.place}", value.offset
            else:
                at, offset = names[value.name], value.more
            return f"{at} + {offset * _item(kind)}"

        kinds = self.found.kernels
        told = tuple(
            (self.found.numbers[name], tuple(map(pointer, values, kinds[name])))
            for name, values in calls
        )
        self.runs.append(Run(len(names), told))
        return f"{_RUN}{len(self.runs) - 1}({', '.join([_TABLE, *names])})"


def _placed(buffers: Sequence[_Buffer]) -> int:
    """Give each buffer its place in one piece of memory, whose size it is."""
    total, done = 0, list[_Buffer]()
    for buffer in sorted(buffers, key=lambda b: -b.size):
        taken = (b for b in done if b.first <= buffer.last and buffer.first <= b.last)
        for other in sorted(taken, key=lambda b: b.place):
            if buffer.place + buffer.size <= other.place:
                break
            buffer.place = max(buffer.place, _aligned(other.place + other.size))
        done.append(buffer)
        total = max(total, buffer.place + buffer.size)
    return total


def _item(kind: str) -> int:
    """Bytes between elements of an argument; 0 where it is none of memory."""
    if not kind.endswith("*"):
        return 0
    from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP

    name = kind.removeprefix("const ").removesuffix("*").strip()
    return next((dtype.itemsize for dtype, text in DTYPE_TO_CPP.items() if text == name), 0)


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:  # a symbol
        raise _Unread from error


def _bytes(size: ast.expr, stride: ast.expr, dtype: ast.expr) -> int:
    sizes, strides = _literal(size), _literal(stride)
    if not isinstance(dtype, ast.Attribute):
        raise _Unread
    span: int = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    held: torch.dtype = getattr(torch, dtype.attr)
    return (span if math.prod(sizes) else 0) * held.itemsize


def _aligned(place: int) -> int:
    return -(-place // _ALIGN) * _ALIGN
