"""`torchair.ge`: what the author of a converter builds with. All of it makes nodes of the graph."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from torchgraft.compat.air import attr as attrs_module
from torchgraft.convert.net import CURRENT, Net, Value
from torchgraft.errors import NotOnThisDevice, NotRegistered, UnknownName
from torchgraft.op.build import build
from torchgraft.op.declare import TABLE
from torchgraft.op.dtypes import DTYPES, dtype_name
from torchgraft.op.lookup import find_kernel
from torchgraft.op.prototype import Port, Prototype

DataType = type(
    "DataType",
    (),
    {
        "__doc__": "Element types by number.",
        "__slots__": (),
        **{name: dtype.code for name, dtype in DTYPES.items()},
        "DT_MAX": 42,
    },
)


class Format(enum.Enum):
    """How a tensor lies in memory. Off the NPU every tensor is ND."""

    FORMAT_NCHW = 0
    FORMAT_NHWC = 1
    FORMAT_ND = 2
    FORMAT_NC1HWC0 = 3
    FORMAT_FRACTAL_Z = 4
    FORMAT_NC1HWC0_C04 = 12
    FORMAT_HWCN = 16
    FORMAT_NDHWC = 27
    FORMAT_FRACTAL_NZ = 29
    FORMAT_NCDHW = 30
    FORMAT_NDC1HWC0 = 32
    FORMAT_FRACTAL_Z_3D = 33


def torch_dtype(dtype: Any) -> torch.dtype:
    """A dtype of torch from torch's own, a number of `DataType`, or a `DT_*` name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    found = DTYPES[dtype_name(dtype)].torch
    if found is None:
        raise ValueError(f"torch has no dtype {dtype_name(dtype)}")
    return found


def ge_dtype(dtype: torch.dtype) -> int:
    """The number of a dtype of torch."""
    return DTYPES[dtype_name(dtype)].code


class Tensor(Value):
    """A tensor of the graph inside a converter."""

    __slots__ = ()

    def __init__(self, node: Any, index: int = 0) -> None:
        """A node, or an output of a message of `legacy`."""
        super().__init__(node if isinstance(node, Node) else node.output(index).node)

    @property
    def tensor(self) -> str:
        """What an older builder takes for an input."""
        from torchgraft.compat.air.legacy import Edge

        return Edge(f"{self.node.name}:0", self)

    @property
    def controller(self) -> str:
        """What an older builder takes for an order; the order of calls here is that of data."""
        return f"{self.node.name}:-1"

    @property
    def desc(self) -> Any:
        """What an older builder copies for an input."""
        return self.meta

    @property
    def dtype(self) -> int:  # type: ignore[override]
        """Its element type, a number of `DataType`."""
        return ge_dtype(super().dtype)

    @property
    def meta(self) -> Any:
        """Its type as torch knows it: a fake tensor, or a symbolic number."""
        return self.node.meta["val"]

    @property
    def rank(self) -> int:
        return self.ndim

    @property
    def index(self) -> int:
        """Which output of its operator it is; each has a node of its own here."""
        return 0

    @property
    def symsize(self) -> list[Any]:
        return list(self.shape)


class TensorSpec:
    """What a converter must give: element type, rank and sizes."""

    def __init__(self, meta: Any) -> None:
        self._meta = meta
        self.dtype = ge_dtype(meta.dtype) if isinstance(meta, torch.Tensor) else None
        self.rank = meta.ndim if isinstance(meta, torch.Tensor) else 0
        self._symsize = list(meta.shape) if isinstance(meta, torch.Tensor) else []
        self._torch_dtype = meta.dtype if isinstance(meta, torch.Tensor) else None

    @property
    def size(self) -> list[int]:
        """Its sizes; an AssertionError where one is dynamic: a converter serves all of them."""
        fixed = all(isinstance(size, int) for size in self._symsize)
        assert fixed, (
            f"Trying get size() from dynamic spec {self} is not allowed: use meta_outputs._symsize"
        )
        return self._symsize

    def __repr__(self) -> str:
        dtype = None if self.dtype is None else dtype_name(self.dtype)
        return f"TensorSpec(dtype={dtype}, size={self._symsize})"


