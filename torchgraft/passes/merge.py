"""Branches that do the same to different data become one, with a dimension more.

Eight experts, towers, or embedding tables are eight small calls each, and a small call costs more
to make than to compute. A *pack* is a list of such calls: products with constant weights of one
shape, or lookups in constant tables, and what is computed from them element by element in the same
way. Its value is a stack of theirs, `[packs, ...]`. Packs are found first, then the graph is
rewritten; weights are stacked once, when constants are folded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft.config import Config
from torchgraft.fx import label, meta
from torchgraft.fx.dialect import is_pure
from torchgraft.fx.mark import in_fallback
from torchgraft.passes.builtin import fold_constants, reaches_output

aten = torch.ops.aten

SMALL = {"cpu": 4e6, "cuda": 1e9}
"""Up to so many floating-point operations a product is merged with others. On CPU, eight experts of
2 million gain 1.3 times, eight towers of 8 million lose 1.2 times, and wider ones 3 to 6 %
(docs/performance.md). The second is chosen, not measured."""

_PRODUCTS: dict[Any, int] = {
    aten.addmm.default: 1,
    aten.mm.default: 0,
}  # where the data is; the weight is next
Nodes = tuple[Node, ...]


def merge_branches(gm: GraphModule, example_inputs: Sequence[Any], config: Config) -> None:
    """Compute parallel branches of equal shape with frozen weights as one."""
    if not config.merge_branches or config.mode == "eager":
        return
    packs = _find(gm)
    if not packs:
        return
    if not _acyclic(gm, packs):
        packs = [pack for pack in packs if pack[0].target in (*_PRODUCTS, aten.embedding.default)]
    _Rewriter(gm).run(packs)
    fold_constants(gm, example_inputs, config)


# --- Finding packs ---


def _find(gm: GraphModule) -> list[Nodes]:
    """Packs in an order in which each comes after those that it reads."""
    depth: dict[Node, int] = {}
    seeds: dict[Any, list[Node]] = {}
    for node in gm.graph.nodes:
        key = _seed(node)
        depth[node] = max((depth[n] for n in node.all_input_nodes), default=0) + (key is not None)
        if key is not None:  # of one depth: none of them reads another one
            seeds.setdefault((depth[node], *key), []).append(node)
    packs: list[Nodes] = []
    member: dict[Node, tuple[Nodes, int]] = {}
    for nodes in seeds.values():
        for pack in _groups(nodes, member):
            grown = len(packs)
            _add(pack, packs, member)
            while grown < len(packs):  # what reads a pack may be one
                if len(packs[grown]) == len(pack):
                    for more in list(_readers(packs[grown], member)):
                        _add(more, packs, member)
                grown += 1
    return packs


def _add(pack: Nodes, packs: list[Nodes], member: dict[Node, tuple[Nodes, int]]) -> None:
    packs.append(pack)
    member.update((node, (pack, i)) for i, node in enumerate(pack))


def _seed(node: Node) -> tuple[Any, ...] | None:
    """Equal for two calls that can be packed; None for one that starts no pack."""
    if node.op != "call_function" or node.kwargs or in_fallback(node) or "pinned" in node.meta:
        return None
    where = (node.target, label.stream_of(node), node.meta.get("after"))
    value = node.meta["val"]
    given: tuple[Any, ...] = node.args
    if node.target is aten.embedding.default and _is_constant(given[0]):
        width, ids = given[0].meta["val"].shape[1], given[1].meta["val"]
        return (*where, width, value.dtype, value.device, ids.dtype, _shape(ids))
    if node.target not in _PRODUCTS:
        return None
    data, weight = given[_PRODUCTS[node.target] :][:2]
    others = given[: _PRODUCTS[node.target]]
    if not all(map(_is_constant, (weight, *others))) or len(given) != len(others) + 2:
        return None
    if any(other.meta["val"].ndim != 1 for other in others):
        return None
    held = data.meta["val"]
    size = 2 * math.prod(weight.meta["val"].shape)
    rows = held.shape[0] if isinstance(held.shape[0], int) else 1
    if size * rows > SMALL.get(held.device.type, 0):
        return None
    return (*where, _shape(held), _shape(weight.meta["val"]), held.dtype, held.device)


def _is_constant(arg: Any) -> bool:
    return isinstance(arg, Node) and arg.op == "get_attr" and isinstance(arg.meta["val"], Tensor)


def _shape(value: Tensor) -> tuple[str, ...]:
    return tuple(map(str, value.shape))


def _groups(nodes: Sequence[Node], member: dict[Node, tuple[Nodes, int]]) -> Iterator[Nodes]:
    """Packs among calls of one kind: those that share their input, those that read the members of
    one pack (in its order), and the rest together."""
    by_input: dict[Any, list[Node]] = {}
    for node in nodes:
        data = _data(node)
        by_input.setdefault(data, []).append(node)
    rest: list[Node] = []
    by_pack: dict[Nodes, dict[int, Node]] = {}
    for data, same in by_input.items():
        if len(same) > 1 and _is_product(same[0]):
            yield tuple(same)
        elif data in member and len(same) == 1:
            pack, index = member[data]
            by_pack.setdefault(pack, {})[index] = same[0]
        else:
            rest += same
    for pack, found in by_pack.items():
        if len(found) == len(pack):
            yield tuple(found[i] for i in range(len(pack)))
        else:
            rest += found.values()
    if len(rest) > 1:
        yield tuple(rest)


def _is_product(node: Node) -> bool:
    return node.target in _PRODUCTS


def _data(node: Node) -> Node:
    data = node.args[_PRODUCTS.get(node.target, 1)]
    assert isinstance(data, Node)
    return data


def _readers(pack: Nodes, member: dict[Node, tuple[Nodes, int]]) -> Iterator[Nodes]:
    """Packs of what reads a pack, element by element, in the same way in each branch."""
    for first in pack[0].users:
        if first in member or not _is_pointwise(first):
            continue
        found = [first]
        for i, node in enumerate(pack[1:], 1):
            twin = next((u for u in node.users if _twins(first, u, i, member)), None)
            if twin is None or twin in member or twin in found:
                break
            found.append(twin)
        if len(found) == len(pack) and all(n not in member for n in found):
            yield tuple(found)


def _is_pointwise(node: Node) -> bool:
    value = node.meta.get("val")
    return (
        is_pure(node)
        and isinstance(value, Tensor)
        and torch.Tag.pointwise in getattr(node.target, "tags", ())
        and not in_fallback(node)
        and all(isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes)
    )


def _twins(one: Node, two: Node, index: int, member: dict[Node, tuple[Nodes, int]]) -> bool:
    """Whether two calls do the same in branches 0 and `index`."""
    if (
        one.target is not two.target
        or one.kwargs
        or two.kwargs
        or len(one.args) != len(two.args)
        or label.stream_of(one) != label.stream_of(two)
        or one.meta.get("after") != two.meta.get("after")
        or not meta.alike(one.meta.get("val"), two.meta.get("val"))
    ):
        return False
    shape = _shape(one.meta["val"])
    for a, b in zip(one.args, two.args, strict=True):
        if not isinstance(a, Node) or not isinstance(b, Node):
            if a is not b and not (type(a) is type(b) and a == b):
                return False
        elif a in member:
            if member.get(b) != (member[a][0], index) or member[a][1] != 0:
                return False
            if _shape(a.meta["val"]) != shape:
                return False
        elif not (a is b or (_is_constant(a) and _is_constant(b) and _same(a, b))):
            return False
    return True


def _same(one: Node, two: Node) -> bool:
    return meta.alike(one.meta["val"], two.meta["val"])


def _acyclic(gm: GraphModule, packs: Sequence[Nodes]) -> bool:
    """Whether the graph has no circle when each pack is one node."""
    of = {node: i for i, pack in enumerate(packs) for node in pack}
    name = {node: of.get(node, node) for node in gm.graph.nodes}
    before: dict[Any, set[Any]] = {}
    for node in gm.graph.nodes:
        before.setdefault(name[node], set()).update(name[n] for n in node.all_input_nodes)
    users: dict[Any, list[Any]] = {}
    for node, firsts in before.items():
        for first in firsts:
            users.setdefault(first, []).append(node)
    ready = [node for node, firsts in before.items() if not firsts]
    done = 0
    while ready:
        one = ready.pop()
        done += 1
        for user in users.get(one, ()):
            before[user].discard(one)
            if not before[user]:
                ready.append(user)
    return done == len(before)


# --- Rewriting ---


class _Rewriter:
    """Makes the stack of each pack, and lets everybody else read parts of it."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.stacks: dict[Nodes, Node] = {}
        self.member: dict[Node, tuple[Nodes, int]] = {}
        self.origin: Node | None = None

    def run(self, packs: Iterable[Nodes]) -> None:
        for pack in packs:
            self.origin = pack[0]
            if pack[0].target is aten.embedding.default:
                self.stacks[pack] = self._lookup(pack)
            elif _is_product(pack[0]):
                self.stacks[pack] = self._product(pack)
            else:
                self.stacks[pack] = self._pointwise(pack)
            self.member.update((node, (pack, i)) for i, node in enumerate(pack))
        for cat in self.gm.graph.find_nodes(op="call_function", target=aten.cat.default):
            self.origin = cat
            self._joined(cat)
        for node, (pack, index) in self.member.items():
            others = [user for user in node.users if user not in self.member]
            if others:
                self.origin = node
                part = self._call(aten.select.int, self.stacks[pack], 0, index)
                for user in others:
                    user.replace_input_with(node, part)
        label.sort(self.gm)

    def _call(self, target: Any, *args: Any) -> Node:
        last = next(iter(reversed(self.gm.graph.nodes)))
        with self.gm.graph.inserting_before(last):  # `label.sort` finds its place
            node = self.gm.graph.call_function(target, args)
        assert self.origin is not None
        meta.inherit(node, self.origin)
        node.meta["val"] = meta.compute(self.gm, node)
        return node

    def _stack(self, nodes: Sequence[Node]) -> Node:
        """Values of one shape with a dimension more in front."""
        held = [self.member.get(node) for node in nodes]
        if held[0] is not None:
            pack = held[0][0]
            if len(pack) == len(nodes) and held == [(pack, i) for i in range(len(pack))]:
                return self.stacks[pack]
        if (columns := self._columns(nodes)) is not None:
            return columns
        parts = [self._call(aten.unsqueeze.default, node, 0) for node in nodes]
        return self._call(aten.cat.default, parts)

    def _columns(self, nodes: Sequence[Node]) -> Node | None:
        """`x[:, 0]`, `x[:, 1]`, ... of one x are x with that dimension in front."""
        if any(n.target is not aten.select.int or n.args[:2] != nodes[0].args[:2] for n in nodes):
            return None
        source, dim, start = nodes[0].args
        assert isinstance(source, Node)
        assert isinstance(dim, int)
        assert isinstance(start, int)
        if start < 0 or [n.args[2] for n in nodes] != list(range(start, start + len(nodes))):
            return None
        value = source.meta["val"]
        if start or value.shape[dim] != len(nodes):
            source = self._call(aten.slice.Tensor, source, dim, start, start + len(nodes))
        order = list(range(value.ndim))
        order.insert(0, order.pop(dim))
        return self._call(aten.permute.default, source, order)

    def _product(self, pack: Nodes) -> Node:
        at = _PRODUCTS[pack[0].target]
        inputs: list[Any] = [n.args[at] for n in pack]
        weights: list[Any] = [n.args[at + 1] for n in pack]
        biases: list[Any] = [n.args[0] for n in pack] if at else []
        count, width = len(pack), weights[0].meta["val"].shape[1]
        if all(x is inputs[0] for x in inputs):  # one product, as much wider
            args = [inputs[0], self._call(aten.cat.default, weights, 1)]
            if biases:
                args.insert(0, self._call(aten.cat.default, biases))
            wide = self._call(pack[0].target, *args)
            split = self._call(aten.reshape.default, wide, [-1, count, width])
            return self._call(aten.permute.default, split, [1, 0, 2])
        made = self._call(aten.bmm.default, self._stack(inputs), self._stack(weights))
        if biases:
            bias = self._call(aten.unsqueeze.default, self._stack(biases), 1)
            made = self._call(aten.add.Tensor, made, bias)
        return made

    def _lookup(self, pack: Nodes) -> Node:
        """One table behind the other. An id that is out of its own table is out of all."""
        tables: list[Any] = [n.args[0] for n in pack]
        rows = [int(t.meta["val"].shape[0]) for t in tables]
        ids = self._stack([_data(n) for n in pack])
        shape = [len(pack)] + [1] * (ids.meta["val"].ndim - 1)
        device = ids.meta["val"].device
        starts = torch.tensor([sum(rows[:i]) for i in range(len(rows))], device=device)
        first = self._constant("starts", starts.reshape(shape).to(ids.meta["val"].dtype))
        size = self._constant("sizes", torch.tensor(rows, device=device).reshape(shape))
        inside = self._call(
            aten.logical_and.default,
            self._call(aten.ge.Scalar, ids, 0),
            self._call(aten.lt.Tensor, ids, size),
        )
        nowhere = self._constant("nowhere", torch.tensor(sum(rows), device=device))
        moved = self._call(aten.add.Tensor, ids, first)
        chosen = self._call(aten.where.self, inside, moved, nowhere)
        return self._call(aten.embedding.default, self._call(aten.cat.default, tables), chosen)

    def _constant(self, stem: str, value: Tensor) -> Node:
        number = 0
        while hasattr(self.gm, name := f"_merged_{stem}{number}"):
            number += 1
        self.gm.register_buffer(name, value, persistent=False)
        if "prepare" in self.gm.meta:
            self.gm.meta["prepare"].constant(value)
        first = next(n for n in self.gm.graph.nodes if n.op not in ("placeholder", "get_attr"))
        with self.gm.graph.inserting_before(first):
            node = self.gm.graph.create_node("get_attr", name)
        node.meta = {"val": meta.compute(self.gm, node), "weight": name}
        return node

    def _pointwise(self, pack: Nodes) -> Node:
        ndim = pack[0].meta["val"].ndim
        args: list[Any] = []
        for given in zip(*(node.args for node in pack), strict=True):
            if given[0] in self.member:
                args.append(self._stack(given))
            elif not isinstance(given[0], Node) or all(one is given[0] for one in given):
                args.append(given[0])
            else:
                stack = self._stack(given)
                for _ in range(ndim + 1 - stack.meta["val"].ndim):
                    stack = self._call(aten.unsqueeze.default, stack, 1)
                args.append(stack)
        return self._call(pack[0].target, *args)

    def _joined(self, cat: Node) -> None:
        """A run of `cat`'s inputs that is a pack, or one with a dimension more, is its stack."""
        inputs = list(cat.args[0])  # type: ignore[arg-type]
        dim = cat.args[1] if len(cat.args) > 1 else 0
        assert isinstance(dim, int)
        ndim = cat.meta["val"].ndim
        dim %= ndim
        parts: list[Node] = []
        at = 0
        while at < len(inputs):
            pack, widened = self._run(inputs[at:], dim)
            if pack is None:
                parts.append(inputs[at])
                at += 1
                continue
            order = list(range(1, ndim + (not widened)))
            order.insert(dim, 0)
            part = self._call(aten.permute.default, self.stacks[pack], order)
            if not widened:  # one behind the other: two dimensions become one
                shape = list(pack[0].meta["val"].shape)
                shape[dim] *= len(pack)
                part = self._call(aten.reshape.default, part, shape)
            parts.append(part)
            at += len(pack)
        if len(parts) == len(inputs):
            return
        whole = len(parts) == 1 and not reaches_output(cat)
        joined = parts[0] if whole else self._call(aten.cat.default, parts, dim)
        cat.replace_all_uses_with(joined)
        self.gm.graph.erase_node(cat)

    def _run(self, inputs: Sequence[Node], dim: int) -> tuple[Nodes | None, bool]:
        """The pack that inputs begin with, and whether each has a dimension more at `dim`."""
        widened = _widened(inputs[0], dim)
        for source, look in ((widened, True), (inputs[0], False)):
            pack, index = self.member.get(source, (None, -1)) if source else (None, -1)
            if pack is None or index != 0 or len(inputs) < len(pack):
                continue
            if not look and any(not isinstance(s, int) for s in pack[0].meta["val"].shape):
                continue
            found = [_widened(n, dim) if look else n for n in inputs[: len(pack)]]
            if found == list(pack):
                return pack, look
        return None, False


def _widened(node: Node, dim: int) -> Node | None:
    """What a node is with one dimension more at `dim`."""
    if node.target is not aten.unsqueeze.default or not isinstance(node.args[0], Node):
        return None
    at = node.args[1]
    assert isinstance(at, int)
    return node.args[0] if at % node.meta["val"].ndim == dim else None
