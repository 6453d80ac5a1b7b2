"""House law that no reader sees at a glance: who imports whom, private torch in one folder."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "torchgraft"
FILES = sorted(PACKAGE.rglob("*.py"))


def module(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: pathlib.Path) -> Iterator[str]:
    """Every torchgraft module that a file imports, also inside functions, as a full name.

    What stands under `if TYPE_CHECKING:` is not imported when the program runs.
    """
    tree = ast.parse(path.read_text())
    typing = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if inside(alias.name, "torchgraft"))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the full name of the module"
            if inside(node.module or "", "torchgraft"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


# What the parts at the bottom may import; every other part is free.
MAY_IMPORT = {
    "torchgraft.errors": [],
    "torchgraft.config": ["torchgraft.errors", "torchgraft._torch"],
    "torchgraft._torch": [],
    "torchgraft.plan": ["torchgraft.errors", "torchgraft.config", "torchgraft.stream"],
    "torchgraft.stream": ["torchgraft.errors", "torchgraft.config", "torchgraft.plan"],
    "torchgraft.run": [
        "torchgraft.errors",
        "torchgraft.config",
        "torchgraft._torch",
        "torchgraft.plan",
        "torchgraft.stream",
        "torchgraft.signature",
        "torchgraft.report",
    ],
}


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_the_lower_parts_import_only_what_lies_below(part: str) -> None:
    allowed = [part, *MAY_IMPORT[part]]
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in FILES
        if inside(module(path), part)
        for name in imported(path)
        if not any(inside(name, one) for one in allowed)
    ]
    assert not wrong


@pytest.mark.parametrize("part", ["torchgraft.cli", "torchgraft.compat"])
def test_nothing_imports_the_outermost_parts(part: str) -> None:
    outermost = (part, "torchgraft.cli", "torchgraft.__main__")
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in FILES
        if not any(inside(module(path), one) for one in outermost)
        for name in imported(path)
        if inside(name, part)
    ]
    assert not wrong


def private(path: pathlib.Path) -> Iterator[str]:
    """Uses of a private name of torch, however deep: `torch._C`, `torch.utils._pytree`."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            # What lies under torch.ops is an operator, whatever its name.
            found = re.match(r"torch(?!\.ops\.)(\.\w+)*\._(?!_)\w+", name)
            if found:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {found.group()}"


def test_private_torch_is_in_one_folder() -> None:
    home = PACKAGE / "_torch"
    wrong = [use for path in FILES if path.parent != home for use in private(path)]
    assert not wrong


def test_the_search_for_private_torch_finds_it() -> None:
    assert any("torch._C" in use for use in private(PACKAGE / "_torch" / "__init__.py"))
    assert any("torch.utils._pytree" in use for use in private(PACKAGE / "_torch" / "__init__.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_is_about_one_thing_and_nothing_is_left_open(path: pathlib.Path) -> None:
    text = path.read_text()
    # All that is private to torch is one thing, and so are all mistakes.
    limit = {"_torch": 700, "errors": 700}.get(module(path).partition(".")[2], 500)
    assert len(text.splitlines()) <= limit, "look for the second thing in this file"
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