def net() -> Net:
    """The net of the converter that is running."""
    current = CURRENT.get()
    if current is None:
        raise RuntimeError(
            "torchair.ge builds the graph inside a converter: call it in a function under "
            "@register_fx_node_ge_converter(...)"
        )
    return current


def Const(v: Any, dtype: Any = None, node_name: str | None = None, readable: bool = True) -> Any:
    """A constant of the graph: a number, nested lists of them, or a tensor."""
    if isinstance(v, Value):
        raise ValueError(f"Const takes a number, a list or a torch.Tensor, got {v!r}")
    if dtype is None and isinstance(v, (list, tuple)) and not len(v):
        dtype = torch.int32
    wanted = None if dtype is None else torch_dtype(dtype)
    return net().constant(v, dtype=wanted)


def Cast(x: Any, *, dst_type: Any, dependencies: Any = (), node_name: str | None = None) -> Any:
    """A value in another element type; itself where it has that one."""
    if not isinstance(x, Value):
        return Const(x, dst_type)
    wanted = torch_dtype(dst_type)
    if x.node.meta["val"].dtype == wanted:
        return x
    return net().add(torch.ops.aten._to_copy.default, x, dtype=wanted)


def Clone(x: Any, *, dependencies: Any = (), node_name: str | None = None) -> Any:
    """A value in memory of its own."""
    return net().add(torch.ops.aten.clone.default, x)


def dtype_promote(*tensors: Any, target_dtype: Any) -> Any:
    """Each value (or number) in one element type."""
    cast = [Cast(one, dst_type=target_dtype) for one in tensors]
    return cast[0] if len(cast) == 1 else tuple(cast)


def custom_op(
    op_type: str,
    *args: Any,
    inputs: Mapping[str, Any] | None = None,
    outputs: Sequence[Any] | None = None,
    attrs: Mapping[str, Any] | None = None,
    node_name: str | None = None,
) -> Any:
    """A call of the operator of a prototype, by position or by names, checked against it.

    By position: all inputs, then all attributes, in the prototype's order. By name: `inputs` and
    `attrs` (values of `ge.attr`) as mappings, `outputs` as a list of names, where a dynamic one is
    `("ys", 3)`.
    """
    prototype = TABLE.prototypes.get(op_type)
    if prototype is None:
        from torchgraft.compat.air import builtins

        if op_type not in builtins.BUILTINS:
            raise unregistered(op_type)
        if args:
            return builtins.BUILTINS[op_type](*args)
        plain = {name: value.plain for name, value in (attrs or {}).items()}
        return builtins.by_name(op_type, dict(inputs or {}), plain)
    if args and (inputs or outputs or attrs):
        raise ValueError(f"custom_op({op_type!r}) is given both by position and by names")
    if inputs is None and outputs is None and attrs is None:
        inputs, attrs = _positional(prototype, args)
    else:
        inputs, attrs = dict(inputs or {}), _checked_attrs(prototype, attrs or {})
    named = _outputs(prototype, outputs)
    _check_names(prototype, "input", inputs, prototype.inputs)
    fed = {port.name: _fed(prototype, port, inputs) for port in prototype.inputs}
    return build(op_type, inputs=fed, outputs=named, attrs=attrs, node_name=node_name)


def unregistered(op_type: str) -> Exception:
    """What using an operator raises that no prototype and no built-in stands for."""
    try:
        find_kernel(op_type)
    except NotRegistered as error:
        cause = str(error)
    else:
        cause = f"ge::{op_type} is an operator, and has no prototype."
    return RuntimeError(
        f"No AscendIR {op_type} was found to be registered. {cause}\nLoad the header or the JSON "
        f"file that has it: torchgraft.load_prototypes(path), or `torchgraft op-plugin` once."
    )


