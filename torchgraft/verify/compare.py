"""Running two graphs on the same inputs and telling whether anybody could see a difference."""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from torchgraft import _torch
from torchgraft.fx import label
from torchgraft.fx.dialect import is_random

FACTOR = 8.0
"""Rounding errors that a rewrite may add at each of `sqrt(depth)` steps, in units of the dtype's
precision: rewrites change the order of sums, and errors in a row partly cancel."""


@dataclasses.dataclass
class Outcome:
    """What a caller sees of a run: results, the inputs afterwards, and who shares whose memory."""

    outputs: list[Any]
    inputs: list[Any]
    aliases: list[Any]


class _Run(Interpreter):
    """Node by node on ATen. Each random operator draws the same at its n-th call in any graph."""

    def __init__(self, gm: GraphModule, see: Callable[[Node, Any], None] | None = None) -> None:
        super().__init__(gm)
        self.see, self.draws = see, collections.Counter[str]()

    def run_node(self, n: Node) -> Any:
        if is_random(n):
            self.draws[str(n.target)] += 1
            torch.manual_seed(self.draws[str(n.target)])
        result = super().run_node(n)
        if self.see is not None and n.op != "output":
            self.see(n, result)
        return result


class Seeded:
    """A random operator at its n-th call: it draws what `_Run` lets it draw, wherever it runs."""

    def __init__(self, target: Any, seed: int) -> None:
        self.target, self.seed = target, seed
        self.__name__ = str(target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(self.seed)
        return self.target(*args, **kwargs)


def seeded(gm: GraphModule) -> GraphModule | None:
    """A copy of a graph that draws the same numbers at each run, by ATen; None where it draws none.

    Generated code draws other numbers than ATen does from one seed.
    """
    twin = GraphModule(gm, copy.deepcopy(gm.graph))
    label.rebind(twin.graph)
    twin.meta.update(gm.meta)
    draws = collections.Counter[str]()
    for node in twin.graph.nodes:
        if is_random(node):
            draws[str(node.target)] += 1
            node.target = Seeded(node.target, draws[str(node.target)])
            node.meta["pinned"] = "its numbers are compared with ATen's"
    return twin if draws else None


def draws_inside(gm: GraphModule) -> bool:
    """Whether a branch or the body of a loop draws random numbers."""
    inner = [m for m in gm.modules() if isinstance(m, GraphModule) and m is not gm]
    return any(is_random(node) for one in inner for node in one.graph.nodes)


def clones(inputs: Sequence[Any]) -> list[Any]:
    """Copies with the same strides, for a run that may write them."""
    return [
        value.clone(memory_format=torch.preserve_format) if isinstance(value, Tensor) else value
        for value in inputs
    ]


def kept(value: Any) -> Any:
    """A copy that later writes do not reach."""
    if isinstance(value, (list, tuple)):
        return [kept(item) for item in value]
    return value.clone() if isinstance(value, Tensor) else value


def outcome(
    run: Callable[[list[Any]], Sequence[Any]], inputs: Sequence[Any], seed: int = 0
) -> Outcome:
    """Run on copies of the inputs."""
    with _torch.real(seed):
        given = clones(inputs)
        outputs = list(run(list(given)))
        return Outcome(outputs, given, _aliases(outputs, given))


def on_aten(
    gm: GraphModule, inputs: Sequence[Any], see: Callable[[Node, Any], None] | None = None
) -> Outcome:
    """Run a graph node by node on ATen; `see` is shown every call's result."""

    def run(args: list[Any]) -> Sequence[Any]:
        found = _Run(gm, see).run(*args)
        return found if isinstance(found, (tuple, list)) else [found]

    return outcome(run, inputs)


def _aliases(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """For each output the first input, or else the first output, whose memory it shares."""
    owners: dict[int, str] = {}
    for i, value in enumerate(inputs):
        if (key := _memory(value)) is not None:
            owners.setdefault(key, f"input {i}")
    found = []
    for i, value in enumerate(outputs):
        key = _memory(value)
        found.append(owners.get(key) if key is not None else None)
        if key is not None:
            owners.setdefault(key, f"output {i}")
    return found


def _memory(value: Any) -> int | None:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.numel() == 0:
        return None
    return value.untyped_storage().data_ptr()


def difference(
    want: Outcome, got: Outcome, depth: int, *, values: bool = True, memory: bool = True
) -> str | None:
    """What a caller could tell apart, with its size, or None."""
    with _torch.real():
        return _difference(want, got, depth, values, memory)


def _difference(want: Outcome, got: Outcome, depth: int, values: bool, memory: bool) -> str | None:
    if len(want.outputs) != len(got.outputs):
        return f"{len(want.outputs)} outputs became {len(got.outputs)}"
    for i, (one, other) in enumerate(zip(want.outputs, got.outputs, strict=True)):
        if (text := unlike(one, other, depth, values=values, strides=memory)) is not None:
            return f"output {i}: {text}"
    for i, (one, other) in enumerate(zip(want.inputs, got.inputs, strict=True)):
        if (text := unlike(one, other, depth, values=values)) is not None:
            return f"input {i} after the call: {text}"
    for i, (owner, now) in enumerate(zip(want.aliases, got.aliases, strict=True)):
        if memory and owner != now:
            return f"output {i}: it shared memory with {owner}, now with {now}"
    return None


def unlike(
    want: Any, got: Any, depth: int, *, values: bool = True, strides: bool = False
) -> str | None:
    """How two values differ by more than rounding, or None."""
    if isinstance(want, (tuple, list)) and isinstance(got, (tuple, list)):
        if len(want) != len(got):
            return f"{len(want)} parts became {len(got)}"
        found = (
            unlike(*pair, depth, values=values, strides=strides)
            for pair in zip(want, got, strict=True)
        )
        return next((text for text in found if text is not None), None)
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        same = type(want) is type(got) and (want == got or want != want)
        return None if same or isinstance(want, torch.nn.Module) else f"{want!r} became {got!r}"
    for what in ("dtype", "device", "layout", "shape"):
        if getattr(want, what) != getattr(got, what):
            return f"{what} {_plain(getattr(want, what))} became {_plain(getattr(got, what))}"
    if strides and want.layout == torch.strided and _strides(want) != _strides(got):
        return f"strides {tuple(want.stride())} became {tuple(got.stride())}"
    return _apart(want, got, depth) if values and want.numel() else None


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, torch.Size) else value


def _strides(tensor: Tensor) -> list[int]:
    """The strides that anybody can tell: those of dims of more than one element."""
    if tensor.numel() == 0:
        return []
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def tolerance(dtype: torch.dtype, depth: int) -> float:
    """How much two right results may differ, relative to the largest number in them."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    precision = torch.finfo(dtype).eps
    # Long sums round more than one step does; at low precision that must not hide everything.
    return min(max(FACTOR * precision * math.sqrt(max(depth, 1)), 64 * precision), 0.1)


def _apart(want: Tensor, got: Tensor, depth: int) -> str | None:
    if want.is_quantized or want.layout != torch.strided:
        return None if torch.equal(want, got) else "values differ"
    wide = torch.complex128 if want.dtype.is_complex else torch.float64
    one, other = want.to(wide), got.to(wide)
    if torch.equal(want, got):
        return None
    error = (one - other).abs()
    error[(one == other) | (one.isnan() & other.isnan())] = 0
    error = torch.nan_to_num(error, nan=math.inf, posinf=math.inf)
    worst = float(error.max())
    finite = one.abs()[one.isfinite()]
    scale = float(finite.max()) if finite.numel() else 1.0
    allowed = tolerance(want.dtype, depth) * scale
    if worst <= allowed:
        return None
    count = int((error > allowed).sum())
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    return (
        f"{count} of {want.numel()} numbers differ, the worst by {worst:.3g} at {list(at)} "
        f"({_shown(want, at)} became {_shown(got, at)}; {allowed:.3g} is rounding)"
    )


def _shown(tensor: Tensor, at: tuple[int, ...]) -> str:
    value = tensor[at].item()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def depth_of(gm: GraphModule) -> int:
    """The longest row of calls, each using the one before."""
    depths: dict[Node, int] = {}
    for node in gm.graph.nodes:
        used = max((depths[n] for n in node.all_input_nodes), default=0)
        depths[node] = used + (node.op == "call_function")
    return max(depths.values(), default=0)


def usable(found: Outcome) -> bool:
    """Whether a run shows anything: its numbers are not all infinite or undefined."""
    with _torch.real():
        floats = [t for t in found.outputs if isinstance(t, Tensor) and t.dtype.is_floating_point]
        return all(bool(t.isfinite().any()) for t in floats if t.numel())
