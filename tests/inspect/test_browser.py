"""The page in a real browser: Chromium, driven by Playwright. Skipped where there is none."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from browser import CHROMIUM, launched, playwright
from samples import compiled, large

import torchgraft as graft
from torchgraft.inspect.page import page as render

expect = playwright.expect
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from launched()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("page") / "out.html"
    with graft.Registry():
        program = compiled()
        program.profile((torch.ones(3, 4),), repeat=2)
        program.report.html(path)
    return path


class Page:
    """An open report that remembers what the console said."""

    def __init__(self, browser: Any, path: pathlib.Path, scheme: str = "light") -> None:
        self.context = browser.new_context(
            viewport={"width": 1280, "height": 800}, color_scheme=scheme, offline=True
        )
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(".canvas[data-boxes]")

    def drawn(self, script: str) -> Any:
        """What a piece of script gives for the drawn graph, `cy`."""
        return self.page.evaluate(f"(cy => {script})(document.querySelector('.canvas').drawn)")

    def until(self, script: str) -> None:
        """Wait until the drawn graph is so; what never comes is a failure.

        The page forbids eval, so Playwright's own `wait_for_function` cannot look.
        """
        for _ in range(400):
            if self.drawn(f"Boolean(cy && ({script}))"):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never came: {script}")


@pytest.fixture
def opened(browser: Any, report: pathlib.Path) -> Iterator[Page]:
    page = Page(browser, report)
    yield page
    page.context.close()
    assert page.said == []


def test_a_pass_shows_its_difference(opened: Page) -> None:
    page = opened.page
    page.get_by_role("option", name="twice").click()
    expect(page.locator("aside h3")).to_have_text("twice")
    expect(page.locator(".change.added")).to_have_count(8)
    expect(page.locator(".change.removed")).to_have_count(4)
    opened.until("cy.nodes('.added').length == 8 && cy.nodes('.removed').length == 4")
    colors = opened.drawn("['added','removed'].map(c => cy.nodes('.'+c)[0].style('border-color'))")
    assert colors[0] != colors[1]
    page.get_by_role("button", name="before").click()
    opened.until("cy.nodes('.added, .removed, .changed').length == 0")
    assert opened.drawn("cy.nodes().filter(n => /^n:add(_\\d)?$/.test(n.id())).length") == 4
    page.get_by_role("option", name="dead_code").click()
    page.get_by_role("button", name="diff").click()
    expect(page.locator("aside")).to_contain_text("changed nothing")


def test_search_finds_a_node(opened: Page) -> None:
    page = opened.page
    page.keyboard.press("/")
    page.keyboard.type("cumsum")
    expect(page.locator("#found li").first).to_contain_text("cumsum")
    page.keyboard.press("Enter")
    for text in ("aten.cumsum.default", "f32[3, 4]", "samples.py:", "main"):
        expect(page.locator("aside .details")).to_contain_text(text)
    opened.until("cy.$(':selected').id() == 'n:cumsum'")
    page.keyboard.press("/")
    page.keyboard.type("zzz")
    expect(page.locator("#found")).to_have_text("No node has that.")


def test_the_keyboard_alone(opened: Page) -> None:
    page = opened.page
    chosen = page.locator("nav [aria-selected=true] b")
    expect(chosen).to_have_text("what runs")
    page.keyboard.press("k")
    page.keyboard.press("k")
    expect(chosen).to_have_text("twice")
    page.locator("nav ol").focus()
    page.keyboard.press("Home")
    expect(chosen).to_have_text("captured")
    page.keyboard.press("ArrowDown")
    expect(chosen).to_have_text("remove_noops")
    for key, text in {
        "2": "Nearest miss", "3": "declined: not today </script>", "4": "nodes are compiled",
        "5": "launch('main'", "6": "A call takes", "7": "weights are frozen",
    }.items():  # fmt: skip
        page.keyboard.press(key)
        expect(page.locator("[role=tabpanel]")).to_contain_text(text)
    page.keyboard.press("1")
    page.locator(".canvas").focus()
    opened.until("true")
    before = opened.drawn("cy.zoom()")
    page.keyboard.press("+")
    opened.until(f"cy.zoom() > {before}")
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).not_to_be_visible()


def test_modules_open_and_close(opened: Page) -> None:
    page = opened.page
    page.get_by_role("button", name="Collapse").click()
    opened.until("cy.nodes('.group').map(n => n.data('label').split('\\n')[0]) == 'blocks'")
    opened.drawn("cy.getElementById('g:blocks').emit('tap') && 0")
    opened.until("cy.nodes('.group').length == 3")
    assert opened.drawn("cy.nodes('.open').map(n => n.id())") == ["g:blocks"]


def test_light_and_dark_and_nothing_outside_the_window(browser: Any, report: pathlib.Path) -> None:
    shades = []
    for scheme in ("light", "dark"):
        opened = Page(browser, report, scheme)
        page = opened.page
        shades.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        for tab in page.get_by_role("tab").all():
            tab.click()
            sizes = page.evaluate(
                "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
            )
            assert sizes == [1280, 800]
        page.keyboard.press("t")
        shades.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert opened.said == []
        opened.context.close()
    assert shades[0] == shades[3] != shades[1] == shades[2]


def test_five_thousand_nodes(browser: Any, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "large.html"
    path.write_text(render(large(5000)), encoding="utf-8")
    opened = Page(browser, path)
    page = opened.page
    opened.until("cy.nodes().length > 10 && cy.nodes().length < 700")
    page.get_by_role("option", name="pass_4").click()
    opened.until("cy.nodes('.changed').length > 10")
    page.keyboard.press("/")
    page.keyboard.type("layers.33.part node_3377")
    page.keyboard.press("Enter")
    expect(page.locator("aside .details")).to_contain_text("layers.33.part.7")
    opened.until("cy.$(':selected').id() == 'n:node_3377'")
    page.keyboard.press("5")  # a bar a pixel, not none because each is thinner than one
    expect(page.locator("g.bar.critical").nth(400)).to_be_attached()
    assert opened.said == []
    opened.context.close()


def test_no_room_is_wasted_beside_a_graph(opened: Page) -> None:
    """One that is wider than the canvas reaches both its edges, a narrow one stands in the middle;
    where it begins does not depend on which node is looked at first."""
    for step in ("what runs", "twice"):
        opened.page.get_by_role("option", name=step).click()
        opened.until("cy.nodes().nonempty()")
        x1, x2, width = opened.drawn(
            "(({x1, x2}) => [x1, x2, cy.width()])(cy.elements().renderedBoundingBox())"
        )
        is_narrow = x2 - x1 <= width - 40
        assert abs(x1 + x2 - width) < 4 if is_narrow else (x1 <= 22 and x2 >= width - 22)


def test_branches_are_shown_where_they_are_chosen_from(
    browser: Any, tmp_path: pathlib.Path
) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.relu(), lambda x: x.sin(), (x,))

    program = graft.compile(model, (torch.ones(3),), mode="eager")
    program.report.html(tmp_path / "out.html")
    opened = Page(browser, tmp_path / "out.html")
    page = opened.page
    page.keyboard.press("/")
    page.keyboard.type("cond")
    page.keyboard.press("Enter")
    expect(page.locator("aside .details")).to_contain_text("aten.relu.default(x)")
    expect(page.locator("aside .details")).to_contain_text(f"{pathlib.Path(__file__).name}:")
    page.keyboard.press("7")  # the keys are the page's again
    expect(page.locator("[role=tabpanel]")).to_contain_text("versions")
    assert opened.said == []
    opened.context.close()


def test_a_program_without_a_call_has_a_page(browser: Any, tmp_path: pathlib.Path) -> None:
    program = graft.compile(lambda x: x, (torch.ones(3),), mode="eager")
    program.profile((torch.ones(3),), repeat=2)
    program.report.html(tmp_path / "out.html")
    opened = Page(browser, tmp_path / "out.html")
    for key in "1234567":
        opened.page.keyboard.press(key)
        expect(opened.page.locator("[role=tabpanel]")).not_to_be_empty()
    assert opened.said == []
    opened.context.close()
