"""The demo's encoder as report pages, measured: `python examples/report.py FOLDER`.

One page has the demo's pass, the other runs the query and key projections beside the value's, on
streams of their own. With `--pictures` an installed Chromium photographs them, as docs/ shows them.
"""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import click
import torch
from demo import Layer, merge_projections
from torch import nn

import torchgraft as graft

aten = torch.ops.aten


@graft.fx_pass(register=False)
def side_projections(graph: graft.Graph) -> None:
    """Query and key on streams of their own; what waits for what follows from the data."""
    for node in graph.all(aten.addmm.default):
        for name in ("query", "key"):
            if f"attention.{name}" in str(node.meta.get("nn_module_stack")):
                graph.place(node, stream=name)


def pages(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Compile, measure, write."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x = nn.Sequential(*(Layer(256, 4) for _ in range(2))).eval(), torch.randn(1, 256, 256)
    found = {}
    for rewrite in (merge_projections, side_projections):
        program = graft.compile(
            model, (x,), mode="eager", post_passes=[rewrite], merge_branches=False
        )
        print(program.profile((x,)), end="\n\n")
        found[rewrite.name] = folder / f"{rewrite.name}.html"
        program.report.html(found[rewrite.name])
    return found


def photograph(found: dict[str, pathlib.Path], folder: pathlib.Path) -> None:
    """The pages at 1280 by 800, in light and in dark."""
    from playwright.sync_api import Page, sync_playwright

    def choose_pass(page: Page) -> None:
        page.get_by_role("option", name="merge_projections").click()
        page.wait_for_selector(".change.added")

    def choose(tab: str) -> Any:
        return lambda page: page.get_by_role("tab", name=tab).click()

    shots = [
        ("report-pass", "merge_projections", "light", choose_pass),
        ("report-kernels", "merge_projections", "light", choose("Kernels")),
        ("report-plan", "side_projections", "dark", choose("Plan")),
    ]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, source, scheme, act in shots:
            page = browser.new_page(
                viewport={"width": 1280, "height": 800},
                color_scheme=scheme,  # type: ignore[arg-type]
            )
            page.goto(found[source].resolve().as_uri())
            page.wait_for_selector(".canvas[data-boxes]")
            act(page)
            page.wait_for_timeout(500)
            page.screenshot(path=folder / f"{name}.png")
        browser.close()


@click.command()
@click.argument("folder", type=click.Path(path_type=pathlib.Path))
@click.option("--pictures", type=click.Path(path_type=pathlib.Path), help="Where to put them.")
def main(folder: pathlib.Path, pictures: pathlib.Path | None) -> None:
    found = pages(folder)
    for path in found.values():
        print(path)
    if pictures is not None:
        photograph(found, pictures)


if __name__ == "__main__":
    main()
