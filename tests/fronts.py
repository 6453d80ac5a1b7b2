"""One model through any front end."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from torch import Tensor, nn

import torchgraft as graft


def through(
    front: str, model: nn.Module, x: Tensor, config: graft.Config, tmp: pathlib.Path
) -> Any:
    """The model through one front end, run once."""
    if front == "torch.compile":
        with torch.no_grad():
            run = torch.compile(model, backend=graft.backend(config))
            run(x)
        return run
    program: Any = model
    if front == "exported":
        return graft.compile(torch.export.export(model, (x,)), config=config)
    if front in ("traced", "loaded"):
        program = torch.jit.trace(model, (x,))
    if front == "loaded":
        torch.jit.save(program, tmp / "m.pt")
        program = tmp / "m.pt"
    if front == "symbolic":
        program = torch.fx.symbolic_trace(model)
    if front == "scripted":
        program = torch.jit.script(model)
    return graft.compile(program, (x,), config=config)
