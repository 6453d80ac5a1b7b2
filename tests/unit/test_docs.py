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


def anchors(page: pathlib.Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: pathlib.Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
