"""From a pattern's function to templates: what a graph must look like for the pattern to match.

A template comes from two traces that are compared: an argument of a call is then a `Slot`, a
literal, another `Part`, or `DERIVED` from sizes and numbers. Derived ones match anything at first;
a match is confirmed by tracing the pattern again on what it bound, where nothing is open any more.
Traces go through the normalisation that graphs go through, so there is no second dialect to know.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft import _torch
from torchgraft.config import Config
from torchgraft.errors import BadPattern, first_line
from torchgraft.fx import dialect, meta
from torchgraft.passes import builtin
from torchgraft.passes.pattern import slots as _slots
from torchgraft.passes.pattern.slots import FLOATS, Slot, Variant

aten = torch.ops.aten

_VIEW, _RESHAPE = aten.view.default, aten.reshape.default
COPY = aten.clone.default
"""It gives the value it is given, in other memory: no pattern asks for it."""
_COMMUTE = frozenset(
    {
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.maximum.default,
        aten.minimum.default,
        aten.eq.Tensor,
        aten.ne.Tensor,
        aten.logical_and.default,
        aten.logical_or.default,
        aten.bitwise_and.Tensor,
        aten.bitwise_or.Tensor,
        aten.bitwise_xor.Tensor,
    }
)
SIZED = frozenset({aten.reshape.default, aten.expand.default})
"""Their sizes are those of the result, which is compared instead: -1 and 6 may mean the same."""


class _Derived:
    def __repr__(self) -> str:
        return "derived"


DERIVED = _Derived()


@dataclasses.dataclass(frozen=True)
class Held:
    """A tensor that the pattern itself holds."""

    value: Tensor


@dataclasses.dataclass(eq=False, repr=False)
class Part:
    """One call of a pattern; arguments by name, defaults filled in."""

    index: int
    target: Any
    args: dict[str, Any]
    value: Any  # the fake one of the first trace
    rank: int = 0  # of the first argument
    # Asked for each node that may be it. Operators are slow to hash.
    commutes: bool = dataclasses.field(init=False)
    sized: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.commutes = self.target in _COMMUTE and self.args.get("alpha", 1) == 1
        self.sized = self.target in SIZED

    def __str__(self) -> str:
        return label(self.target)

    def __repr__(self) -> str:
        return f"%{self.index} {self.target}"

    def key(self) -> Any:
        """Equal for parts that match the same nodes."""

        def shown(arg: Any) -> str:
            if isinstance(arg, Part):
                return f"%{arg.index}"
            if isinstance(arg, (list, tuple)):
                return f"[{', '.join(map(shown, arg))}]"
            return repr(arg)

        dims = [v for k, v in self.args.items() if k.startswith("dim")]
        ranked = self.sized or any(isinstance(d, int) and d >= 0 for d in dims)
        rank = self.value.ndim if ranked and isinstance(self.value, Tensor) else None
        return str(self.target), rank, tuple((k, shown(v)) for k, v in self.args.items())


@dataclasses.dataclass(eq=False)
class Template:
    """The calls of a pattern in order, what it gives, and the arguments with a fixed value."""

    parts: list[Part]
    outputs: list[Any]  # Part or Slot
    fixed: Mapping[str, Any]
    exact: bool  # made for one match, so types must agree
    variant: Variant | None = None

    def key(self) -> Any:
        """Equal for templates that match the same."""
        ends = [o.index if isinstance(o, Part) else o for o in self.outputs]
        return tuple(p.key() for p in self.parts), repr(ends), repr(sorted(self.fixed.items()))


def label(target: Any) -> str:
    """`clamp` for `aten.clamp.default`: what people call an operator."""
    packet = getattr(target, "overloadpacket", None)
    name = getattr(packet or target, "__name__", str(target))
    return str(name).lstrip("_")


def called(target: Any) -> Any:
    """The target that stands for all spellings of it."""
    return _RESHAPE if target is _VIEW else target


@functools.lru_cache(maxsize=4096)
def _schema(target: Any) -> tuple[list[str], dict[str, Any]] | None:
    """The names of an operator's arguments, and each one's default (None: it has none)."""
    if not _torch.is_op(target):
        return None
    if called(target) in SIZED:
        return ["self"], {}
    defaults = {
        a.name: a.default_value if a.has_default_value() else None for a in target._schema.arguments
    }
    return list(defaults), defaults


def arguments(node: Node) -> dict[str, Any]:
    """A call's arguments by name, defaults filled in."""
    schema = _schema(node.target)
    if schema is None:
        return {**{str(i): a for i, a in enumerate(node.args)}, **node.kwargs}
    names, defaults = schema
    given = {**defaults, **dict(zip(names, node.args, strict=False))}
    return given if names == ["self"] else {**given, **node.kwargs}


# --- Tracing ---


