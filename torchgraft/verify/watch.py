"""`Config(verify=...)`: each rewrite is run before and after, on ATen, on the same inputs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft import _torch
from torchgraft.config import Config
from torchgraft.errors import ResultChanged, first_line
from torchgraft.fx import label, meta
from torchgraft.fx.edit import target_name
from torchgraft.report import Report
from torchgraft.verify import compare, samples, script
from torchgraft.verify.compare import Outcome


@dataclasses.dataclass(frozen=True)
class Guilty:
    """The first value that differs: the node it was, and the node that stands for it now."""

    before: Node
    after: Node
    error: str

    def __str__(self) -> str:
        now = "" if self.after.name == self.before.name else f" became {_call(self.after)}"
        return f"node {_call(self.before)}{now}"


def _call(node: Node) -> str:
    return f"{node.name!r} ({target_name(node.target)})"


def copied(gm: GraphModule) -> GraphModule:
    """The graph as it is now; constants are shared."""
    twin = GraphModule(gm, copy.deepcopy(gm.graph))
    twin.meta.update(gm.meta)
    return twin


class Watch:
    """Holds the graph as it was before the rewrite that is under way, and what it gave."""

    def __init__(self, gm: GraphModule, config: Config, report: Report) -> None:
        self.gm, self.config, self.report = gm, config, report
        self.each = config.verify in ("each", "pin")
        self.pins = config.verify == "pin"
        self.inputs: list[Any] | None = None
        self.old = copied(gm)
        self.found = self._first()
        self.versions = self._constants()

    def _first(self) -> Outcome | None:
        """The captured graph's own results, on the first inputs that show anything."""
        why = ""
        found: Outcome | None = None
        for inputs in samples.draws(self.gm):
            try:
                tried = compare.on_aten(self.old, inputs)
            except Exception as error:
                why = why or first_line(error)
                continue
            if found is None or compare.usable(tried):
                found, self.inputs = tried, inputs
            if compare.usable(tried):
                return found
        if found is None:
            self.report.notes.append(f"not verified: no inputs could be made that run ({why})")
        return found

    def _constants(self) -> dict[str, int]:
        held = {str(n.target) for n in self.gm.graph.find_nodes(op="get_attr")}
        tensors = {name: meta.attribute(self.gm, name) for name in held}
        return {name: t._version for name, t in tensors.items() if isinstance(t, Tensor)}

    def before(self, gm: GraphModule) -> None:
        """Remember the graph; what it gives is what the last rewrite gave."""
        if self.each:
            self.old, self.versions = copied(gm), self._constants()

    def after(
        self,
        gm: GraphModule,
        by: str,
        became: Mapping[str, str] | None = None,
        authors: Mapping[str, str] | None = None,
    ) -> str | None:
        """Raise `ResultChanged` where the results are others now. With "pin": put the graph back
        as it was, pin the node, and give its name. Of several `authors` the node tells which."""
        if not self.each or self.found is None or self.inputs is None:
            return None
        gm.recompile()
        try:
            found, error = compare.on_aten(gm, self.inputs), None
        except Exception as raised:
            found, error = None, f"it cannot run any more: {first_line(raised)}"
        if found is not None:
            error = self._written(gm) or compare.difference(
                self.found, found, compare.depth_of(self.old)
            )
        if error is None:
            self.found = found
            return None
        guilty = first_difference(self.old, gm, self.inputs, became or {})
        if guilty is not None and authors:
            by = authors.get(guilty.before.name, by)
        failure = self._failure(by, gm, guilty, error)
        if not self.pins:
            raise failure
        return self._pin(gm, guilty, failure)

    def _written(self, gm: GraphModule) -> str | None:
        for name, version in self.versions.items():
            held = getattr(self.old, name, None)
            if isinstance(held, Tensor) and held._version != version:
                return f"constant {name!r} was written to; make a new one instead"
        return None

    def _failure(
        self, by: str, gm: GraphModule, guilty: Guilty | None, error: str
    ) -> ResultChanged:
        assert self.inputs is not None
        with _torch.real():
            path = script.write(self.config.verify_dir, by, self.old, gm, self.inputs)
        if guilty is None:
            return ResultChanged(
                by, "the same values, put together otherwise", "", None, error, path
            )
        line = meta.source_line(guilty.before) or meta.source_line(guilty.after)
        if guilty.error not in error:
            error = f"{guilty.error}\n  {error}"
        return ResultChanged(by, str(guilty), guilty.before.name, line, error, path)

    def _pin(self, gm: GraphModule, guilty: Guilty | None, failure: ResultChanged) -> str:
        gm.graph = copy.deepcopy(self.old.graph)
        label.rebind(gm.graph)
        if guilty is not None:
            for node in gm.graph.nodes:
                if node.name == guilty.before.name:
                    node.meta["pinned"] = f"{failure.by} changed its result"
        self.report.notes.append(f"undone: {first_line(failure).partition(': ')[2]}")
        return failure.node

    def end(
        self, run: Callable[[list[Any]], Sequence[Any]], captured: GraphModule, values: bool = True
    ) -> str | None:
        """What differs between the compiled program and the graph as captured, or None; types
        alone are compared where `values` are not."""
        if self.found is None or self.inputs is None:
            return None
        got = compare.outcome(run, self.inputs)
        if compare.draws_inside(captured):
            self.report.notes.append("random numbers in a branch: only types were compared")
            values = False
        depth = compare.depth_of(captured)
        return compare.difference(self.found, got, depth, values=values, memory=False)


