"""`torchair.ops`: operators for the inside of a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft.fx.label import stream_of
from torchgraft.stream.markers import LABEL, SCHEMAS

_make: Any = torch.library.Library  # untyped in torch
_LIBRARY: Any = _make("air", "FRAGMENT")  # lives as long as the process
_SCHEMAS = {
    "print": "(str template, Tensor[] tensors, int summarize_size=3, bool detail=False) -> ()",
    "tagged_event_record": "(str tag, bool created_inside=False) -> ()",
    "tagged_event_wait": "(str tag, bool created_inside=False) -> ()",
    "record_tagged_stream": "(Tensor input, str tag) -> ()",
}


def _print(
    template: str, tensors: list[Tensor], summarize_size: int = 3, detail: bool = False
) -> None:
    import numpy

    shown = []
    for tensor in tensors:
        held = tensor.detach().cpu()
        plain = (held.float() if held.dtype == torch.bfloat16 else held).numpy()
        edges, most = max(summarize_size, 1), sys.maxsize if summarize_size == -1 else 0
        text = numpy.array2string(plain, edgeitems=edges, threshold=most, separator=", ")
        about = f" shape={tuple(tensor.shape)} dtype={tensor.dtype} device={tensor.device}"
        shown.append(text + (about if detail else ""))
    print(template.format(*shown), flush=True)


def _define() -> None:
    for name, signature in _SCHEMAS.items():
        if hasattr(torch.ops.air, name):
            continue
        _LIBRARY.define(f"{name}{signature}")
        kernel = _print if name == "print" else (lambda *args, **kwargs: None)
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        _LIBRARY.impl(name, lambda *args, **kwargs: None, "Meta")
        torch.fx.node.has_side_effect(getattr(torch.ops.air, name).default)


_define()


def _twins() -> tuple[Any, dict[Any, Any]]:
    """The markers by npugraph_ex's names: each is a call of that of `air`, in what is traced."""
    library: Any = _make("npugraph_ex", "FRAGMENT")
    made = {}
    for schema in SCHEMAS:
        name = schema.partition("(")[0]
        air = getattr(torch.ops.air, name).default
        library.define(schema, alias_analysis="CONSERVATIVE")
        library.impl(name, air, "CompositeImplicitAutograd")
        made[getattr(torch.ops.npugraph_ex, name).default] = air
    for twin in made:
        torch.fx.node.has_side_effect(twin)
    return library, made


_NPUGRAPH_EX, TWINS = _twins()


def use_air(gm: GraphModule) -> None:
    """Let markers that a pass wrote by npugraph_ex's names be those of `air`."""
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.target = TWINS.get(node.target, node.target)


def npu_print(*args: Any, summarize_size: int = 3, tensor_detail: bool = False) -> None:
    """Print tensors and other values when the graph runs, in the order of the program."""
    if not isinstance(summarize_size, int) or isinstance(summarize_size, bool):
        raise TypeError(f"summarize_size: expected a whole number, got {summarize_size!r}")
    if summarize_size != -1 and summarize_size <= 0:
        raise ValueError(f"summarize_size: expected -1 (all) or more than 0, got {summarize_size}")
    if not isinstance(tensor_detail, bool):
        raise TypeError(f"tensor_detail: expected True or False, got {tensor_detail!r}")
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if not tensors:
        raise ValueError("npu_print: expected at least one tensor")
    braces = ["{}" if isinstance(arg, Tensor) else _escaped(arg) for arg in args]
    torch.ops.air.print(" ".join(braces), tensors, summarize_size, tensor_detail)


def _escaped(value: Any) -> str:
    return str(value).replace("{", "{{").replace("}", "}}")


def record() -> Tensor:
    """A point that the current stream has reached; `wait` holds for it."""
    token: Tensor = torch.ops.air.record()
    return token


def wait(tensors: Sequence[Tensor]) -> None:
    """What follows on the current stream waits for these records, or for these tensors."""
    if not isinstance(tensors, (list, tuple)) or not tensors:
        raise ValueError(f"wait: expected a list of tensors, got {tensors!r}")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"wait: expected tensors, got {tensor!r} ({type(tensor).__name__})")
    torch.ops.air.wait(list(tensors))


class _Event:
    """An event by its tag."""

    tags: set[str] = set()  # noqa: RUF012  tags are taken for the whole process

    def __init__(self, tag: str) -> None:
        if tag in self.tags:
            raise ValueError(f"npu_create_tagged_event: tag {tag!r} is in use")
        self.tag = tag
        self.tags.add(tag)

    def __del__(self) -> None:
        self.tags.discard(getattr(self, "tag", ""))


def npu_create_tagged_event(tag: str) -> _Event:
    """An event of this name; the name is free again when the event is gone."""
    return _Event(tag)


def npu_tagged_event_record(event: _Event) -> None:
    """Mark the point that the current stream has reached."""
    torch.ops.air.tagged_event_record(event.tag)


def npu_tagged_event_wait(event: _Event) -> None:
    """Wait for the point that was marked."""
    torch.ops.air.tagged_event_wait(event.tag)


def npu_record_tagged_stream(input: Tensor, tagged_stream: str) -> None:
    """Keep a tensor's memory until a stream is done with it; a plan here does so by itself."""
    torch.ops.air.record_tagged_stream(input, tagged_stream)


def events(gm: GraphModule, example_inputs: Sequence[Any], config: Any) -> None:
    """A pass: let tagged events be records, and waits for the last of them."""
    air = torch.ops.air
    points: dict[str, Node] = {}

    def mark(node: Node, target: Any, *args: Any) -> Node:
        """A marker in the place of a node, on its stream."""
        with gm.graph.inserting_before(node):
            scope = ([LABEL], [stream_of(node)])
            gm.graph.call_function(air.scope_enter.default, scope)
            made = gm.graph.call_function(target, args)
            gm.graph.call_function(air.scope_exit.default)
        gm.graph.erase_node(node)
        return made

    for node in list(gm.graph.nodes):
        if node.target is air.tagged_event_record.default:
            points[str(node.args[0])] = mark(node, air.record.default)
        elif node.target is air.tagged_event_wait.default:
            tag = str(node.args[0])
            if tag not in points:
                raise RuntimeError(f"tagged event {tag!r} is waited for, and never recorded before")
            mark(node, air.wait.default, [points[tag]])


def __getattr__(name: str) -> Any:
    from torchgraft.compat.refused import refuse

    return refuse("torchair.ops", name)
