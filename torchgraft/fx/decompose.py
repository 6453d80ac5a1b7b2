"""Taking operators apart: into our dialect, and then as the code generator wants them.

A model is the same layer many times, so calls of one operator on equal types are traced once and
their parts inlined. That is a fraction of what tracing the whole graph again would cost.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from torchgraft import _torch
from torchgraft.fx import meta, returned
from torchgraft.fx.attention import plain_masks

Table = Mapping[Any, Callable[..., Any]]
Parts = dict[Node, GraphModule]


def decompose(gm: GraphModule, inputs: Sequence[Any], table: Table) -> GraphModule:
    """The graph with every call that `table` decomposes replaced by its parts.

    With symbolic sizes the whole graph is traced again instead, because a part may need any size.
    """
    mode = _torch.fake_mode_of(inputs)
    if _is_symbolic(gm.graph):
        traced = _marked(_torch.retrace(gm, inputs, table), gm)
        keep_strides(traced, meta.output_values(gm), mode)
        return traced
    parts = _trace_parts(gm.graph, table, table.__contains__)
    for part, node in {part: node for node, part in parts.items()}.items():
        keep_strides(part, node.meta["val"], mode)
    inline(gm, parts, mode)
    return gm


def keep_strides(gm: GraphModule, before: Any, mode: Any) -> None:
    """Outputs as they were `before`. A table may give other strides, as Inductor's does for `cat`
    of one tensor and empty ones; so may its passes."""
    gm.meta["fake_mode"] = mode
    returned.keep_strides(gm, before)
    del gm.meta["fake_mode"]


def parts_of(graph: Graph, table: Table) -> Parts | None:
    """The parts of a graph as a front end left it, for `inline`. None where one call at a time is
    not enough: something is written, takes whole graphs or has symbolic sizes."""
    if _is_symbolic(graph) or not all(map(_is_plain, graph.nodes)):
        return None
    declined = _torch.declined_decompositions()
    instead = plain_masks(graph)
    parts = _trace_parts(
        graph,
        table,
        lambda op: op in table or (_torch.is_composite(op) and op not in declined),
        instead,
    )
    for node in instead:
        if not _stands_for(parts[node], node):
            parts[node] = _trace(node, node.target, table)
    return parts if all(_stands_for(part, node) for node, part in parts.items()) else None


def inline(gm: GraphModule, parts: Parts, mode: Any) -> None:
    """Replace calls by their parts, in place."""
    prefixes: dict[GraphModule, str] = {}
    with _torch.faking(mode):
        for node, part in parts.items():
            prefix = prefixes.setdefault(part, f"part{len(prefixes)}_")
            _inline(gm, node, part, prefix, mode)


def _is_symbolic(graph: Graph) -> bool:
    return any(
        _torch.symbols_of(leaf)
        for n in graph.nodes
        for leaf in _torch.flatten(n.meta.get("val"))[0]
    )


def _is_plain(node: Node) -> bool:
    """Whether a node computes new values from plain tensors, and does nothing else."""
    values = _torch.flatten(node.meta.get("val"))[0]
    if any(isinstance(value, Tensor) and not _torch.is_fake(value) for value in values):
        return False
    if node.op != "call_function" or node.target is operator.getitem:
        return True
    if node.target is torch.ops.aten.detach_.default:  # it writes no data
        return True
    return _torch.is_op(node.target) and not node.target._schema.is_mutable  # type: ignore[union-attr]


def _stands_for(part: GraphModule, node: Node) -> bool:
    """Whether parts give what their call gave, and hide no write that its schema keeps quiet about
    (`batch_norm` updates its statistics)."""
    [result] = (n.args[0] for n in part.graph.find_nodes(op="output"))
    return meta.alike(meta.value(result), node.meta["val"]) and all(
        map(_is_plain, part.graph.nodes)
    )


def _marked(traced: GraphModule, source: GraphModule) -> GraphModule:
    """A traced graph whose weights are marked as they were before it was traced."""
    weights = {
        id(getattr(source, str(node.target))): node.meta["weight"]
        for node in source.graph.find_nodes(op="get_attr")
        if "weight" in node.meta
    }
    for node in traced.graph.find_nodes(op="get_attr"):
        if (name := weights.get(id(getattr(traced, str(node.target))))) is not None:
            node.meta["weight"] = name
    return traced


def _trace_parts(
    graph: Graph,
    table: Table,
    wanted: Callable[[Any], bool],
    instead: Mapping[Node, Callable[..., Any]] = MappingProxyType({}),
) -> Parts:
    """The parts of each wanted call, or of what is to be called instead; equal calls have the
    same."""
    traced: dict[str, GraphModule] = {}
    parts: Parts = {}
    for node in graph.nodes:
        if node.op != "call_function" or not wanted(node.target):
            continue
        fn = instead.get(node, node.target)
        key = _key(node, fn)
        if key not in traced:
            traced[key] = _trace(node, fn, table)
        parts[node] = traced[key]
    return parts


def _trace(node: Node, fn: Any, table: Table) -> GraphModule:
    used = node.all_input_nodes

    def call(*values: Any) -> Any:
        known = dict(zip(used, values, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
        return fn(*args, **kwargs)

    # Not what needs a gradient: `matmul` comes apart otherwise where a weight does.
    values = [n.meta["val"] for n in used]
    fakes = [v.detach() if isinstance(v, Tensor) and v.requires_grad else v for v in values]
    return _torch.retrace(call, fakes, table)


def _key(node: Node, fn: Any) -> str:
    """Equal for calls of one function with equal arguments on inputs of equal types."""
    used = node.all_input_nodes

    def kind(used_node: Node) -> str:
        value, which = used_node.meta["val"], used.index(used_node)
        if not isinstance(value, Tensor):
            return f"{which} {value!r}"
        stride = value.stride() if value.layout == torch.strided else ()
        kinds = (value.dtype, value.device, value.layout)
        return f"{which} {tuple(value.shape)} {stride} {kinds}"

    return repr((fn, map_arg((node.args, node.kwargs), kind)))


def _inline(gm: GraphModule, node: Node, part: GraphModule, prefix: str, mode: Any) -> None:
    env: dict[Node, Any] = {}
    sources = iter(node.all_input_nodes)
    with gm.graph.inserting_before(node):
        for inner in part.graph.nodes:
            if inner.op == "placeholder":
                env[inner] = next(sources)
            elif inner.op == "output":
                result = map_arg(inner.args[0], env.__getitem__)
            else:
                env[inner] = copied = gm.graph.node_copy(inner, env.__getitem__)
                meta.inherit(copied, node)
                if inner.op == "get_attr":
                    held = getattr(part, str(inner.target))
                    copied.target = prefix + str(inner.target)
                    setattr(gm, copied.target, held)
                    copied.meta["val"] = _torch.fake_of(mode, held)
                else:  # a value of its own: equal memory would mean aliasing to the generator
                    args, kwargs = meta.value((copied.args, copied.kwargs))
                    copied.meta["val"] = copied.target(*args, **kwargs)  # type: ignore[operator]
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):  # several results: each user takes one of them
            user.replace_all_uses_with(result[user.args[1]])
            gm.graph.erase_node(user)
    gm.graph.erase_node(node)
