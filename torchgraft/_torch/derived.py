"""How tensors came about from others while something ran, to be done again. torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

aten = torch.ops.aten


class Derived(TorchFunctionMode):
    """Remembers, while it is entered, every call that makes one tensor of others. It keeps them,
    so it is for short work on constants: Inductor packs weights for the products it generates."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[Tensor, Callable[..., Any], Any, Any]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if type(made) is Tensor and id(made) not in self._made:
            given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            known = all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in given)
            if given and known and all(made is not tensor for tensor in given):
                self._made[id(made)] = (made, func, args, kwargs or {})
        return made

    def steps(self, tensor: Tensor) -> GraphModule | None:
        """The operators that made a tensor, in a module that holds what they began with; None
        where no call made it, or where those could not be done again on tensors that lie
        elsewhere."""
        if id(tensor) not in self._made:
            return None
        sources: list[Tensor] = []
        self._collect(tensor, sources)

        def again(*given: Tensor) -> Tensor:
            made = {id(source): twin for source, twin in zip(sources, given, strict=True)}
            return self._replay(tensor, made)

        from torch.fx.experimental.proxy_tensor import make_fx

        with torch.no_grad():
            gm = make_fx(again)(*sources)
        for node, source in zip(gm.graph.find_nodes(op="placeholder"), sources, strict=True):
            gm.register_buffer(f"source_{node.name}", source)
            with gm.graph.inserting_before(node):
                held = gm.graph.create_node("get_attr", f"source_{node.name}")
            node.replace_all_uses_with(held)
            gm.graph.erase_node(node)
        return gm if all(map(_placed, gm.graph.nodes)) else None

    def _collect(self, tensor: Tensor, sources: list[Tensor]) -> None:
        if id(tensor) in self._made:
            for leaf in pytree.tree_leaves(self._made[id(tensor)][2:]):
                if isinstance(leaf, Tensor):
                    self._collect(leaf, sources)
        elif not any(tensor is source for source in sources):
            sources.append(tensor)

    def _replay(self, tensor: Tensor, made: dict[int, Tensor]) -> Tensor:
        if id(tensor) not in made:
            _, func, args, kwargs = self._made[id(tensor)]
            args, kwargs = pytree.tree_map_only(
                Tensor, lambda leaf: self._replay(leaf, made), (args, kwargs)
            )
            made[id(tensor)] = func(*args, **kwargs)
        return made[id(tensor)]


def _placed(node: Node) -> bool:
    """Whether a call says nothing of where its operand lies in memory; one that did is written
    anew. Inductor undoes views of a constant with `as_strided`, whose offset is the storage's."""
    if node.target is not aten.as_strided.default or node.args[0].op != "get_attr":  # type: ignore[union-attr]
        return True
    held, size, stride, *offset = node.args
    source: Tensor = getattr(node.graph.owning_module, held.target)  # type: ignore[union-attr, arg-type]
    if source.storage_offset() != (offset[0] if offset else source.storage_offset()):
        return False
    wanted = list(zip(size, stride, strict=True))  # type: ignore[arg-type]
    dims = list(zip(source.shape, source.stride(), strict=True))
    if sorted(wanted) != sorted(dims):
        return False
    order = []
    for dim in wanted:
        at = dims.index(dim)
        order.append(at)
        dims[at] = None  # type: ignore[call-overload]
    node.target, node.args = aten.permute.default, (held, order)
    return True
