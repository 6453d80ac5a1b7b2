"""What a script uses that will not work here, found without running it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchgraft import compat
from torchgraft.compat import calls
from torchgraft.compat.air.config import CompilerConfig, NpuGraphExConfig
from torchgraft.compat.calls import Problem, dotted
from torchgraft.compat.options import Section
from torchgraft.compat.refused import FUSED, REFUSED
from torchgraft.errors import NotOnThisDevice, first_line


def check(path: Path) -> list[Problem]:
    """Every use of an Ascend package that fails or has no effect, in order."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    names = dict(_names(tree))
    was_installed = any(isinstance(finder, compat.Finder) for finder in sys.meta_path)
    compat.install(force=True)
    try:
        found = [
            *_uses(tree, names, str(path)),
            *_options(tree, str(path)),
            *_settings(tree, names, str(path)),
            *calls.problems(tree, names, str(path)),
        ]
    finally:
        if not was_installed:
            compat.uninstall()
    return sorted(set(found))


def _names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that imports bind, and what of an Ascend package each is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head = alias.name.partition(".")[0]
                if head in (*compat.NAMES, "torch"):
                    yield alias.asname or head, alias.name if alias.asname else head
        elif isinstance(node, ast.ImportFrom) and _is_ours(node):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _is_ours(node: ast.ImportFrom) -> bool:
    return not node.level and str(node.module).partition(".")[0] in compat.NAMES


def _uses(tree: ast.AST, names: dict[str, str], path: str) -> Iterator[Problem]:
    for node in ast.walk(tree):
        for name in _named(node, names):
            why = _missing(name)
            if why is not None:
                yield Problem(path, getattr(node, "lineno", 0), name, why)


def _named(node: ast.AST, names: dict[str, str]) -> list[str]:
    """The dotted names that a node of the source asks for."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and _is_ours(node):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [dotted(node, names)] if isinstance(node, ast.Attribute) else []


def _missing(name: str) -> str | None:
    """Why a dotted name of an Ascend package cannot be had; None where it can."""
    for known, nearest in REFUSED.items():
        if name == known or name.startswith(f"{known}."):
            return nearest
    if name.startswith("torch.ops.npu."):  # whatever it is when the script runs, if it is known
        return FUSED.get(name.removeprefix("torch.ops.npu."))
    if name.startswith("torch.npu."):
        name = name.replace("torch.", "torch_npu.", 1)
    head, *rest = name.split(".")
    if head not in compat.NAMES:
        return None
    held: Any = importlib.import_module(head)
    walked = head
    for part in rest:
        if not isinstance(held, type(importlib)):
            return None  # inside a class or an object: its own attributes are not judged
        walked += f".{part}"
        try:
            held = getattr(held, part)
        except NotOnThisDevice as error:
            return error.nearest
        except AttributeError:
            if not hasattr(held, "__path__") or importlib.util.find_spec(walked) is None:
                return "there is nothing of this name; is it private, or of another version?"
            if walked == name:
                return None  # a module: importing it may change the process (`transfer_to_npu`)
            held = importlib.import_module(walked)
    return None


def _settings(tree: ast.AST, names: dict[str, str], path: str) -> Iterator[Problem]:
    """Names and values that a config refuses, of those that stand in the script as they are."""
    held: dict[str, Any] = {}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1):
            continue
        [target], value = node.targets, node.value
        if isinstance(target, ast.Name) and isinstance(value, ast.Call):
            made = _CONFIGS.get(dotted(value.func, names))
            held |= {target.id: made()} if made is not None else {}
        first, *groups = ast.unparse(target).split(".")
        if first not in held or not groups:
            continue
        if (why := _refusal(held[first], groups, value)) is not None:
            yield Problem(path, node.lineno, ".".join(groups), why)


def _refusal(section: Any, groups: list[str], value: ast.expr) -> str | None:
    """What setting an option raises. A value that is computed is not judged."""
    try:
        for group in groups:
            holder, section = section, getattr(section, group)
    except AttributeError as error:
        return first_line(error)
    try:
        given = ast.literal_eval(value)
    except ValueError:
        return None
    try:
        setattr(holder, groups[-1], given)
    except FileNotFoundError:
        return None  # it may be there when the script runs
    except (TypeError, ValueError) as error:
        return first_line(error)
    return None


_CONFIGS: dict[str, type[Section]] = {
    "torchair.CompilerConfig": CompilerConfig,
    "torchair.configs.compiler_config.CompilerConfig": CompilerConfig,
    "npugraph_ex.CompilerConfig": NpuGraphExConfig,
}


def _options(tree: ast.AST, path: str) -> Iterator[Problem]:
    """Options that are set and have no effect, by the end of the name that is set."""
    idle = {**_idle(CompilerConfig()), **_idle(NpuGraphExConfig())}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for shown in map(ast.unparse, node.targets):
            for name, why in idle.items():
                if "." in name and shown.endswith(f".{name}"):
                    yield Problem(path, node.lineno, name, why, fatal=False)


def _idle(section: Section, prefix: str = "") -> dict[str, str]:
    found = {
        f"{prefix}{name}": kind.idle
        for name, kind in section.options.items()
        if kind.idle is not None
    }
    for name in section.sections:
        found |= _idle(getattr(section, name), f"{prefix}{name}.")
    return found
