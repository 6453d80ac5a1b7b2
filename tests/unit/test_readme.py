"""The documents are true: every Python block runs, and the README's table is what happens."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgraft as graft

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: pathlib.Path) -> list[str]:
    """The Python blocks of a page, each moved down to its own line numbers."""
    text = page.read_text()
    return [
        "\n" * text[: found.start(1)].count("\n") + found.group(1)
        for found in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda page: page.name)
def test_the_samples_run(page: pathlib.Path) -> None:
    scope: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page):
        exec(compile(block, page, "exec"), scope)


# --- The table of what works where ---


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return x * 2
        return x - 1


FRONT_ENDS = ["torch.compile", "nn.Module", "GraphModule", "ExportedProgram", "TorchScript"]


def through(front: str, model: nn.Module, x: Tensor, **config: Any) -> Any:
    """The model through a front end, its first dim dynamic."""
    spec = graft.Input(min_shape=(2, 4), max_shape=(64, 4))
    if front == "torch.compile":
        settings = graft.Config(**config)
        return torch.compile(model, backend=graft.backend(settings), dynamic=True)
    if front == "nn.Module":
        return graft.compile(model, (spec,), **config)
    if front == "GraphModule":
        return graft.compile(torch.fx.symbolic_trace(model), (spec,), **config)
    if front == "ExportedProgram":
        sizes = ({0: torch.export.Dim("rows", min=2, max=64)},)
        exported = torch.export.export(model, (x,), dynamic_shapes=sizes)
        return graft.compile(exported, **config)
    return graft.compile(torch.jit.script(model), (spec,), **config)


def row(front: str) -> list[str]:
    """The cells of the README's row for a front end, after its name."""
    [line] = re.findall(rf"^\| [^|]*\b{re.escape(front)}\b[^|]* \|(.*)\|$", README, re.MULTILINE)
    return [cell.strip() for cell in line.split("|")]


@pytest.mark.slow
@pytest.mark.parametrize("front", FRONT_ENDS)
def test_generated_code_dynamic_shapes_and_passes(front: str) -> None:
    seen: list[int] = []

    @graft.fx_pass(register=False)
    def look(graph: graft.Graph) -> None:
        seen.append(len(graph.nodes))

    model = Small()
    run = through(front, model, torch.randn(8, 4), post_passes=[look])
    for rows in (2, 5, 64):
        x = torch.randn(rows, 4)
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x))
    assert len(seen) == 1  # one program for every size
    assert graft.reports()[-1].coverage == 1
    assert row(front)[:3] == ["✓", "✓", "✓"]


@pytest.mark.parametrize("front", FRONT_ENDS)
def test_gradients(front: str) -> None:
    model = Small()
    x = torch.randn(8, 4, requires_grad=True)
    result = through(front, model, x, mode="eager")(x)
    assert result.requires_grad == (row(front)[3] == "✓") == (front == "torch.compile")


@pytest.mark.parametrize("front", FRONT_ENDS)
def test_branches_on_data(front: str) -> None:
    model, x = Branching(), torch.ones(8, 4)
    if row(front)[4] == "–":
        with pytest.raises(Exception, match=r"(?i)data-dependent|control flow"):
            through(front, model, x, mode="eager")
        return
    run = through(front, model, x, mode="eager")
    for sample in (x, -x):
        torch.testing.assert_close(run(sample), model(sample))
