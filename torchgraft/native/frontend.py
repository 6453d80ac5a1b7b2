"""What compiles for a C++ program: a module and a spec in a folder become a compiled module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchgraft.config import Config
from torchgraft.fx.script.runtime import ENUMS
from torchgraft.inputs import Input
from torchgraft.package.save import packaged
from torchgraft.package.script import to_script


def rounding(precision: str | None) -> dict[str, bool]:
    """Options of Inductor with which halves are rounded after every call, as on an NPU; it keeps
    them in float32 inside a kernel otherwise."""
    return {"emulate_precision_casts": True} if precision in ("float16", "mixed-float16") else {}


def serve(folder: str) -> None:
    """Compile `given.pt` as `request.json` says; leaves `module.pt`, `program.graft` and
    `answer.json`, which has the error where there was one."""
    place = Path(folder)
    answer: dict[str, str] = {}
    try:
        _compile(place, json.loads((place / "request.json").read_text(encoding="utf-8")))
    except Exception as error:  # the C++ side raises it
        answer["error"] = f"{type(error).__name__}: {error}"
    (place / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


def _compile(place: Path, request: Mapping[str, Any]) -> None:
    module = torch.jit.load(place / "given.pt").eval()  # type: ignore[no-untyped-call]
    config = Config(
        precision=request["precision"],
        inductor=rounding(request["precision"]),
        min_block_size=request["min_block_size"],
        require_full_compilation=request["require_full_compilation"],
        torch_executed_ops=tuple(request["torch_executed_ops"]),
        torch_executed_modules=tuple(request["torch_executed_modules"]),
    )
    compiled, package = packaged(module, _inputs(request["inputs"]), config)
    content = package.content()
    (place / "program.graft").write_bytes(content)
    to_script(compiled, content).save(str(place / "module.pt"))


def _inputs(gears: list[list[dict[str, Any]]]) -> tuple[Input, ...]:
    """The inputs of one set of shapes, or of several."""
    made = []
    for forms in zip(*gears, strict=True):
        dtype = ENUMS["ScalarType"][forms[0]["dtype"]]
        if len(forms) > 1:
            made.append(Input(gears=[form["shape"] for form in forms], dtype=dtype))
        elif "shape" in forms[0]:
            made.append(Input(forms[0]["shape"], dtype=dtype))
        else:
            low = [max(size, 0) for size in forms[0]["min"]]
            high = [None if size < 0 else size for size in forms[0]["max"]]
            made.append(Input(min_shape=low, max_shape=high, dtype=dtype))
    return tuple(made)