def _positional(prototype: Prototype, args: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    names = [port.name for port in prototype.inputs]
    count = len(names) + len(prototype.attrs)
    if len(args) != count:
        raise IndexError(
            f"custom_op({prototype.name!r}) takes {len(names)} inputs and {len(prototype.attrs)} "
            f"attributes by position ({', '.join([*names, *(a.name for a in prototype.attrs)])}), "
            f"got {len(args)} ({prototype.where})"
        )
    given = dict(zip(names, args, strict=False))
    attrs = {}
    for attr, value in zip(prototype.attrs, args[len(names) :], strict=True):
        if value is not None:
            attrs[attr.name] = attrs_module.KINDS[attr.type](value).plain
    return given, attrs


def _checked_attrs(prototype: Prototype, attrs: Mapping[str, Any]) -> dict[str, Any]:
    _check_names(prototype, "attribute", attrs, prototype.attrs)
    types = {attr.name: attr.type for attr in prototype.attrs}
    plain = {}
    for name, value in attrs.items():
        kind = attrs_module.KINDS[types[name]]
        assert isinstance(value, kind), (
            f"attribute {name!r} of {prototype.name} is {types[name]}: expected "
            f"ge.attr.{kind.__name__}(...), got {value!r} ({prototype.where})"
        )
        plain[name] = value.plain
    return plain


def _outputs(prototype: Prototype, outputs: Sequence[Any] | None) -> list[str | tuple[str, int]]:
    if outputs is None:
        for port in prototype.outputs:
            if port.kind == "dynamic":
                raise ValueError(
                    f"output {port.name!r} of {prototype.name} is dynamic: say how many there are, "
                    f"outputs=[({port.name!r}, 2)]"
                )
        return [port.name for port in prototype.outputs]
    named = [(o, None) if isinstance(o, str) else tuple(o) for o in outputs]
    _check_names(prototype, "output", [name for name, _ in named], prototype.outputs)
    return [name if count is None else (name, count) for name, count in named]


def _check_names(prototype: Prototype, kind: str, given: Any, known: Sequence[Any]) -> None:
    names = [one.name for one in known]
    for name in given:
        if name not in names:
            what = f"{kind} of {prototype.name}"
            raise UnknownName(what, name, names, where=prototype.where)


def _fed(prototype: Prototype, port: Port, inputs: Mapping[str, Any]) -> Any:
    value = inputs.get(port.name)
    if value is None and port.kind == "required":
        raise ValueError(f"input {port.name!r} of {prototype.name} is required, and is not given")
    if port.kind == "dynamic":
        assert isinstance(value, (list, tuple)), (
            f"input {port.name!r} of {prototype.name} is dynamic: expected a list, got {value!r}"
        )
        return [_tensor(one) for one in value]
    return None if value is None else _tensor(value)


def _tensor(value: Any) -> Any:
    return value if isinstance(value, (Value, Node)) else Const(value)


def builder(name: str) -> Callable[..., Any]:
    """The function of a prototype, as generated files have it: inputs, then attributes by name.
    Where no prototype is loaded: that of GE's own operator."""
    from torchgraft.compat.air.builtins import BUILTINS

    prototype = TABLE.prototypes.get(name)
    if prototype is None and name in BUILTINS:
        return BUILTINS[name]
    if prototype is None or not name[:1].isupper():
        nearest = "Load its prototype: torchgraft.load_prototypes(path)."
        raise NotOnThisDevice(f"ge_apis.{name}", nearest)

    def call(
        *args: Any, dependencies: Sequence[Any] = (), node_name: str | None = None, **attrs: Any
    ) -> Any:
        counted = [key for key in attrs if key.startswith("size_of_")]
        sizes = {key.removeprefix("size_of_"): attrs.pop(key) for key in counted}
        given = dict(zip((port.name for port in prototype.inputs), args, strict=False))
        outputs = [
            (p.name, sizes[p.name]) if p.name in sizes else p.name for p in prototype.outputs
        ]
        kinds = {attr.name: attrs_module.KINDS[attr.type] for attr in prototype.attrs}
        _check_names(prototype, "attribute", attrs, prototype.attrs)
        typed = {key: kinds[key](value) for key, value in attrs.items()}
        return custom_op(name, inputs=given, outputs=outputs, attrs=typed, node_name=node_name)

    return call
