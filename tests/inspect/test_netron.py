"""Dumps in Netron itself, served from here and opened in Chromium. Skipped where either is not."""

from __future__ import annotations

import pathlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from browser import CHROMIUM, launched
from samples import compiled

from torchgraft.inspect.graph import rows

netron = pytest.importorskip("netron")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from launched()


@pytest.mark.parametrize("kind", ["pbtxt", "onnx"])
def test_a_dump_shows_every_call_by_its_name(
    browser: Any, tmp_path: pathlib.Path, kind: str
) -> None:
    program = compiled(dump=tmp_path, dump_formats=[kind])
    [home] = tmp_path.iterdir()
    [*_, last] = sorted(home.glob(f"*.{kind}"))
    calls = Counter(row.op.split(".")[1] for row in rows(program.graph.gm) if row.kind == "call")
    labels = {name: f"aten::{name}" if kind == "pbtxt" else name for name in calls}
    host, port = netron.start(str(last), browse=False)
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    try:
        page.route(lambda url: f":{port}/" not in url, lambda route: route.abort())
        page.goto(f"http://{host}:{port}/")
        page.get_by_text("Accept").click()
        page.wait_for_selector(".node text")
        shown = {  # counted by locators: Netron forbids scripts of others
            name: page.locator(".node text", has_text=re.compile(f"^{label}$")).count()
            for name, label in labels.items()
        }
    finally:
        page.close()
        netron.stop((host, port))
    assert shown == dict(calls)
