"""Sizes that come in gears: `set_dim_gears`, and what a backend makes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.fx import GraphModule

from torchgraft._torch import dynamo
from torchgraft.compat.air.config import CompilerConfig

_MOST = 100


def set_dim_gears(t: Tensor, dim_gears: Mapping[int, Sequence[int]]) -> None:
    """Say which sizes a dim will have: each gets a program of its own, and is fixed in it."""
    assert isinstance(t, Tensor), f"set_dim_gears: expected a tensor, got {t!r}"
    assert isinstance(dim_gears, dict), f"set_dim_gears: expected a dict, got {dim_gears!r}"
    for dim, gears in dim_gears.items():
        fits = isinstance(dim, int) and 0 <= dim < t.ndim
        assert fits, f"set_dim_gears: dim {dim!r} is not one of the {t.ndim} of this tensor"
        assert isinstance(gears, (list, tuple)), f"dim {dim}: expected a list of sizes"
        whole = all(isinstance(g, int) and g > 0 for g in gears)
        assert whole, f"dim {dim}: expected sizes from 1 on, got {gears}"
        few = 2 <= len(gears) <= _MOST
        assert few, f"dim {dim}: expected 2 to {_MOST} gears, got {len(gears)}"
        assert t.shape[dim] in gears, f"dim {dim} is {t.shape[dim]}, which is no gear of {gears}"
    before = getattr(t, "_torchair_gears", None)
    given = {dim: tuple(gears) for dim, gears in dim_gears.items()}
    assert before in (None, given), f"set_dim_gears: the gears of this tensor are {before} already"
    t._torchair_gears = given  # type: ignore[attr-defined]
    for dim in given:
        dynamo.mark_static(t, dim)


def expect(gm: GraphModule, config: CompilerConfig) -> None:
    """Let torch.compile make a program for each gear of a graph's inputs, and no more than that.

    Gears of several dims come together in pairs (`zip`, so there must be as many) or each with
    each (`product`).
    """
    found = [getattr(one, "_torchair_gears", {}) for one in dynamo.real_inputs(gm)]
    counts = [len(gears) for one in found for gears in one.values()]
    if not counts:
        return
    policy = config.inference_config.dynamic_gears_merge_policy.value
    if policy == "zip":
        same = len(set(counts)) == 1
        assert same, (
            f"set_dim_gears: {counts} gears cannot be paired; give every dim as many, or set "
            f"config.inference_config.dynamic_gears_merge_policy = 'product'"
        )
    programs = counts[0] if policy == "zip" else math.prod(counts)
    assert programs <= _MOST, f"set_dim_gears: {programs} programs are more than {_MOST}"
    dynamo.allow_recompiles(programs)
