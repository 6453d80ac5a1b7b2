"""What generated files of TorchAir call: `ge_op` with the prototype written as an `IrDef`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchgraft.compat.air.attr import KINDS, Attr
from torchgraft.compat.air.ge import custom_op
from torchgraft.op.declare import TABLE
from torchgraft.op.dtypes import DTYPES
from torchgraft.op.prototype import Attr as PrototypeAttr
from torchgraft.op.prototype import Kind, Port, Prototype


class IrDef:
    """A prototype, a part at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.inputs: list[Port] = []
        self.outputs: list[Port] = []
        self.attrs: list[PrototypeAttr] = []

    def _port(self, into: list[Port], name: str, kind: Kind, dtypes: str) -> IrDef:
        named = frozenset(one.strip() for one in dtypes.split(",")) & DTYPES.keys()
        into.append(Port(name, kind, frozenset(named) or None))
        return self

    def input(self, name: str, dtypes: str = "") -> IrDef:
        return self._port(self.inputs, name, "required", dtypes)

    def optional_input(self, name: str, dtypes: str = "") -> IrDef:
        return self._port(self.inputs, name, "optional", dtypes)

    def dynamic_input(self, name: str, dtypes: str = "") -> IrDef:
        return self._port(self.inputs, name, "dynamic", dtypes)

    def output(self, name: str, dtypes: str = "") -> IrDef:
        return self._port(self.outputs, name, "required", dtypes)

    def dynamic_output(self, name: str, dtypes: str = "") -> IrDef:
        return self._port(self.outputs, name, "dynamic", dtypes)

    def required_attr(self, name: str, kind: type[Attr]) -> IrDef:
        self.attrs.append(PrototypeAttr(name, _type(kind)))
        return self

    def attr(self, name: str, value: Attr) -> IrDef:
        self.attrs.append(PrototypeAttr(name, _type(type(value)), False, value.plain))
        return self

    def prototype(self) -> Prototype:
        return Prototype(
            self.name,
            tuple(self.inputs),
            tuple(self.outputs),
            tuple(self.attrs),
            "a generated file",
        )


def _type(kind: type[Attr]) -> str:
    return next(name for name, known in KINDS.items() if known is kind)


def ge_op(
    *,
    op_type: str,
    inputs: Mapping[str, Any],
    outputs: Sequence[Any],
    attrs: Mapping[str, Any] | None = None,
    dependencies: Sequence[Any] = (),
    ir: IrDef | None = None,
    node_name: str | None = None,
    **_: Any,
) -> Any:
    """A call of an operator; its prototype is declared where nothing has declared it."""
    if op_type not in TABLE.prototypes and ir is not None:
        TABLE.declare(ir.prototype())
    return custom_op(op_type, inputs=inputs, outputs=outputs, attrs=attrs, node_name=node_name)


class _Sets(type):
    def __getattr__(cls, name: str) -> str:
        if not name.startswith("TT_"):
            raise AttributeError(f"TensorType has no set {name!r}")
        return name


class TensorType(metaclass=_Sets):
    """Named sets of element types, `TensorType.TT_ALL`: generated files tell them of inputs. The
    prototype has them, too, and is what is checked."""


def auto_convert_to_tensor(
    is_dynamic: Sequence[bool], is_optional: Sequence[bool], *_: Any, **__: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Lets a generated function take numbers for tensors; `custom_op` makes constants of them."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            for arg, dynamic, optional in zip(args, is_dynamic, is_optional, strict=False):
                assert arg is not None or optional, f"{fn.__name__}: a required input is None"
                assert not dynamic or isinstance(arg, (list, tuple)), f"{fn.__name__}: not a list"
            return fn(*args, **kwargs)

        return call

    return decorate
