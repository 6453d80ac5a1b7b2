"""Regions by Inductor, torch's own code generator."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from torchgraft import _torch
from torchgraft._torch import generator
from torchgraft.config import Config
from torchgraft.fx.decompose import decompose

log = logging.getLogger("torchgraft")


def generate(
    gm: GraphModule,
    inputs: Sequence[Any],
    config: Config,
    *,
    is_inference: bool,
    is_backward: bool,
    own: Callable[[Any], Any],
) -> _torch.Flat:
    """Code for one region. `gm` is the generator's to change; constants it keeps go through
    `own`, which copies those that belong to the caller."""
    options = options_for(inputs, config)
    gm = decompose(gm, inputs, _torch.inductor_decompositions())
    return generator.compile_graph(
        gm, inputs, options=options, is_inference=is_inference, is_backward=is_backward, own=own
    )


def options_for(inputs: Sequence[Any], config: Config) -> dict[str, Any]:
    """Inductor's options for a region with these inputs."""
    options = generator.mode_options(_MODES.get(config.mode, config.mode))
    mode, symbols = _torch.fake_mode_of(inputs), {s for v in inputs for s in _torch.symbols_of(v)}
    if any(_torch.symbol_range(mode, symbol)[0] < 2 for symbol in symbols):
        options["layout_optimization"] = False  # guessing channels-last assumes that sizes exceed 1
    return options | dict(config.inductor)


_MODES = {"max-autotune": "max-autotune-no-cudagraphs"}


def unavailable(values: Sequence[Any]) -> str | None:
    """Why no code can be generated for these values on this machine, or None."""
    on_cpu = any(isinstance(v, Tensor) and v.device.type == "cpu" for v in values)
    if on_cpu and _compiler() is None:
        return "no C++ compiler on this machine"
    return None


@functools.cache
def _compiler() -> str | None:
    found = generator.has_compiler()
    if found is None:
        log.warning(
            "torchgraft: no C++ compiler found, so CPU programs run on ATen, node by node. "
            "Install g++ or clang++ (or set CXX) for generated code; `torchgraft doctor` checks."
        )
    return found