def graph(
    fn: Callable[..., Any], values: Mapping[str, Any], mode: Any
) -> tuple[GraphModule, list[tuple[str, int | None]]]:
    """`fn(**values)` as a normalised graph, and which argument each of its inputs is.

    Tensors and symbolic numbers are inputs; everything else is written into the graph.
    """
    leaves: list[tuple[str, int | None]] = []
    inputs: list[Any] = []
    for name, value in values.items():
        for index, one in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(one, (Tensor, *_torch.SYMBOLIC)):
                leaves.append((name, index))
                # One tensor for two arguments would be one input of the graph.
                if isinstance(one, Tensor) and any(one is other for other in inputs):
                    one = one.detach()
                inputs.append(one)

    def call(*given: Any) -> Any:
        filled = {n: list(v) if isinstance(v, list) else v for n, v in values.items()}
        for (name, index), value in zip(leaves, given, strict=True):
            if index is None:
                filled[name] = value
            else:
                filled[name][index] = value
        result = fn(*filled.values())
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    gm = _torch.trace(call, inputs, mode, dialect.decompositions())
    normalise(gm, mode)
    return gm, leaves


def normalise(gm: GraphModule, mode: Any) -> None:
    """What a graph has gone through when patterns meet it."""
    gm.meta["fake_mode"] = mode
    for node in gm.graph.nodes:
        if node.op == "get_attr" and "val" not in node.meta:
            node.meta["val"] = meta.compute(gm, node)
    dialect.canonicalise(gm)
    for clean in (builtin.remove_noops, builtin.dead_code, builtin.common_subexpressions):
        clean(gm, (), Config())


def values_for(slots: Sequence[Slot], variant: Variant, side: int, mode: Any) -> dict[str, Any]:
    """What a pattern is called with in one of the two traces."""
    used: dict[str, int] = {}
    values: dict[str, Any] = {}
    for index, slot in enumerate(slots):
        if slot.name in variant.fixed:
            values[slot.name] = variant.fixed[slot.name]
        elif slot.kind is Tensor:
            sizes = _slots.sizes(variant.tensors[slot.name].dims, side, used)
            with mode:
                make = functools.partial(torch.empty, sizes, dtype=variant.dtype(slot.name, side))
                values[slot.name] = [make(), make()] if slot.many else make()
        else:
            values[slot.name] = _slots.sample(slot, index, side, variant)
    return values


def templates(
    name: str,
    fn: Callable[..., Any],
    slots: Sequence[Slot],
    types: Sequence[Mapping[str, str]],
) -> list[Template]:
    """Every distinct template of a pattern; `BadPattern` when there is none."""
    tracer = _Tracer(fn, slots)
    found = tracer.found
    failures: list[BaseException] = []
    for dims in (False, True):
        for variant in _slots.variants(name, slots, types, dims):
            try:
                tracer.add(variant)
            except BadPattern:
                raise
            except Exception as error:  # whatever the body raises on these types
                failures.append(error)
        if found or not any(slot.kind is int for slot in slots):
            break
    if not found:
        why = first_line(failures[0])
        raise BadPattern(name, f"its body cannot be traced: {why}", _TYPES) from failures[0]
    bound = [_bound(template) for template in found.values()]
    for slot in slots:
        if all(slot.name not in names for names in bound):
            raise BadPattern(
                name,
                f"argument {slot.name!r} cannot be bound: no call takes it as it is",
                "A value such as 1 / scale cannot be solved for scale; bind the value itself.",
            )
    complete = [
        t for t, names in zip(found.values(), bound, strict=True) if len(names) == len(slots)
    ]
    if not any(template.parts for template in complete):
        raise BadPattern(name, "it calls no operator", "A pattern is at least one operator.")
    return complete


_TYPES = (
    "Say what its tensors look like, as in types={'x': '[b, s, h]', 'w': 'f32[h]'}: by default all "
    "have one rank (two: any pair; three: also none greater than the one before), every size the "
    "same, and any float dtype."
)


def _bound(template: Template) -> set[str]:
    names = set(template.fixed)

    def look(arg: Any) -> None:
        if isinstance(arg, Slot):
            names.add(arg.name)
        elif isinstance(arg, (list, tuple)):
            for one in arg:
                look(one)

    for part in template.parts:
        look(list(part.args.values()))
    return names


class _Tracer:
    """Traces variants, and knows which ones it need not compare: it has seen their like."""

    def __init__(self, fn: Callable[..., Any], slots: Sequence[Slot]) -> None:
        self.fn, self.slots = fn, slots
        self.found: dict[Any, Template] = {}
        self._seen: set[Any] = set()

    def add(self, variant: Variant) -> None:
        """Keep the templates of one variant, for the float dtypes that make a difference."""
        news, same = self._pair(dataclasses.replace(variant, floats=FLOATS[0]))
        if not news or all(t.dtype is not None for t in variant.tensors.values()):
            return
        for floats in FLOATS[1:2] if same else FLOATS[1:]:
            self._pair(dataclasses.replace(variant, floats=floats))

    def _pair(self, variant: Variant) -> tuple[bool, bool]:
        """Whether the variant is news, and whether its two traces make the same calls."""
        first = self._side(variant, 0)
        alone = _Builder(self.slots, [first], variant.fixed, variant).build()
        assert alone is not None
        if alone.key() in self._seen:
            return False, True
        both = [first, self._side(variant, 1)]
        template = _Builder(self.slots, both, variant.fixed, variant).build()
        if template is not None:
            self._seen.add(alone.key())
            self.found.setdefault(template.key(), template)
        return True, template is not None

    def _side(self, variant: Variant, side: int) -> _Traced:
        mode = _torch.new_fake_mode()
        values = values_for(self.slots, variant, side, mode)
        return (*graph(self.fn, values, mode), values)


