"""C++ kernels of op-plugin: which functions a source defines, and the library made of it."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import cpp_extension

from torchgraft.errors import BadPrototype, KernelBuild
from torchgraft.op.constants import tree
from torchgraft.op.plugin.functions import Entry

if TYPE_CHECKING:
    from tree_sitter import Node

INCLUDE = Path(__file__).parent / "include"
SPACES = ("op_api", "acl_op")
_ERROR = re.compile(r"^(.*?:\d+)(?::\d+)?: (?:fatal )?error: (.*)$", re.MULTILINE)


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
extern "C" const char* torchgraft_register() noexcept {{
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
    wanted = shlex.split(os.environ.get("CXX", "c++"))
    tool = shutil.which(wanted[0]) or shutil.which("g++")
    if tool is None:
        raise KernelBuild(
            "npu::*", "C++", "there is no C++ compiler (c++, g++, or what CXX names)."
        )
    abi = int(torch.compiled_with_cxx11_abi())
    flags = ["-O2", "-std=c++20", "-fPIC", "-shared", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    paths = [flag for path in cpp_extension.include_paths("cpu") for flag in ("-isystem", path)]
    return [tool, *wanted[1:], *flags, f"-I{INCLUDE}", *paths]


def digest(*parts: bytes | str) -> str:
    """The sha256 of some parts, each with its length, so that no two lists are one."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(f"{len(data)}:".encode() + data)
    return total.hexdigest()


def compile_source(path: Path, text: str, target: Path) -> list[Path]:
    """Compile a source with its glue into a library; the files that it read, torch's left out."""
    links = [flag for one in cpp_extension.library_paths("cpu") for flag in ("-L", one)]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        unit, made, needs = (Path(scratch, name) for name in ("unit.cpp", "unit.so", "unit.d"))
        unit.write_text(text)
        line = [*command(), f"-I{path.parent}", "-MMD", "-MF", str(needs), str(unit)]
        line += ["-o", str(made), *links, "-lc10", "-ltorch_cpu", "-ltorch"]
        ran = subprocess.run(line, capture_output=True, text=True)
        if ran.returncode != 0:
            log = target.with_suffix(".log")
            log.write_text(ran.stdout + ran.stderr)
            raise KernelBuild(f"npu ({path.name})", str(path), first_error(ran.stderr), str(log))
        made.replace(target)
        words = needs.read_text().replace("\\\n", " ").split()[1:]
    known = {Path(word).resolve() for word in words} - {unit.resolve()}
    return sorted(one for one in known if not one.is_relative_to(INCLUDE))


def first_error(said: str) -> str:
    """The first error of a compiler, with its place; otherwise the first line of what it said."""
    if found := _ERROR.search(said):
        return f"{found[1]}: {found[2]}"
    linked = re.search(r"^.*(?:undefined reference|cannot find).*$", said, re.MULTILINE)
    return linked[0].strip() if linked else next(iter(said.strip().splitlines()), "it said nothing")
