"""A difference as a script that stands alone: two modules as source, constants and inputs."""

from __future__ import annotations

import pathlib
import re
import tempfile
import textwrap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchgraft import _torch
from torchgraft.fx import meta

_TEXT = '''\
"""{title}

Written by torchgraft {version} with torch {torch}. Compares two graphs on the inputs beside it.
"""

import math
import pathlib

import torch
from torch import device, inf, nan  # noqa: F401
{needs}
held = torch.load(pathlib.Path(__file__).with_suffix(".pt"), weights_only=True)


class Before(torch.nn.Module):
{before}

class After(torch.nn.Module):
{after}

def run(model, side):
    for name, value in held[side].items():
        setattr(model, name, value)
    torch.manual_seed(0)
    inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in held["inputs"]]
    with torch.no_grad():
        return model(*inputs), inputs


torch.testing.assert_close(run(After(), "after"), run(Before(), "before"), check_stride=True)
print("no difference")
'''


def write(
    folder: str | None, by: str, before: GraphModule, after: GraphModule, inputs: Sequence[Any]
) -> str | None:
    """The path of the script; None where a graph holds what cannot be saved (a branch)."""
    sides = {"before": _constants(before), "after": _constants(after)}
    if any(not isinstance(v, Tensor) for held in sides.values() for v in held.values()):
        return None
    home = pathlib.Path(folder or tempfile.mkdtemp(prefix="torchgraft_"))
    home.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"\W+", "_", by.partition(" (")[0]).strip("_")
    path = home / f"{stem}.py"
    number = 1
    while path.exists():
        number += 1
        path = home / f"{stem}_{number}.py"
    from torchgraft import __version__

    text = _TEXT.format(
        title=f"{by} changed the result.".replace('"""', ""),
        version=__version__,
        torch=torch.__version__,
        needs=needs(before, after),
        before=source(before),
        after=source(after),
    )
    path.write_text(text)
    torch.save({**sides, "inputs": list(inputs)}, path.with_suffix(".pt"))
    return str(path)


def _constants(gm: GraphModule) -> dict[str, Any]:
    names = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
    return {name: meta.attribute(gm, name) for name in names}


def source(gm: GraphModule) -> str:
    """The `forward` of a graph, to stand in a class."""
    code = gm.graph.python_code("self").src
    return textwrap.indent(code.strip("\n"), "    ") + "\n"


def needs(*gms: GraphModule) -> str:
    """Where custom operators come from is the reader's to add."""
    ops = {
        node.target.namespace
        for gm in gms
        for node in gm.graph.nodes
        if _torch.is_op(node.target) and node.target.namespace not in ("aten", "prims", "prim")
    }
    return "".join(f"# Import what registers the operators of {name!r} here.\n" for name in ops)
