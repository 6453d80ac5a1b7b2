"""A compiled ScriptModule stays one: `torch.jit.save`, `torch.jit.load`, the same results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import process
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import torchgraft as graft
from torchgraft.errors import NotSavable


def compiled(model: Any, *args: Any, **kwargs: Any) -> graft.Compiled:
    return graft.compile(model, args, kwargs, mode="eager")


def test_save_and_load_in_another_process(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval(), torch.randn(2, 4)
    script = compiled(torch.jit.trace(model, x), x).script()
    assert isinstance(script, torch.jit.ScriptModule)
    assert_close(script(x), model(x))
    torch.jit.save(script, tmp_path / "m.pt")
    assert_close(torch.jit.freeze(torch.jit.load(tmp_path / "m.pt").eval())(x), model(x))
    safetensors.torch.save_file({"x": x, "y": model(x)}, tmp_path / "case.safetensors")
    code = (
        "import sys, torch, torchgraft, safetensors.torch\n"
        "case = safetensors.torch.load_file(sys.argv[2])\n"
        "torch.testing.assert_close(torch.jit.load(sys.argv[1])(case['x']), case['y'])\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "m.pt", tmp_path / "case.safetensors"]
    process.output(command)


def test_containers_names_and_constants() -> None:
    def fn(pair: tuple[Tensor, Tensor], more: list[Tensor], by: float, *, named: Tensor) -> Any:
        return {"sum": pair[0] + pair[1] * by, "more": more[0] - named}

    x = torch.randn(3)
    script = compiled(fn, (x, x + 1), [x * 2], 0.5, named=x).script()
    made = script((x, x + 1), [x * 2], 0.5, named=x)
    assert_close(made, fn((x, x + 1), [x * 2], 0.5, named=x))
    with pytest.raises(torch.jit.Error, match=r"compiled for by = 0.5"):
        script((x, x + 1), [x * 2], 0.25, named=x)


def test_several_programs_in_one_process_and_their_gears() -> None:
    gears = graft.Input(gears=[(2,), (5,)])
    scripts = [compiled(lambda x, by=by: x * by, gears).script() for by in (2, 3)]
    for by, script in zip((2, 3), scripts, strict=True):
        for n in (2, 5):
            assert_close(script(torch.ones(n)), torch.full((n,), float(by)))
    with pytest.raises(RuntimeError, match="one of the gears"):
        scripts[0](torch.ones(3))


def test_inside_a_larger_scripted_model() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: torch.jit.ScriptModule) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 1

    script = torch.jit.script(Outer(compiled(torch.sin, torch.ones(2)).script()))
    assert_close(script(torch.ones(2)), torch.ones(2).sin() + 1)


def test_a_damaged_engine_is_refused() -> None:
    script = compiled(torch.sin, torch.ones(2)).script()
    script.engine[len(script.engine) // 2] ^= 1
    with pytest.raises(RuntimeError, match="not a package that can be loaded"):
        script(torch.ones(2))


def test_what_it_cannot_hold() -> None:
    def write(x: Tensor) -> Tensor:
        return x.add_(1)

    with pytest.raises(NotSavable, match="writes to its inputs"):
        compiled(write, torch.ones(2)).script()
    with pytest.raises(NotSavable, match="reads tensors of the model"):
        graft.compile(nn.Linear(2, 2), (torch.ones(2),), mode="eager", freeze=False).script()
