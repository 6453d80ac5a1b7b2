"""`torch.ops.aie`: operators that are kernels inside Torch-AIE. Scripts declare stand-ins for them
to trace with, whose results mean nothing; a program must not run one of those unawares."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from torchgraft import _torch
from torchgraft.compat.refused import REFUSED, Missing
from torchgraft.compile import Compiled
from torchgraft.config import Config
from torchgraft.convert.define import candidates
from torchgraft.errors import NotOnThisDevice
from torchgraft.op.define import find
from torchgraft.passes.registry import visible_ops

SPACE = "aie"
_plain: Any = type(getattr(torch.ops, SPACE))


class Namespace(_plain):  # type: ignore[misc]
    """`torch.ops.aie`, which knows why an operator is not there."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            full = f"torch.ops.{SPACE}.{name}"
            raise Missing(full, REFUSED[f"torch.ops.{SPACE}"]) from None


def activate() -> None:
    """Let `torch.ops.aie` be that."""
    if not isinstance(getattr(torch.ops, SPACE), Namespace):
        setattr(torch.ops, SPACE, Namespace(SPACE))


def of_script(script: torch.jit.ScriptModule) -> list[str]:
    """The names of such operators in a script."""
    return re.findall(rf" = {SPACE}::(\w+)", str(script.inlined_graph))


def of_program(compiled: Compiled) -> list[str]:
    """The names of such operators in the graphs that a program is made from."""
    targets = [node.target for taken in compiled.captures for node in taken.gm.graph.nodes]
    ops = [target for target in targets if _torch.is_op(target) and target.namespace == SPACE]
    return [op._schema.name.partition("::")[2] for op in ops]


def check(names: Iterable[str], config: Config) -> None:
    """Raise for a name that has neither a converter nor a body of `graft.op`."""
    known = {op.name for op in visible_ops()}
    converted = candidates(config)
    for name in names:
        if f"{SPACE}::{name}" not in known and find(f"{SPACE}::{name}") not in converted:
            raise NotOnThisDevice(
                f"torch.ops.{SPACE}.{name} (the one here was only declared to trace with)",
                f"Say what it computes: @graft.op('{SPACE}::{name}'), or a converter for it.",
            )
