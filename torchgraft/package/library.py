"""Regions as shared libraries: a linker that makes them, and what it knows of each."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft import _torch
from torchgraft._torch import aot
from torchgraft.codegen import inductor
from torchgraft.config import Config
from torchgraft.errors import NotSavable
from torchgraft.link import Linker

_NUMBERS = itertools.count()


@dataclasses.dataclass
class Library:
    """A region that was compiled to a shared library. Callable as the region."""

    path: str
    device: torch.device
    constants: Mapping[str, Tensor]
    ints: Sequence[bool]  # which inputs are integers
    int_outputs: Sequence[bool]

    def __post_init__(self) -> None:
        run = aot.load(self.path, self.device, self.constants)
        self.run = with_ints(run, self.ints, self.int_outputs)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        return self.run(args)


def with_ints(run: _torch.Flat, ints: Sequence[bool], outputs: Sequence[bool]) -> _torch.Flat:
    """A library takes and gives tensors only: an integer goes in as the size of a tensor, and comes
    out as a tensor without dims."""
    if not any(ints) and not any(outputs):
        return run

    def wrapped(args: list[Any]) -> Sequence[Any]:
        given = [_ONE.expand(a) if i else a for a, i in zip(args, ints, strict=True)]
        args.clear()
        made = run(given)
        return [int(m) if i else m for m, i in zip(made, outputs, strict=True)]

    return wrapped


_ONE = torch.zeros((), dtype=torch.uint8)


def _carried(gm: GraphModule, values: Sequence[Any]) -> list[Any]:
    """Let each integer input of a region be the size of a tensor: AOTInductor takes no integers."""
    carried = list(values)
    mode = _torch.fake_mode_of(values)
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if isinstance(values[i], Tensor):
            continue
        if not _torch.is_size(mode, values[i]):
            raise NotSavable(f"{node.name} may be negative", "")  # so the region runs on ATen
        with mode:
            carried[i] = torch.empty_strided((values[i],), (0,), dtype=torch.uint8)
        with gm.graph.inserting_after(node):
            size = gm.graph.call_function(torch.ops.aten.sym_size.int, (node, 0))
        node.replace_all_uses_with(size, delete_user_cb=lambda user, size=size: user is not size)
        size.meta["val"], node.meta = values[i], {"val": carried[i]}
    gm.recompile()
    return carried


class LibraryLinker(Linker):
    """Compiles every region to a library in `gm.meta["folder"]`."""

    def generate(
        self, inner: GraphModule, inputs: Sequence[Node], config: Config | None = None
    ) -> _torch.Flat:
        values = [node.meta["val"] for node in inputs]
        made = [node.meta["val"] for node in inner.graph.output_node().args[0]]  # type: ignore[union-attr]
        kinds = [v.device for v in (*values, *made) if isinstance(v, Tensor)]
        device = next((d for d in kinds if d.type != "cpu"), torch.device("cpu"))
        path = os.path.join(self.gm.meta["folder"], f"region{next(_NUMBERS)}", "region.so")
        prepare = self.gm.meta["prepare"]
        carried = _carried(inner, values)
        task = inductor.prepared(inner, carried, config or self.config)
        constants = aot.compile(
            task.gm,
            carried,
            options=task.options,
            path=path,
            folded=prepare.folded,
            keep=task.keep,
            onednn=task.onednn,
            generates=task.generates,
        )
        return Library(path, device, constants, _ints(values), _ints(made))


def _ints(values: Sequence[Any]) -> list[bool]:
    return [not isinstance(value, Tensor) for value in values]
