"""`register_fx_node_ge_converter`: converters as TorchAir's users write them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

import torchgraft as graft
from torchgraft import _torch
from torchgraft.compat.air.ge import Tensor, TensorSpec
from torchgraft.config import Config
from torchgraft.convert.net import CURRENT, Net, Value
from torchgraft.errors import GraftError
from torchgraft.op.build import build
from torchgraft.op.declare import TABLE, devices_of
from torchgraft.op.prototype import Prototype


class Converter:
    """A registered converter. Calling it with another function registers that one instead."""

    def __init__(self, target: Any, fn: Callable[..., Any]) -> None:
        self.target, self.fn = target, fn
        self.supported: list[Support] = []
        functools.update_wrapper(self, fn)
        self._register(fn)

    def _register(self, fn: Callable[..., Any]) -> None:
        wants_meta = _takes(fn, "meta_outputs")

        @functools.wraps(fn)
        def convert(net: Net, *args: Any, **kwargs: Any) -> Any:
            net.value_type = Tensor
            args, kwargs = map_aggregate((args, kwargs), _tensor)
            if wants_meta:
                kwargs = {**kwargs, "meta_outputs": _spec(net.node.meta["val"])}
            return fn(*args, **kwargs)

        convert.__signature__ = inspect.signature(  # type: ignore[attr-defined]
            lambda net, *args, **kwargs: None
        )
        graft.converter(self.target, name=getattr(fn, "__name__", "converter"))(convert)

    def __call__(self, fn: Callable[..., Any]) -> Converter:
        self.fn = fn
        self._register(fn)
        return self


def register_fx_node_ge_converter(aten_op: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function the converter of an operator: `torch.ops.ns.op.overload`.

    It gets the call's arguments as they stand in the graph, tensors as `ge.Tensor`, and as
    `meta_outputs` what it must give. The last one registered goes first.
    """

    if aten_op is not None and not callable(aten_op):
        raise TypeError(
            f"expected an operator, such as torch.ops.aten.sin.default, got {aten_op!r}"
        )

    def decorate(fn: Callable[..., Any]) -> Any:
        if aten_op is None or not (_torch.is_op(aten_op) or _torch.is_packet(aten_op)):
            return fn  # nothing, or a builtin of Python, which needs no converter here
        return Converter(aten_op, fn)

    return decorate


def _takes(fn: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(fn).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _tensor(arg: Any) -> Any:
    return Tensor(arg.node) if isinstance(arg, Value) else arg


def _spec(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_spec(one) for one in value]
    return TensorSpec(value)


class Support:
    """A call that a converter supports: typed tensors and other arguments, and their range."""

    def __init__(
        self, *args: Any, value_range: tuple[float, float] | None = None, **kwargs: Any
    ) -> None:
        self.args, self.kwargs, self.value_range = args, kwargs, value_range


def declare_supported(supported: Sequence[Support]) -> Callable[[Any], Any]:
    """Say what a converter supports; `check_supported` runs each with and without it."""

    def decorate(converter: Any) -> Any:
        converter.supported = list(supported)
        return converter

    return decorate


class T:
    """A tensor by its values, in a `Support`."""

    def __init__(self, value: Any, dtype: torch.dtype | None = None) -> None:
        self.value, self.dtype = value, dtype


class _Sized:
    """A tensor by its sizes and element type, in a `Support`: `F32(2, 2)`."""

    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        self.sizes, self.dtype = sizes, dtype


def _sized(dtype: torch.dtype) -> Callable[..., _Sized]:
    return lambda *sizes: _Sized(sizes, dtype)


F16, F32, F64, BF16 = map(_sized, (torch.float16, torch.float32, torch.float64, torch.bfloat16))
I8, I16, I32, I64 = map(_sized, (torch.int8, torch.int16, torch.int32, torch.int64))
U8, BOOL, C64 = map(_sized, (torch.uint8, torch.bool, torch.complex64))


def check_supported(converter: Converter) -> int:
    """Run every declared case with the converter and without it, and compare; how many."""
    for case in converter.supported:
        draw = functools.partial(_drawn, limits=case.value_range)
        args, kwargs = map_aggregate((case.args, case.kwargs), draw)
        eager = converter.target(*args, **kwargs)
        leaves, spec = _torch.flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        def call(
            *given: torch.Tensor, leaves: list[Any] = leaves, spec: Any = spec
        ) -> torch.Tensor:
            rest = iter(given)
            filled = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = _torch.unflatten(filled, spec)
            result: torch.Tensor = converter.target(*args, **kwargs)
            return result

        made = graft.compile(call, tuple(tensors), mode="eager")(*tensors)
        torch.testing.assert_close(made, eager)
    return len(converter.supported)


def _drawn(arg: Any, limits: tuple[float, float] | None) -> Any:
    if isinstance(arg, T):
        return torch.as_tensor(arg.value, dtype=arg.dtype)
    if not isinstance(arg, _Sized):
        return arg
    low, high = limits or (0, 10)
    drawn = torch.rand(arg.sizes) * (high - low) + low
    return (drawn > (low + high) / 2) if arg.dtype == torch.bool else drawn.to(arg.dtype)


def automatic(gm: GraphModule, example_inputs: Sequence[Any], config: Config) -> None:
    """Give each custom operator without a converter the call of the prototype of its name."""
    for node in list(gm.graph.nodes):
        prototype = _namesake(node)
        if prototype is None or graft.converters_for(node.target, config):
            continue
        net = Net(gm, node)
        scope = CURRENT.set(net)
        try:
            results = _call(net, node, prototype)
        except GraftError:
            net.drop()
            continue
        finally:
            CURRENT.reset(scope)
        if results is not None and len(results) == 1:
            node.replace_all_uses_with(results[0].node)
            gm.graph.erase_node(node)


def _namesake(node: Node) -> Prototype | None:
    """The prototype with a kernel whose name is the operator's, in camel case."""
    target = node.target
    if not _torch.is_op(target) or target.namespace in ("aten", "prims", "ge", "air"):  # type: ignore[union-attr]
        return None
    name = target._schema.name.partition("::")[2].removesuffix("_functional")  # type: ignore[union-attr]
    camel = "".join(part[:1].upper() + part[1:] for part in re.split("_+", name))
    for title in (camel, camel.removeprefix("Npu")):
        prototype = TABLE.prototypes.get(title)
        if prototype is not None and (title in TABLE.bodies or devices_of(f"ge::{title}")):
            return prototype
    return None


def _call(net: Net, node: Node, prototype: Prototype) -> list[Value] | None:
    """The prototype's call for an operator's; None where their arguments do not correspond."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    tensors = [a for a in schema.arguments if "Tensor" in str(a.type)]
    others = [a for a in schema.arguments if "Tensor" not in str(a.type)]
    if len(tensors) != len(prototype.inputs) or len(others) > len(prototype.attrs):
        return None
    if any("Scalar" in str(a.type) for a in others) or len(prototype.outputs) != len(
        schema.returns
    ):
        return None
    value: Any = lambda arg: Value(arg) if isinstance(arg, Node) else arg  # noqa: E731
    inputs = {
        port.name: map_aggregate(given.get(a.name), value)
        for port, a in zip(prototype.inputs, tensors, strict=True)
    }
    attrs = {
        attr.name: given[a.name]
        for attr, a in zip(prototype.attrs, others, strict=False)
        if a.name in given
    }
    made = build(prototype.name, inputs=inputs, outputs=_names(prototype), attrs=attrs)
    return list(made) if isinstance(made, tuple) else [made]


def _names(prototype: Prototype) -> list[str]:
    return [port.name for port in prototype.outputs]
