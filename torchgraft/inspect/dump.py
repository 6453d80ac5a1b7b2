"""`Config(dump=...)`: the graph after each step that changed it, as numbered files."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchgraft import _torch
from torchgraft.errors import BadValue
from torchgraft.fx import edit, meta
from torchgraft.inspect import draw, netron
from torchgraft.inspect.graph import Row, rows
from torchgraft.passes.history import Change
from torchgraft.plan import Plan
from torchgraft.verify.script import needs, source

CAPTURED = "captured"


class Dump:
    """Writes the graphs of one program into a folder of its own: `NNN_name/NNN_step.ext`.

    The number is the step's place in the pipeline; one that changed nothing leaves no file.
    """

    def __init__(self, folder: str, formats: Sequence[str], name: str, gm: GraphModule) -> None:
        self.formats, self.name = formats, name
        self.home = _fresh(pathlib.Path(folder), name)
        self._numbers = itertools.count()
        self._kept: set[str] = set()
        self._write(CAPTURED, gm)

    def step(self, name: str, gm: GraphModule, change: Change) -> None:
        """Write the graph that a step left."""
        if change:
            self._write(name, gm)
        else:
            next(self._numbers)

    def plan(self, plan: Plan) -> None:
        """Write what runs in the end."""
        _save(self.home / "plan.txt", f"{plan}\n")

    def _write(self, step: str, gm: GraphModule) -> None:
        stem = f"{next(self._numbers):03}_{_slug(step)}"
        for ext in self.formats:
            path = self.home / f"{stem}.{ext}"
            if ext == "onnx":
                path.write_bytes(netron.onnx(gm, self.name))
            elif ext == "py":
                self._keep_constants(gm)
                _save(path, script(gm, f"{self.name} after {step!r}"))
            else:
                _save(path, _TEXTS[ext](gm))

    def _keep_constants(self, gm: GraphModule) -> None:
        """Each constant in a file of its own, once for all the scripts beside it."""
        for node in gm.graph.find_nodes(op="get_attr"):
            name = str(node.target)
            held = meta.attribute(gm, name)
            if name in self._kept or not isinstance(held, Tensor):
                continue
            self._kept.add(name)
            (self.home / "constants").mkdir(exist_ok=True)
            torch.save(held.detach(), self.home / "constants" / f"{name}.pt")


def _fresh(folder: pathlib.Path, name: str) -> pathlib.Path:
    """A new folder, numbered after those that are there; safe when several processes make them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(len(list(folder.iterdir()))):
        home = folder / f"{number:03}_{_slug(name)}"
        try:
            home.mkdir()
        except FileExistsError:
            continue
        return home
    raise AssertionError


def _slug(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_") or "program"


def _save(path: pathlib.Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


# --- Text that runs again ---

_SCRIPT = '''\
"""{title}

Written by torchgraft {version} with torch {torch}. Run it, or take `Graph` from it:
`runpy.run_path("this file")["Graph"]`. Its constants lie beside it.
"""

import math
import pathlib

import torch
from torch import device, inf, nan  # noqa: F401
{needs}
CONSTANTS = pathlib.Path(__file__).parent / "constants"


class Graph(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in {names}:
            setattr(self, name, torch.load(CONSTANTS / f"{{name}}.pt", weights_only=True))

{forward}

def inputs():
    """Random inputs of the shapes that were declared; whole numbers are 0."""
    return [
{inputs}    ]


if __name__ == "__main__":
    with torch.no_grad():
        for value in Graph()(*inputs()):
            is_tensor = isinstance(value, torch.Tensor)
            print(*(tuple(value.shape), value.dtype) if is_tensor else (value,))
'''


def script(gm: GraphModule, title: str) -> str:
    """The graph as a Python file that runs."""
    from torchgraft import __version__

    names = dict.fromkeys(str(node.target) for node in gm.graph.find_nodes(op="get_attr"))
    held = [name for name in names if isinstance(meta.attribute(gm, name), Tensor)]
    given = [_input(node.meta.get("val")) for node in gm.graph.find_nodes(op="placeholder")]
    return _SCRIPT.format(
        title=title.replace('"""', ""),
        version=__version__,
        torch=torch.__version__,
        needs=needs(gm),
        names=held,
        forward=source(gm),
        inputs="".join(f"        {text},\n" for text in given),
    )


def _input(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(_torch.hint(value))
    sizes = tuple(int(_torch.hint(size)) for size in value.shape)
    make = "randn" if value.is_floating_point() or value.dtype.is_complex else "zeros"
    return f"torch.{make}({sizes}, dtype={value.dtype}, device={str(value.device)!r})"


# --- Text that is read again ---

FORMAT = "torchgraft.graph"


def to_json(gm: GraphModule) -> str:
    """The rows of a graph; `read_json` gives them back."""
    data = {"format": FORMAT, "version": 1, "nodes": [dataclasses.asdict(r) for r in rows(gm)]}
    return json.dumps(data, indent=1) + "\n"


def read_json(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a graph that was dumped as JSON."""
    try:
        data = json.loads(pathlib.Path(path).read_text("utf-8"))
        if (data["format"], data["version"]) != (FORMAT, 1):
            raise ValueError(f"its format is {data['format']} {data['version']}")
        return [Row(**{**node, "inputs": tuple(node["inputs"])}) for node in data["nodes"]]
    except (ValueError, TypeError, KeyError) as error:
        raise BadValue("read_json", str(path), f"a graph that was dumped ({error})") from None


_TEXTS = {
    "txt": lambda gm: f"{edit.text(gm)}\n",
    "json": to_json,
    "dot": draw.dot,
    "svg": draw.svg,
    "pbtxt": netron.pbtxt,
}
