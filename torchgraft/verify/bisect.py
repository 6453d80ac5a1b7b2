"""`graft.bisect`: which launch of a compiled program, and which node in it, goes wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from torchgraft import _torch
from torchgraft.codegen import regions
from torchgraft.codegen.regions import GENERATED, Unit
from torchgraft.errors import ResultChanged
from torchgraft.fx import meta
from torchgraft.plan import Buffer, Launch
from torchgraft.verify import compare
from torchgraft.verify.watch import copied, first_difference

if TYPE_CHECKING:
    from torchgraft.compile import Compiled
    from torchgraft.program import Program


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a compiled program first gives another value than ATen; `by` made it."""

    by: str
    node: str
    line: str | None
    error: str

    def __str__(self) -> str:
        at = f" at {self.line}" if self.line else ""
        return f"{self.by}: node {self.node!r}{at}: {self.error}"


def bisect(compiled: Compiled, inputs: Sequence[Any], model: Any = None) -> Difference | None:
    """The first launch whose results are not what ATen gives for the same graph, or None.

    Each launch is tried alone, on the values that ATen gives, so one wrong launch does not blame
    those after it; in a region the node is found by halving. With the `model` itself, the passes
    and converters are tried first, as `verify="each"` does.

    >>> import torch, torchgraft as graft
    >>> x = torch.ones(3)
    >>> graft.bisect(graft.compile(torch.nn.ReLU(), (x,), mode="eager"), (x,)) is None
    True
    """
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if model is not None:
        from torchgraft.compile import compile

        try:
            compile(model, given, config=compiled.config.replace(verify="each"))
        except ResultChanged as error:
            return Difference(error.by, error.node, error.line, error.error)
    from torchgraft.program import drawn_alike

    program, values = compiled.program_for(given)
    return in_launches(drawn_alike(program), values)


def in_launches(program: Program, inputs: Sequence[Any]) -> Difference | None:
    """The first launch that differs, run on the values that ATen gives."""
    linker, gm = program.linker, program.gm
    values: dict[Buffer, Any] = {}
    for buffer, name in program.plan.constants:
        values[buffer] = linker.constants[name]
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        values[linker.numbers[node]] = value

    def see(node: Node, value: Any) -> None:
        if node.op == "call_function" and node in linker.numbers:
            values[linker.numbers[node]] = compare.kept(value)

    compare.on_aten(gm, inputs, see)
    depth = compare.depth_of(gm)
    nodes = {buffer: node for node, buffer in linker.numbers.items()}
    for launch in program.plan.launches:
        for buffer, got in _launched(launch, linker.kernels[launch.kernel], values):
            if buffer not in values or buffer not in nodes:
                continue
            error = compare.unlike(values[buffer], got, depth)
            if error is not None:
                unit = next((u for u in linker.units if u.name == launch.kernel), None)
                node = _in_region(program, unit, values) if unit is not None else None
                return _difference(launch, node or nodes[buffer], error)
    return None


def _difference(launch: Launch, node: Node, error: str) -> Difference:
    return Difference(f"launch of {launch.kernel!r}", node.name, meta.source_line(node), error)


def _launched(launch: Launch, kernel: Any, values: dict[Buffer, Any]) -> list[tuple[Buffer, Any]]:
    def value(arg: Any) -> Any:
        return compare.clones([values[arg]])[0] if isinstance(arg, Buffer) else arg

    args = map_aggregate(launch.args, value)
    kwargs = {key: map_aggregate(arg, value) for key, arg in launch.kwargs}
    with _torch.real():
        result = kernel.fn(list(args)) if kernel.boxed else kernel.fn(*args, **kwargs)
    parts = result if launch.unpack else [result]
    return [
        (buffer, part)
        for buffer, part in zip(launch.outputs, parts, strict=False)
        if buffer is not None
    ]


def _in_region(program: Program, unit: Unit, values: dict[Buffer, Any]) -> Node | None:
    """The first node of a region whose code is wrong: prefixes of the region, halved."""
    linker = program.linker
    if unit.place.runs != GENERATED:
        return None

    def wrong(count: int) -> bool:
        part = Unit(unit.name, unit.place, unit.nodes[:count])
        inner, inputs, outputs = regions.extract(program.gm, part)
        if not outputs:
            return False
        run = linker.generate(inner, inputs)
        given = compare.clones([values[linker.numbers[n]] for n in inputs])
        with _torch.real():
            got = run(given)
        want = _on_aten(program, part, values)
        return any(
            compare.unlike(want[n], value, len(unit.nodes)) is not None
            for n, value in zip(outputs, got, strict=True)
            if n in want
        )

    low, high = 0, len(unit.nodes)  # a prefix of `low` nodes is right, one of `high` is wrong
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wrong(middle) else (middle, high)
    return unit.nodes[high - 1]


def _on_aten(program: Program, part: Unit, values: dict[Buffer, Any]) -> dict[Node, Any]:
    """What ATen gives for the nodes of a region."""
    numbers = program.linker.numbers
    env = {node: values[buffer] for node, buffer in numbers.items() if buffer in values}
    found: dict[Node, Any] = {}

    def value(arg: Any) -> Any:
        if not isinstance(arg, Node):
            return arg
        if arg in found:
            return found[arg]
        return env[arg] if arg in env else meta.attribute(program.gm, str(arg.target))

    with _torch.real():
        for node in part.nodes:
            call: Callable[..., Any] = node.target  # type: ignore[assignment]
            args, kwargs = map_aggregate((node.args, node.kwargs), value)
            found[node] = call(*args, **kwargs)
    return found


def at_end(program: Program, captured: Any, inputs: Sequence[Any], error: str) -> Difference:
    """Who made the compiled program differ from the captured graph: a launch, or the passes."""
    found = in_launches(program, inputs)
    if found is not None:
        return found
    guilty = first_difference(captured, copied(program.gm), inputs, {})
    if guilty is not None:
        line = meta.source_line(guilty.before)
        return Difference("the passes", guilty.before.name, line, guilty.error)
    return Difference("the compiled program", "", None, error)
