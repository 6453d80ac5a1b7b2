"""A real browser for tests: Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


def launched() -> Iterator[Any]:
    """A browser, closed afterwards."""
    with playwright.sync_playwright() as driver:
        # The pages are ours and a container has no user namespaces for the sandbox.
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()
