"""`pattern.check()`: does the replacement give what the pattern gives?"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchgraft import _torch
from torchgraft.config import Config
from torchgraft.errors import NeverFired, PatternChanged, UnknownName
from torchgraft.fx import meta
from torchgraft.passes.pattern import trace
from torchgraft.passes.pattern.rewrite import apply
from torchgraft.passes.pattern.search import Index
from torchgraft.passes.pattern.slots import Slot, Variant, order


@dataclasses.dataclass(frozen=True)
class Checked:
    """What `check` tried: how many inputs it drew, on how many the replacement fired, and the
    largest difference it saw, in units of what the dtype allows (1 would be too much)."""

    trials: int
    fired: int
    worst: float
    refusals: tuple[str, ...]


def check(pattern: Any, trials: int, seed: int, given: Mapping[str, Any]) -> Checked:
    """Run the pattern and its replacement on drawn inputs, and compare."""
    names = [slot.name for slot in pattern.slots]
    for name in given:
        if name not in names:
            raise UnknownName("argument", name, names, where=f"pattern {pattern.name!r}")
    draw = random.Random(seed)
    fired, worst, refusals = 0, 0.0, dict[str, None]()
    for trial in range(trials):
        template = pattern.templates[trial % len(pattern.templates)]
        values = _draw(pattern.slots, template.variant, given, draw)
        try:
            want = _outputs(pattern.fn(*_copied(values)))
        except Exception as error:  # sizes that do not fit each other: not a case
            refusals[f"the pattern itself: {error}".splitlines()[0]] = None
            continue
        got, refusal = _rewritten(pattern, values, frozen=bool(trial % 2))
        if got is None:
            refusals[refusal] = None
            continue
        fired += 1
        for i, (one, two) in enumerate(zip(want, got, strict=True)):
            off = _distance(pattern, one, two)
            worst = max(worst, off)
            if not off <= 1:
                why = f"output {i} differs by {off:.1f} times what {one.dtype} allows"
                raise PatternChanged(pattern.name, why, values, _shown(values))
    if not fired:
        raise NeverFired(pattern.name, refusals)
    return Checked(trials, fired, worst, tuple(refusals))


def _draw(
    slots: list[Slot], variant: Variant, given: Mapping[str, Any], draw: random.Random
) -> dict[str, Any]:
    sizes: dict[str, int] = {}
    values: dict[str, Any] = {}
    side = draw.randrange(2)
    for slot in slots:
        if slot.name in given:
            value = given[slot.name]
            if isinstance(value, list) and not slot.many:
                value = draw.choice(value)
        elif slot.name in variant.fixed:
            value = variant.fixed[slot.name]
        elif variant.dims and slot.kind is int:  # a list, or it were fixed
            value = order(variant, side)
            draw.shuffle(value)
        else:
            count = 2 if slot.many else 1
            items = [_value(slot, variant, side, sizes, draw) for _ in range(count)]
            value = items if slot.many else items[0]
        values[slot.name] = value
    return values


def _value(
    slot: Slot, variant: Variant, side: int, sizes: dict[str, int], draw: random.Random
) -> Any:
    if slot.kind is float:
        return round(draw.uniform(0.05, 4), 3)
    if slot.kind is not Tensor:
        return draw.randint(-3, 12)
    shape = [
        int(dim) if dim.isdigit() else sizes.setdefault(dim, 2 * draw.randint(1, 6))
        for dim in variant.tensors[slot.name].dims
    ]
    dtype = variant.dtype(slot.name, side)
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    low = 0 if dtype is torch.uint8 else -100
    return torch.randint(low, 100, shape, generator=generator, dtype=dtype)


def _copied(values: Mapping[str, Any]) -> list[Any]:
    copy = _torch.map_leaves(lambda v: v.clone() if isinstance(v, Tensor) else v, dict(values))
    return list(copy.values())


def _outputs(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _shown(values: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} = {meta.describe(v) if isinstance(v, Tensor) else v}" for name, v in values.items()
    ]


def _rewritten(
    pattern: Any, values: Mapping[str, Any], frozen: bool
) -> tuple[list[Tensor] | None, str]:
    """What the rewritten graph gives, or why it was not rewritten. With `frozen`, every tensor
    but the first is a weight."""
    mode = _torch.new_fake_mode()
    fakes = _torch.map_leaves(
        lambda v: _torch.fake_of(mode, v) if isinstance(v, Tensor) else v, dict(values)
    )
    gm, leaves = trace.graph(pattern.fn, fakes, mode)
    inputs = [values[n] if i is None else values[n][i] for n, i in leaves]
    if frozen:
        _freeze(gm, inputs)
        inputs = inputs[:1]
    outcome = apply(pattern, Index(gm), Config())
    if not outcome.hits:
        return None, str(outcome.miss)
    meta.check(gm, pattern.name, len(inputs), len(meta.outputs_of(gm)))
    gm.recompile()
    with torch.no_grad():
        return list(gm(*(tensor.clone() for tensor in inputs))), ""


def _freeze(gm: GraphModule, inputs: list[Tensor]) -> None:
    """Make constants of all inputs but the first."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    for number, (node, tensor) in enumerate(zip(placeholders, inputs, strict=True)):
        if number == 0:
            continue
        gm.register_buffer(f"weight{number}", tensor)
        with gm.graph.inserting_before(node):
            constant = gm.graph.create_node("get_attr", f"weight{number}")
        constant.meta = {"val": node.meta["val"], "weight": f"weight{number}"}
        node.replace_all_uses_with(constant)
        gm.graph.erase_node(node)


def _distance(pattern: Any, want: Tensor, got: Tensor) -> float:
    """The largest difference over what is allowed: 16 units in the last place of the largest
    value, more for long sums; exact for integers."""
    if want.shape != got.shape or (want.dtype != got.dtype and not pattern.changes_type):
        return float("inf")
    one, two = want.double(), got.double()
    if not want.numel():
        return 0.0
    if not bool((one.isnan() == two.isnan()).all() and (one.isinf() == two.isinf()).all()):
        return float("inf")
    off = (one - two).nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    if not (want.dtype.is_floating_point and got.dtype.is_floating_point):
        return off if off == 0 else float("inf")
    scale = max(one.nan_to_num(0.0, 0.0, 0.0).abs().max().item(), 1.0)
    allowed = 16 * max(torch.finfo(want.dtype).eps, torch.finfo(got.dtype).eps) * scale
    return off / allowed
