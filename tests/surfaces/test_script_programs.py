"""TorchScript through graft.compile: straight-line code as a whole, branches kept as branches."""

from __future__ import annotations

import io
import pathlib

import pytest
import torch
from models import Mlp
from torch import Tensor, nn

import torchgraft as graft
from torchgraft.errors import InputMismatch, NotYet, UnsupportedFile

MODES = ["eager", pytest.param("default", marks=pytest.mark.slow)]


class OnData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(x) + 1
        if bool(x.sum() > 0):
            y = self.up(y).relu()
        else:
            y = self.down(y) * 3
        return y + 1


class OnArgument(nn.Module):
    def forward(self, x: Tensor, double: bool, times: int = 1) -> Tensor:
        if double:
            x = x * 2
        for _ in range(times):
            x = x + 1
        return x


class OnShape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            x = x.flatten(1)
        return x.relu()


@pytest.mark.parametrize("mode", MODES)
def test_a_branch_on_data_stays_a_branch(mode: str) -> None:
    model = OnData().eval()
    compiled = graft.compile(torch.jit.script(model), (torch.randn(2, 4),), mode=mode)
    with pytest.raises(NotYet, match=r"if on data at .*test_script_programs.py"):
        _ = compiled.report
    for sign in (1, -1, 1):
        x = sign * torch.rand(2, 4)
        torch.testing.assert_close(compiled(x), model(x).detach())
    assert sum(len(report.nodes) for report in compiled.reports) >= 6
    if mode == "default":
        assert all(report.coverage == 1 for report in compiled.reports)
    assert "in Python: if on data" in compiled.explain()
    with pytest.raises(InputMismatch, match="'x': declared size 2"):
        compiled(torch.randn(3, 4))


@pytest.mark.parametrize("mode", MODES)
def test_a_branch_on_an_argument_is_never_specialised(mode: str) -> None:
    x = torch.randn(3)
    compiled = graft.compile(torch.jit.script(OnArgument()), (x, True), mode=mode)
    torch.testing.assert_close(compiled(x, True), x * 2 + 1)
    torch.testing.assert_close(compiled(x, False), x + 1)
    with pytest.raises(InputMismatch, match="'double': declared a bool, got 2"):
        compiled(x, 2)


def test_a_branch_on_shape_is_decided_by_the_declared_shape() -> None:
    x = torch.randn(2, 3, 4)
    compiled = graft.compile(torch.jit.script(OnShape()), (x,), mode="eager")
    torch.testing.assert_close(compiled(x), x.flatten(1).relu())
    assert [node.op for node in compiled.report.nodes] == [
        "aten.reshape.default",
        "aten.relu.default",
    ]


def test_frozen_weights_and_new_ones_with_branches() -> None:
    model = OnData().eval()
    x = torch.rand(2, 4)
    frozen = graft.compile(torch.jit.script(model), (x,), mode="eager")
    live = graft.compile(torch.jit.script(model), (x,), mode="eager", freeze=False)
    before = model(x).detach()
    with torch.no_grad():
        model.up.weight.mul_(2)
    torch.testing.assert_close(frozen(x), before)
    torch.testing.assert_close(live(x), model(x).detach())
    other = OnData()
    frozen.load_state_dict(other.state_dict())
    torch.testing.assert_close(frozen(x), other(x).detach())


@pytest.mark.parametrize("mode", MODES)
def test_a_traced_program_of_dynamic_shape(mode: str) -> None:
    class M(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(x.size(0), x.size(1) * x.size(2)).softmax(-1) * 2

    model = M()
    traced = torch.jit.trace(model, torch.randn(2, 3, 4))
    spec = graft.Input(min_shape=(1, 3, 4), max_shape=(9, 3, 4))
    compiled = graft.compile(traced, (spec,), mode=mode)
    for rows in (1, 4, 9):
        x = torch.randn(rows, 3, 4)
        torch.testing.assert_close(compiled(x), model(x))


def test_scripted_functions_compile_too() -> None:
    @torch.jit.script
    def scaled(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by + 1

    x = torch.randn(3)
    torch.testing.assert_close(graft.compile(scaled, (x,), mode="eager")(x), x * 2 + 1)


# --- Files ---


def test_files_are_told_apart_by_what_they_hold(tmp_path: pathlib.Path) -> None:
    model, x = Mlp(), torch.randn(2, 8)
    want = model(x).detach()
    script, exported = tmp_path / "any.name", tmp_path / "any.pt2"
    torch.jit.save(torch.jit.trace(model, x), script)
    torch.export.save(torch.export.export(model, (x,)), exported)
    torch.testing.assert_close(graft.compile(script, (x,), mode="eager")(x), want)
    torch.testing.assert_close(graft.compile(str(exported), mode="eager")(x), want)


def test_what_is_no_program_is_refused_without_running_it(tmp_path: pathlib.Path) -> None:
    pickled, text, missing = tmp_path / "m.pt", tmp_path / "x.pt", tmp_path / "none.pt"
    torch.save(Mlp(), pickled)
    text.write_text("hello")
    for path, message in (
        (pickled, "written by torch.save"),
        (text, "not a zip archive"),
        (missing, "no such file"),
    ):
        with pytest.raises(UnsupportedFile, match=message):
            graft.compile(path, (torch.randn(2, 8),))


def test_an_exported_program_that_would_unpickle_code_is_refused(tmp_path: pathlib.Path) -> None:
    import zipfile

    source, bad = tmp_path / "m.pt2", tmp_path / "bad.pt2"
    torch.export.save(torch.export.export(Mlp(), (torch.randn(2, 8),)), source)
    trap = io.BytesIO()
    torch.save(Trap(tmp_path / "ran"), trap)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(bad, "w") as new:
        for name in old.namelist():
            data = trap.getvalue() if "sample_inputs" in name else old.read(name)
            new.writestr(name, data)
    with pytest.raises(UnsupportedFile, match="could run code"):
        graft.compile(bad)
    assert not (tmp_path / "ran").exists()


class Trap:
    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (pathlib.Path.touch, (self.path,))
