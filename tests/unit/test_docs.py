"""The documents are complete: every error has an entry, every link leads somewhere."""

from __future__ import annotations

import importlib.metadata
import inspect
import pathlib
import re

import pytest

from torchgraft import errors

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

ERRORS = [
    name
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.GraftError)
]


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_says_when_and_what_to_do(name: str) -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    assert re.search(rf"^### {name}\n\*When:\* .+?\n\*Do:\* ", text, re.MULTILINE | re.DOTALL)


def test_every_dependency_has_a_reason() -> None:
    listed = importlib.metadata.requires("torchgraft") or []
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "dependencies.md").read_text(), re.M)
    explained = {name.split()[0] for row in rows for name in row.split(", ")}
    assert {re.split(r"[^\w.-]", name)[0] for name in listed} <= explained | {"torchgraft"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