def first_difference(
    old: GraphModule, new: GraphModule, inputs: Sequence[Any], became: Mapping[str, str]
) -> Guilty | None:
    """The first pair of corresponding nodes whose values differ.

    Nodes correspond by name, by what a converter said, or because a node that both graphs have
    uses one where it used the other.
    """
    pairs = _pairs(old, new, became)
    values: dict[str, Any] = {}
    wanted = {one.name for one, _ in pairs}
    _watch(old, inputs, values, wanted)
    seen: dict[str, Any] = {}
    _watch(new, inputs, seen, {other.name for _, other in pairs})
    depth = compare.depth_of(old)
    with _torch.real():
        for one, other in pairs:
            if one.name not in values:
                continue
            if other.name not in seen:
                return Guilty(one, other, "it cannot run any more")
            error = compare.unlike(values[one.name], seen[other.name], depth)
            if error is not None:
                return Guilty(one, other, error)
    return None


def _watch(gm: GraphModule, inputs: Sequence[Any], values: dict[str, Any], names: set[str]) -> None:
    def see(node: Node, value: Any) -> None:
        if node.name in names:
            values[node.name] = compare.kept(value)

    try:
        compare.on_aten(gm, inputs, see)
    except Exception:  # what was seen until then is enough: the rest counts as different
        return


def _pairs(
    old: GraphModule, new: GraphModule, became: Mapping[str, str]
) -> list[tuple[Node, Node]]:
    """Corresponding calls, in the order of the old graph."""
    before = {node.name: node for node in old.graph.nodes}
    after = {node.name: node for node in new.graph.nodes}
    pairs: dict[Node, Node] = {}  # from the old node to the one that stands for it
    for name, now in became.items():
        if name in before and now in after:
            pairs[before[name]] = after[now]
    for name, node in after.items():
        if name not in before or before[name].op != node.op:
            continue
        if _is_call(node):
            pairs.setdefault(before[name], node)
        for one, other in zip(_used(before[name]), _used(node), strict=False):
            # Where both are in both graphs, operands may only have changed places.
            if _is_call(one) and isinstance(other, Node) and one.name not in after:
                pairs.setdefault(one, other)
    order = {node: i for i, node in enumerate(old.graph.nodes)}
    return sorted(pairs.items(), key=lambda pair: order[pair[0]])


def _used(node: Node) -> list[Any]:
    """The nodes among the arguments, by position; None for what is no node."""
    found: list[Any] = []

    def walk(arg: Any) -> None:
        if isinstance(arg, (list, tuple)):
            for item in arg:
                walk(item)
        elif isinstance(arg, dict):
            for item in arg.values():
                walk(item)
        else:
            found.append(arg if isinstance(arg, Node) else None)

    walk(node.args)
    walk(node.kwargs)
    return found


def _is_call(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function"


def verify(before: GraphModule, after: GraphModule, inputs: Sequence[Any] | None = None) -> None:
    """Raise `ResultChanged` unless two graphs give the same on these inputs.

    Values, dtypes, shapes, strides, shared memory and what is written to the inputs count. Without
    inputs they are drawn from the types in `meta["val"]`.

    >>> import torch, torchgraft as graft
    >>> one = torch.fx.symbolic_trace(lambda x: x + x)
    >>> graft.verify(one, torch.fx.symbolic_trace(lambda x: x * 2), (torch.ones(3),))
    >>> graft.verify(one, torch.fx.symbolic_trace(lambda x: x * 3), (torch.ones(3),))
    Traceback (most recent call last):
    ...
    torchgraft.errors.ResultChanged: ...
    """
    given = list(inputs) if inputs is not None else next(samples.draws(before))
    want, got = compare.on_aten(before, given), compare.on_aten(after, given)
    error = compare.difference(want, got, compare.depth_of(before))
    if error is None:
        return
    guilty = first_difference(before, after, given, {})
    path = script.write(None, "verify", before, after, given)
    if guilty is None:
        raise ResultChanged("the second graph", "the outputs", "", None, error, path)
    line = meta.source_line(guilty.before)
    raise ResultChanged("the second graph", str(guilty), guilty.before.name, line, error, path)
