"""All kernels of a generated module behind one call. torch 2.11 to 2.13."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchgraft._torch import Flat

MOST = 16
"""Kernels behind one call: they share a source, for which there is one compiler."""
MEMORY = 1 << 24
"""Bytes between them. With more, the calls that are saved are nothing beside the work."""
_ALIGN = 64  # as torch's own memory


@dataclasses.dataclass(frozen=True)
class Entry:
    """A function in C++ that calls the kernels of a module in its order, and one in Python that
    calls it in place of the module's `call`: memory between kernels is one piece."""

    count: int  # of arguments
    calls: tuple[tuple[str, str], ...]  # names of kernels, and what they are given
    text: str

    @property
    def types(self) -> tuple[str, ...]:
        return (_BYTES,) * self.count

    def source(self, functions: Mapping[str, str]) -> str:
        """The function in C++, where each kernel is a function of that name."""
        params = ", ".join(f"{_BYTES} arg{i}" for i in range(self.count))
        lines = (f"    {functions[name]}({given});" for name, given in self.calls)
        return "\n".join(
            ["#include <cstdint>", f'extern "C" void kernel({params})', "{", *lines, "}\n"]
        )

    def define(self, scope: dict[str, Any], kernel: Callable[..., None]) -> None:
        """Put the function in Python into the namespace of a module."""
        scope[_KERNEL] = kernel
        exec(compile(self.text, scope.get("__file__", "<joined>"), "exec"), scope)


_BYTES = "uint8_t*"
_KERNEL, _CALL, _MEMORY = "_joined_kernel", "_joined", "_joined_memory"  # no input is called so


def joined(call: Flat) -> Flat:
    """What takes the place of a generated module's `call`, or that."""
    scope: dict[str, Any] = getattr(call, "__globals__", {})
    found: Flat | None = scope.get(_CALL)
    return found if found is not None and scope.get("call") == call else call


def read(module: str, kernels: Mapping[str, Sequence[str]]) -> Entry | None:
    """One call for a module's kernels, given its text and the types of their arguments. None where
    it does more than call them: what libraries compute, sizes that are not known, partitions."""
    if not 2 <= len(kernels) <= MOST:
        return None
    try:
        return _Reader(kernels).read(_function(ast.parse(module)))
    except _Unread:
        return None


class _Unread(Exception):
    """A statement that is none of those that are understood."""


@dataclasses.dataclass(frozen=True)
class _Value:
    """A tensor: elements from the beginning of an input, a constant or a buffer."""

    root: str
    offset: int = 0


@dataclasses.dataclass
class _Buffer:
    """Memory that the module asks for, and the first and the last kernel that has it."""

    made: str
    size: int
    first: int = -1
    last: int = -1
    place: int = 0


def _function(module: ast.Module) -> ast.FunctionDef:
    found = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef) and node.name == "call"
    ]
    if len(found) != 1:
        raise _Unread
    return found[0]


class _Reader:
    def __init__(self, kernels: Mapping[str, Sequence[str]]) -> None:
        self.kernels = kernels
        self.head: list[str] = []
        self.inputs: set[str] = set()
        self.values: dict[str, _Value] = {}
        self.texts: dict[str, str] = {}  # of values, in Python
        self.buffers: dict[str, _Buffer] = {}
        self.calls: list[tuple[str, list[_Value]]] = []
        self.returned: str | None = None
        self.outputs: set[str] = set()

    def read(self, function: ast.FunctionDef) -> Entry:
        for statement in function.body:
            self._statement(statement)
        if self.returned is None or len(self.calls) < 2:
            raise _Unread
        return self._written(self._placed())

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Delete():
                pass
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="args")):
                self.inputs |= {_name(name) for name in names}
                self.head.append(ast.unparse(node))
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="args")))):
                self.head.append(ast.unparse(node))
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=args, keywords=[])):
                if name in self.kernels:
                    self._call(name, args)
                elif name.startswith("assert_") and _name(args[0]) in self.inputs:
                    self.head.append(ast.unparse(node))
                else:
                    raise _Unread
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._assign(name, value)
            case ast.Return(value=ast.Tuple(elts=values)):
                self.returned = f"({''.join(f'{self._result(value)}, ' for value in values)})"
            case _:
                raise _Unread

    def _assign(self, name: str, value: ast.expr) -> None:
        match value:
            case ast.Call(func=ast.Name(id="empty_strided_cpu"), args=[size, stride, dtype]):
                self.buffers[name] = _Buffer(ast.unparse(value), _bytes(size, stride, dtype))
                self.values[name], self.texts[name] = _Value(name), name
            case _:
                self.values[name], self.texts[name] = self._value(value), self._text(value)

    def _value(self, node: ast.expr) -> _Value:
        match node:
            case ast.Name(id=name):
                return self.values.get(name, _Value(name))
            case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[base, _, _, offset]):
                value, more = self._value(base), _literal(offset)
                return _Value(value.root, value.offset + more)
        raise _Unread

    def _text(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                return self.texts.get(name, name)
            case ast.Call(func=ast.Name(id=name), args=[base, *rest]):
                return f"{name}({', '.join([self._text(base), *map(ast.unparse, rest)])})"
        raise _Unread

    def _result(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return ast.unparse(node)
        self.outputs.add(self._value(node).root)
        return self._text(node)

    def _call(self, name: str, args: Sequence[ast.expr]) -> None:
        if not all(kind.endswith("*") for kind in self.kernels[name]):
            raise _Unread
        values = [self._value(arg) for arg in args]
        for value in values:
            if buffer := self.buffers.get(value.root):
                buffer.first = len(self.calls) if buffer.first < 0 else buffer.first
                buffer.last = len(self.calls)
        self.calls.append((name, values))

    def _placed(self) -> int:
        """Give each buffer between kernels its place in one piece of memory, whose size it is."""
        total, done = 0, list[_Buffer]()
        inner = [b for name, b in self.buffers.items() if name not in self.outputs and b.first >= 0]
        for buffer in sorted(inner, key=lambda b: -b.size):
            taken = (b for b in done if b.first <= buffer.last and buffer.first <= b.last)
            for other in sorted(taken, key=lambda b: b.place):
                if buffer.place + buffer.size <= other.place:
                    break
                buffer.place = max(buffer.place, _aligned(other.place + other.size))
            done.append(buffer)
            total = max(total, buffer.place + buffer.size)
        if total > MEMORY:
            raise _Unread
        return total

    def _written(self, total: int) -> Entry:
        roots = dict.fromkeys(v.root for _, values in self.calls for v in values)
        outer = [r for r in roots if r not in self.buffers or r in self.outputs]
        names = {root: f"arg{i}" for i, root in enumerate(outer, 1)}

        def pointer(value: _Value, kind: str) -> str:
            at = names.get(value.root) or f"arg0 + {self.buffers[value.root].place}"
            return f"reinterpret_cast<{kind}>({at}) + {value.offset}"

        calls = tuple(
            (name, ", ".join(map(pointer, values, self.kernels[name])))
            for name, values in self.calls
        )
        body = [
            *self.head,
            *(f"{name} = {b.made}" for name, b in self.buffers.items() if name in self.outputs),
            f"{_MEMORY} = empty_strided_cpu(({total},), (1,), torch.uint8)",
            f"{_KERNEL}({', '.join([_MEMORY, *outer])})",
            f"return {self.returned}",
        ]
        text = "\n    ".join([f"def {_CALL}(args):", *body])
        return Entry(1 + len(outer), calls, text)


def _name(node: ast.expr) -> str:
    if not isinstance(node, ast.Name):
        raise _Unread
    return node.id


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
