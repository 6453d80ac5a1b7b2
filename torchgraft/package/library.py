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
from torchgraft.codegen import inductor
from torchgraft.codegen.decompose import decompose
from torchgraft.package import _torch as private
from torchgraft.program import Linker

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
        run = private.aot_load(self.path, self.device, self.constants)
        self.run = with_ints(run, self.ints, self.int_outputs)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        return self.run(args)


def with_ints(run: _torch.Flat, ints: Sequence[bool], outputs: Sequence[bool]) -> _torch.Flat:
    """A library takes and gives tensors only; integers go as tensors without dims."""
    if not any(ints) and not any(outputs):
        return run

    def wrapped(args: list[Any]) -> Sequence[Any]:
        given = [torch.tensor(a) if i else a for a, i in zip(args, ints, strict=True)]
        args.clear()
        made = run(given)
        return [int(m) if i else m for m, i in zip(made, outputs, strict=True)]

    return wrapped


class LibraryLinker(Linker):
    """Compiles every region to a library in `gm.meta["folder"]`."""

    def generate(self, inner: GraphModule, inputs: Sequence[Node]) -> _torch.Flat:
        values = [node.meta["val"] for node in inputs]
        made = [node.meta["val"] for node in inner.graph.output_node().args[0]]  # type: ignore[union-attr]
        path = os.path.join(self.gm.meta["folder"], f"region{next(_NUMBERS)}", "region.so")
        prepare = self.gm.meta["prepare"]
        gm = decompose(inner, values, _torch.inductor_decompositions())
        options = inductor.options_for(values, self.config)
        constants = private.aot_compile(
            gm, values, options=options, path=path, folded=prepare.folded
        )
        kinds = [v.device for v in (*values, *made) if isinstance(v, Tensor)]
        device = next((d for d in kinds if d.type != "cpu"), torch.device("cpu"))
        return Library(path, device, constants, _ints(values), _ints(made))


def _ints(values: Sequence[Any]) -> list[bool]:
    return [not isinstance(value, Tensor) for value in values]
