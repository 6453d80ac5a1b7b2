"""Taking operators apart, as the code generator wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchgraft import _torch


def decompose(
    gm: GraphModule, inputs: Sequence[Any], table: Mapping[Any, Callable[..., Any]]
) -> GraphModule:
    """The graph with every call that `table` decomposes replaced by its parts.

    Calls of one operator on equal types are traced once: a model is the same layer many times.
    With symbolic sizes the whole graph is traced again instead, because a part may need any size.
    """
    if any(
        _torch.symbols_of(leaf)
        for n in gm.graph.nodes
        for leaf in _torch.flatten(n.meta.get("val"))[0]
    ):
        return _marked(_torch.retrace(gm, inputs, table), gm)
    traced: dict[str, GraphModule] = {}
    with _torch.faking(_torch.fake_mode_of(inputs)):
        for node in list(gm.graph.nodes):
            if node.op == "call_function" and node.target in table:
                _expand(gm, node, table, traced)
    return gm


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


def _expand(
    gm: GraphModule,
    node: Node,
    table: Mapping[Any, Callable[..., Any]],
    traced: dict[str, GraphModule],
) -> None:
    used = list(node.all_input_nodes)

    def call(*values: Any) -> Any:
        known = dict(zip(used, values, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    fakes = [n.meta["val"] for n in used]
    key = repr((node.target, map_arg((node.args, node.kwargs), _type_key(used, fakes))))
    if key not in traced:
        traced[key] = _torch.retrace(call, fakes, table)
    _inline(gm, node, used, traced[key], f"part{len(traced)}_")


def _type_key(used: list[Node], fakes: list[Any]) -> Callable[[Node], Any]:
    """What stands for an input in a key: which input it is, and its type."""

    def key(node: Node) -> Any:
        value = fakes[used.index(node)]
        if not isinstance(value, Tensor):
            return (used.index(node), repr(value))
        kind = (value.dtype, value.device, value.layout, value.requires_grad)
        return (used.index(node), tuple(value.shape), value.stride(), *map(str, kind))

    return lambda node: repr(key(node))


def _inline(gm: GraphModule, node: Node, used: list[Node], part: GraphModule, prefix: str) -> None:
    env: dict[Node, Any] = {}
    sources = iter(used)
    with gm.graph.inserting_before(node):
        for inner in part.graph.nodes:
            if inner.op == "placeholder":
                env[inner] = next(sources)
            elif inner.op == "output":
                result = map_arg(inner.args[0], env.__getitem__)
            else:
                env[inner] = copied = gm.graph.node_copy(inner, env.__getitem__)
                if inner.op == "get_attr":
                    copied.target = prefix + str(inner.target)
                    setattr(gm, copied.target, getattr(part, str(inner.target)))
                else:  # a value of its own: equal memory would mean aliasing to the generator
                    args, kwargs = map_arg((copied.args, copied.kwargs), lambda n: n.meta["val"])
                    copied.meta["val"] = copied.target(*args, **kwargs)  # type: ignore[operator]
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):  # several results: each user takes one of them
            user.replace_all_uses_with(result[user.args[1]])
            gm.graph.erase_node(user)
    gm.graph.erase_node(node)
