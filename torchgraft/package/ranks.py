"""One rank compiles, the others load its package."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torchgraft.comm.ops import collectives
from torchgraft.comm.turn import Turn, turn
from torchgraft.config import Config
from torchgraft.fx.capture import Capture
from torchgraft.package.key import Key


def turn_of(key: Key, captures: Sequence[Capture], config: Config) -> Turn | None:
    """The part of this rank in compiling a program that all ranks compile; None where the program
    is this process's alone. Weights may differ: a package takes new ones without being compiled
    again."""
    if not any(any(collectives(taken.gm.graph.nodes)) for taken in captures):
        return None
    if config.verify != "off":  # which runs the program, and so needs every rank
        return None
    own = {name for taken in captures for name in taken.weights}
    kept = {name: held for name, held in key["weights"].items() if name not in own}
    return turn(json.dumps({**key, "weights": kept}, sort_keys=True))
