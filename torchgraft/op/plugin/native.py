"""C++ kernels of op-plugin: which functions a source defines, and the library made of it."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.errors import BadPrototype
from torchgraft.op import cpp
from torchgraft.op.constants import tree
from torchgraft.op.plugin.functions import Entry

if TYPE_CHECKING:
    from tree_sitter import Node

INCLUDE = Path(__file__).parent / "include"
SPACES = ("op_api", "acl_op")


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A C++ function that implements an operator."""

    op: str
    function: str


def functions_of(source: bytes) -> set[str]:
    """The functions that a source defines in `op_api` and `acl_op`, with that name before.

    >>> sorted(functions_of(b"namespace op_api { int f(int x) { return x; } int g(); }"))
    ['op_api::f']
    """
    found: set[str] = set()

    def walk(node: Node, space: str) -> None:
        if node.type == "namespace_definition":
            name = node.child_by_field_name("name")
            space = source[name.start_byte : name.end_byte].decode() if name else ""
        if node.type == "function_definition":
            declared = node.child_by_field_name("declarator")
            text = source[declared.start_byte : declared.end_byte].decode() if declared else ""
            name_found = re.match(r"[&*\s]*((?:\w+::)*\w+)\s*\(", text)
            if name_found:
                full = f"{space}::{name_found[1]}".removeprefix("::")
                found.add(full) if full.split("::")[0] in SPACES else None
            return
        for child in node.children:
            walk(child, space)

    walk(tree(source, "reading C++ kernels"), "")
    return found


def implementations(
    sources: Mapping[str, bytes], entries: Iterable[Entry]
) -> dict[str, list[Implementation]]:
    """Which operators each source implements: by the function's name, `op_api` before `acl_op`."""
    at = {function: path for path, source in sources.items() for function in functions_of(source)}
    made: dict[str, list[Implementation]] = {path: [] for path in sources}
    taken: dict[str, Entry] = {}
    for entry in entries:
        named = [function for _, function in entry.dispatch]
        options = [f"{space}::{one}" for space in entry.kernels for one in (*named, entry.function)]
        function = next((one for one in options if one in at), None)
        if function is None:
            continue
        if function in taken:
            found = f"{function} for {entry.name} and for {taken[function].name}"
            raise BadPrototype(entry.where, found, "a function for each (name it under dispatch:)")
        taken[function] = entry
        made[at[function]].append(Implementation(entry.name, function))
    return made


_GLUE = """\
#include "{path}"
#include <torch/library.h>

// Not a static initialiser: what one throws ends the process.
extern "C" __attribute__((visibility("default"))) const char* torchgraft_register() noexcept {{
  static std::string said;
  static std::vector<torch::Library> kept;
  try {{
    torch::Library m(torch::Library::IMPL, "npu", c10::DispatchKey::CompositeExplicitAutograd,
                     __FILE__, __LINE__);
{impls}    kept.push_back(std::move(m));
    return nullptr;
  }} catch (const std::exception& error) {{
    said = error.what();
    return said.c_str();
  }}
}}
"""


def glue(path: Path, made: Iterable[Implementation]) -> str:
    """The file that is compiled: the source, then the registration of what it implements."""
    impls = [f'    m.impl("{one.op}", TORCH_FN({one.function}));\n' for one in made]
    return _GLUE.format(path=path, impls="".join(impls))


def open_library(path: Path) -> str | None:
    """Open a library and let it register what it implements; what it said, if that failed."""
    load_library: Any = torch.ops.load_library  # untyped in torch
    try:
        load_library(str(path))
        register = ctypes.CDLL(str(path)).torchgraft_register
    except (OSError, AttributeError) as error:
        return str(error)
    register.restype = ctypes.c_char_p
    said = register()
    return None if said is None else said.decode(errors="replace")


def command() -> list[str]:
    """The compiler and the flags that every source is compiled with."""
    return cpp.command("npu::*", "C++", "op-plugin")


def digest(*parts: bytes | str) -> str:
    """The sha256 of some parts, each with its length, so that no two lists are one."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(f"{len(data)}:".encode() + data)
    return total.hexdigest()


def compile_source(path: Path, text: str, target: Path) -> list[Path]:
    """Compile a source with its glue into a library; the files that it read, ours left out."""
    near = [INCLUDE, path.parent]
    read = cpp.compile_library(f"npu ({path.name})", str(path), text, target, command(), near)
    return [one for one in read if not one.is_relative_to(INCLUDE)]
