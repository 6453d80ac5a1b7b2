"""Kernels in C++ built several at a time. torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import pathlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from torchgraft._torch import entry, written

FEW, MANY = 6, 32
"""Kernels in one source: from so many on, another compiler may share the work; with more, it must.
One kernel takes some 0.7 s to compile, and each further one 0.12 (gcc 12)."""


@contextlib.contextmanager
def together(*, joined: bool = False) -> Iterator[None]:
    """Kernels for CPU are built when the module that asks for them waits, many in one source.

    Inductor starts a compiler for each, which reads headers and links before and after what little
    it has to do. Holds for modules that this thread loads. With `joined`, kernels that a module
    calls one after the other get one call, which holds what they read to its end.
    """
    from torch._inductor.async_compile import AsyncCompile

    ask, wait, here = AsyncCompile.cpp_pybinding, AsyncCompile.wait, threading.get_ident()

    def asked(self: Any, types: list[str], source: str) -> Any:
        kernel = _Kernel(tuple(types), source)
        if threading.get_ident() != here or not kernel.joins:
            return ask(self, types, source)
        return kernel

    def waited(self: Any, scope: dict[str, Any]) -> None:
        kernels = {name: value for name, value in scope.items() if isinstance(value, _Kernel)}
        found = _entry(scope, kernels) if joined else None
        runs = {
            f"{_RUN}{i}": _Kernel(r.types, r.source)
            for i, r in enumerate(found.runs if found else ())
        }
        built = dict(_built({**kernels, **runs}, self.submit))
        scope.update((name, built[name]) for name in kernels)
        if found:
            found.define(scope, [built[name] for name in runs], [built[name] for name in kernels])
        wait(self, scope)

    with (
        mock.patch.object(AsyncCompile, "cpp_pybinding", asked),
        mock.patch.object(AsyncCompile, "wait", waited),
    ):
        yield


_ENTRY = re.compile(r'^(extern "C"\s+void\s+)kernel\b', re.MULTILINE)
_INCLUDE = re.compile(r"^\s*#include .*$", re.MULTILINE)
_RUN = "run "  # no kernel is called so
_MACRO = re.compile(r"^\s*#(?!include|pragma)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, eq=False)
class _Kernel:
    """A kernel that a module asked for: the types of its arguments, and its source."""

    types: tuple[str, ...]
    source: str

    @property
    def joins(self) -> bool:
        """Whether it can share a source: others would see its macros."""
        return len(_ENTRY.findall(self.source)) == 1 and not _MACRO.search(self.source)

    def named(self, name: str) -> str:
        """Its source with the function of that name, and the module in Python of that name."""
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        parsed = (
            f"parse_arg<{kind.replace('const ', '')}>(args, {i})"
            for i, kind in enumerate(self.types)
        )
        return _ENTRY.sub(
            rf"\1{name}", self.source
        ) + CppPythonBindingsCodeCache.suffix_template.format(
            arg_len=len(self.types),
            call_entry_func=f"{name}({', '.join(parsed)}); Py_RETURN_NONE;",
            entry_func=name,
            extra_parse_arg="",
        )


def _built(kernels: dict[str, _Kernel], submit: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Functions by the names of their kernels. As many compilers run beside each other as Inductor
    would let run."""
    from torch._inductor.async_compile import get_compile_threads

    threads, count = get_compile_threads(), len(kernels)
    sources = max(min(threads, math.ceil(count / FEW)), math.ceil(count / MANY))
    groups: list[list[str]] = [[] for _ in range(sources)]
    for name in sorted(kernels, key=lambda n: -len(kernels[n].source)):
        min(groups, key=lambda g: sum(len(kernels[n].source) for n in g)).append(name)
    started = [
        (group, _start([kernels[n] for n in group], submit if threads > 1 else None))
        for group in groups
    ]
    for group, finish in started:
        yield from zip(group, finish(), strict=True)


def _entry(scope: Mapping[str, Any], kernels: Mapping[str, _Kernel]) -> entry.Entry | None:
    """The module with this namespace, its kernels in runs."""
    try:
        text = pathlib.Path(scope["__file__"]).read_text()
    except (KeyError, OSError):
        return None
    return entry.read(text, {name: kernel.types for name, kernel in kernels.items()})


def _start(kernels: Sequence[_Kernel], submit: Any) -> Callable[[], list[Any]]:
    """Begin to build kernels in one source; what is returned waits for their functions."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    if len(kernels) == 1:  # as Inductor does it, so that it finds the library and we find its own
        [kernel] = kernels
        alone = CppPythonBindingsCodeCache.load_pybinding_async(
            kernel.types, kernel.source, submit_fn=submit
        )
        return lambda: [alone()]
    names = _names(len(kernels))
    texts = [kernel.named(name) for kernel, name in zip(kernels, names, strict=True)]
    parts, texts = written.shared(texts)
    includes = dict.fromkeys(line for text in texts for line in _INCLUDE.findall(text))
    spaces = (
        f"namespace of_{name} {{\n{_INCLUDE.sub('', text)}\n}}\n"
        for name, text in zip(names, texts, strict=True)
    )
    load = CppPythonBindingsCodeCache.load_async(
        "\n".join((*includes, *parts, *spaces)), submit_fn=submit
    )

    def finish() -> list[Any]:
        first = load()  # the module of the first; those of the others are in the same library
        modules = [first, *(_module(f"{first.key}.{name}", first.__file__) for name in names[1:])]
        return [getattr(module, name) for module, name in zip(modules, names, strict=True)]

    return finish


def _names(count: int) -> list[str]:
    return ["kernel", *(f"kernel_{i}" for i in range(1, count))]


def _module(name: str, path: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