def exact(
    fn: Callable[..., Any], slots: Sequence[Slot], values: Mapping[str, Any], mode: Any
) -> Template:
    """The template for one match: the pattern traced on what was bound."""
    with _torch.quiet_guards(mode):
        traced = graph(fn, values, mode)
    template = _Builder(slots, [(*traced, values)], {}, None).build()
    assert template is not None
    return template


_Traced = tuple[GraphModule, list[tuple[str, int | None]], Mapping[str, Any]]
"""A graph, which argument each of its inputs is, and what the arguments were."""


class _Differs(Exception):
    """The two traces are different programs."""


class _Builder:
    """Compares traces node by node."""

    def __init__(
        self,
        slots: Sequence[Slot],
        sides: Sequence[_Traced],
        fixed: Mapping[str, Any],
        variant: Variant | None,
    ) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self.gms = [gm for gm, _, _ in sides]
        self.leaves = sides[0][1]
        self.values = [values for _, _, values in sides]
        self.fixed, self.variant = fixed, variant
        self.env: dict[Node, Any] = {}
        self.parts: list[Part] = []

    def build(self) -> Template | None:
        rows = [[n for n in gm.graph.nodes if not _is_size(n)] for gm in self.gms]
        if len({len(row) for row in rows}) > 1:
            return None
        leaves = iter(self.leaves)
        outputs: list[Any] = []
        try:
            for nodes in zip(*rows, strict=True):
                if any((n.op, n.target) != (nodes[0].op, nodes[0].target) for n in nodes[1:]):
                    return None
                if nodes[0].op == "output":
                    outputs = self._value(nodes[0].args[0], *(n.args[0] for n in nodes[1:]))
                else:
                    self.env[nodes[0]] = self._node(nodes, leaves)
        except _Differs:
            return None
        return Template(self.parts, list(outputs), self.fixed, len(self.gms) == 1, self.variant)

    def _node(self, nodes: tuple[Node, ...], leaves: Any) -> Any:
        node = nodes[0]
        if node.op == "placeholder":
            name, index = next(leaves)
            return self.slots[name] if index is None else (self.slots[name], index)
        if node.op == "get_attr":
            return Held(meta.attribute(self.gms[0], str(node.target)))
        if node.target is COPY:
            return self._value(*(n.args[0] for n in nodes))
        rows = [arguments(n) for n in nodes]
        args = {k: self._value(*(row.get(k) for row in rows)) for k in rows[0]}
        source = meta.value(node.args[0]) if node.args else None
        rank = source.ndim if isinstance(source, Tensor) else 0
        part = Part(len(self.parts), called(node.target), args, node.meta.get("val"), rank)
        self.parts.append(part)
        return part

    def _value(self, *args: Any) -> Any:
        first = args[0]
        if isinstance(first, Node):
            if not all(isinstance(a, Node) for a in args):
                raise _Differs
            return self.env[first] if first in self.env else first.meta["val"]
        if isinstance(first, (list, tuple)):
            return self._list(*args)
        slot = self._slot(args)
        if slot is not None:
            return slot
        if isinstance(first, torch.device):
            return first if len(args) == 1 else DERIVED
        same = all(type(a) is type(first) and a == first for a in args[1:])
        return first if same else DERIVED

    def _list(self, *args: Any) -> Any:
        slot = self._slot(args)
        if slot is not None:
            return slot
        if len({len(a) for a in args}) > 1:
            return DERIVED
        items = [self._value(*row) for row in zip(*args, strict=True)]
        if items and all(isinstance(i, tuple) and isinstance(i[0], Slot) for i in items):
            whole = items[0][0]
            if [(whole, n) for n in range(len(items))] == items:
                return whole  # the list itself, of any length
        return items

    def _slot(self, args: tuple[Any, ...]) -> Slot | None:
        """The slot that these numbers stand for. An exact template compares values instead."""
        if len(self.gms) == 1:
            return None
        for name, slot in self.slots.items():
            if slot.kind is Tensor or name in self.fixed:
                continue
            wanted = [values[name] for values in self.values]
            if all(map(_is, args, wanted)):
                return slot
        return None


def _is(one: Any, two: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(two, list):
        return len(one) == len(two) and all(map(_is, one, two))
    return type(one) is type(two) and bool(one == two)


def _is_size(node: Node) -> bool:
    """Whether a call gives a symbolic number; those are compared by value."""
    return (
        node.op == "call_function"
        and isinstance(node.meta.get("val"), (int, float, *_torch.SYMBOLIC))
        and node.target is not operator.getitem
    )
