"""Operators of GE itself, as ATen: what a converter builds with beside its own prototypes.

`ge_apis.Add(x, y)` and `custom_op("Add", ...)` find them here where no prototype of that name is
loaded. Parameters have the names of GE's inputs and attributes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.compat.air.ge import Const, net, torch_dtype
from torchgraft.convert.net import Value
from torchgraft.fx import meta

BUILTINS: dict[str, Callable[..., Any]] = {}


def _builtin(fn: Callable[..., Any], *names: str) -> None:
    @functools.wraps(fn)
    def call(*args: Any, dependencies: Any = (), node_name: str | None = None, **named: Any) -> Any:
        return fn(*args, **named)

    for name in names:
        BUILTINS[name] = call


def _add(op: str, *args: Any, **kwargs: Any) -> Any:
    return net().add(f"aten::{op}", *args, **kwargs)


def _tensor(x: Any) -> Any:
    return x if isinstance(x, Value) else Const(x)


def _known(value: Any) -> Any:
    """Numbers of an input that ATen wants as numbers; they must be known when this compiles."""
    if not isinstance(value, Value):
        return value.tolist() if isinstance(value, torch.Tensor) else value
    held: Any = None
    if value.node.op == "get_attr":
        held = meta.attribute(net().gm, str(value.node.target))
    if not isinstance(held, torch.Tensor):
        raise NotImplementedError(f"{value} must be a constant: it is computed by the program")
    return held.tolist()


def _list(value: Any) -> list[Any]:
    known = _known(value)
    return list(known) if isinstance(known, (list, tuple, torch.Size)) else [known]


# --- One input, or two of one shape ---

_UNARY = {
    "Abs": "abs", "Acos": "acos", "Asin": "asin", "Atan": "atan", "BitwiseNot": "bitwise_not",
    "Ceil": "ceil", "Cos": "cos", "Cosh": "cosh", "Erf": "erf", "Exp": "exp", "Expm1": "expm1",
    "Floor": "floor", "Gelu": "gelu", "HardSwish": "hardswish", "Identity": "clone",
    "IsFinite": "isfinite", "IsInf": "isinf", "IsNan": "isnan", "Log": "log", "Log1p": "log1p",
    "LogicalNot": "logical_not", "Mish": "mish", "Neg": "neg", "OnesLike": "ones_like",
    "Reciprocal": "reciprocal", "Relu": "relu", "Round": "round", "Rsqrt": "rsqrt",
    "Sigmoid": "sigmoid", "Sign": "sign", "Sin": "sin", "Sinh": "sinh", "Softplus": "softplus",
    "Sqrt": "sqrt", "Square": "square", "Swish": "silu", "Tan": "tan", "Tanh": "tanh",
    "TensorMove": "clone", "ZerosLike": "zeros_like",
}  # fmt: skip
_BINARY = {
    "Add": "add", "Atan2": "atan2", "BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or",
    "Equal": "eq", "FloorDiv": "floor_divide", "FloorMod": "remainder", "Greater": "gt",
    "GreaterEqual": "ge", "Less": "lt", "LessEqual": "le", "LogicalAnd": "logical_and",
    "LogicalOr": "logical_or", "Maximum": "maximum", "Minimum": "minimum", "Mod": "fmod",
    "Mul": "mul", "NotEqual": "ne", "Pow": "pow", "RealDiv": "div", "Sub": "sub",
}  # fmt: skip


def _unary(op: str) -> Callable[..., Any]:
    return lambda x: _add(op, _tensor(x))


def _binary(op: str) -> Callable[..., Any]:
    def call(x1: Any, x2: Any) -> Any:
        if op in ("maximum", "minimum", "logical_and", "logical_or", "atan2"):
            x2 = _tensor(x2)  # ATen has no form with a number
        return _add(op, _tensor(x1), x2)

    return call


for _name, _op in _UNARY.items():
    _builtin(_unary(_op), _name)
for _name, _op in _BINARY.items():
    _builtin(_binary(_op), _name)


def _div(x1: Any, x2: Any) -> Any:
    """Whole numbers give a whole one."""
    whole = not _tensor(x1).meta.dtype.is_floating_point
    return _add("div", _tensor(x1), x2, rounding_mode="trunc" if whole else None)


def _squared_difference(x1: Any, x2: Any) -> Any:
    return _add("square", _add("sub", _tensor(x1), x2))


def _leaky(x: Any, *, negative_slope: float = 0.0) -> Any:
    return _add("leaky_relu", _tensor(x), negative_slope)


def _softmax(x: Any, *, axes: Any = (-1,)) -> Any:
    [axis] = _list(axes)
    return _add("softmax", _tensor(x), axis)


def _clip(x: Any, clip_value_min: Any, clip_value_max: Any) -> Any:
    return _add("clamp", _tensor(x), _known(clip_value_min), _known(clip_value_max))


def _select(condition: Any, x1: Any, x2: Any) -> Any:
    return _add("where", _tensor(condition), _tensor(x1), _tensor(x2))


_builtin(_div, "Div")
_builtin(_squared_difference, "SquaredDifference")
_builtin(_leaky, "LeakyRelu")
_builtin(_softmax, "SoftmaxV2")
_builtin(_clip, "ClipByValue")
_builtin(_select, "Select", "SelectV2")


# --- Matrices ---


def _matmul(
    x1: Any, x2: Any, bias: Any = None, *, transpose_x1: bool = False, transpose_x2: bool = False
) -> Any:
    one = _add("transpose", _tensor(x1), -2, -1) if transpose_x1 else _tensor(x1)
    two = _add("transpose", _tensor(x2), -2, -1) if transpose_x2 else _tensor(x2)
    made = _add("matmul", one, two)
    return made if bias is None else _add("add", made, bias)


def _matmul_v2(x1: Any, x2: Any, bias: Any = None, offset_w: Any = None, **attrs: Any) -> Any:
    if offset_w is not None or attrs.pop("offset_x", 0):
        raise NotImplementedError("MatMulV2: offsets are for quantised products")
    return _matmul(x1, x2, bias, **attrs)


def _batch_matmul(
    x1: Any, x2: Any, bias: Any = None, *, adj_x1: bool = False, adj_x2: bool = False
) -> Any:
    return _matmul(x1, x2, bias, transpose_x1=adj_x1, transpose_x2=adj_x2)


_builtin(_matmul, "MatMul")
_builtin(_matmul_v2, "MatMulV2")
_builtin(_batch_matmul, "BatchMatMul", "BatchMatMulV2")


# --- Shapes ---


def _reshape(x: Any, shape: Any, *, axis: int = 0, num_axes: int = -1) -> Any:
    return _add("reshape", _tensor(x), _list(shape))


def _permute(x: Any, perm: Any) -> Any:
    return _add("permute", _tensor(x), _list(perm))


def _squeeze(x: Any, *, axis: Any = ()) -> Any:
    dims = _list(axis)
    return _add("squeeze", _tensor(x), dims) if dims else _add("squeeze", _tensor(x))


def _unsqueeze(x: Any, *, axes: Any) -> Any:
    for axis in sorted(_list(axes)):
        x = _add("unsqueeze", _tensor(x), axis)
    return x


def _concat(x: Any, concat_dim: Any) -> Any:
    return _add("cat", [_tensor(one) for one in x], _list(concat_dim)[0])


def _pack(x: Any, *, axis: int = 0, N: int | None = None) -> Any:
    return _add("stack", [_tensor(one) for one in x], axis)


def _slice(x: Any, offsets: Any, size: Any) -> Any:
    made = _tensor(x)
    for dim, (start, length) in enumerate(zip(_list(offsets), _list(size), strict=True)):
        end = made.shape[dim] if length == -1 else start + length
        made = _add("slice", made, dim, start, end)
    return made


def _gather(x: Any, indices: Any, axis: Any = 0, *, batch_dims: int = 0) -> Any:
    if batch_dims:
        raise NotImplementedError("GatherV2 with batch_dims")
    rows, dim, source = _tensor(indices), _list(axis)[0], _tensor(x)
    made = _add("index_select", source, dim, _add("flatten", rows))
    return _add("reshape", made, [*source.shape[:dim], *rows.shape, *source.shape[dim + 1 :]])


def _fill(dims: Any, value: Any) -> Any:
    return _add("expand", _tensor(value), _list(dims))


_builtin(_reshape, "Reshape")
_builtin(_permute, "Transpose", "TransposeD")
_builtin(_squeeze, "Squeeze")
_builtin(_unsqueeze, "Unsqueeze")
_builtin(lambda x, axis: _add("unsqueeze", _tensor(x), _list(axis)[0]), "ExpandDims")
_builtin(lambda x, concat_dim, *, N=None: _concat(x, concat_dim), "ConcatV2", "ConcatD")
_builtin(lambda concat_dim, x, *, N=None: _concat(x, concat_dim), "Concat")
_builtin(_pack, "Pack")
_builtin(lambda x, shape: _add("expand", _tensor(x), _list(shape)), "BroadcastTo")
_builtin(lambda x, multiples: _add("repeat", _tensor(x), _list(multiples)), "Tile")
_builtin(_slice, "Slice")
_builtin(_gather, "GatherV2")
_builtin(_fill, "Fill")


# --- Reductions ---


def _reduce(op: str) -> Callable[..., Any]:
    def call(x: Any, axes: Any, *, keep_dims: bool = False) -> Any:
        source = _tensor(x)
        dims = _list(axes) or list(range(source.ndim))
        return _add(op, source, dims, keep_dims)

    return call


for _name, _op in {"Sum": "sum", "Mean": "mean", "Max": "amax", "Min": "amin"}.items():
    _builtin(_reduce(_op), f"Reduce{_name}", f"Reduce{_name}D")


def _arg_max(x: Any, dimension: Any, *, dtype: Any = torch.int64) -> Any:
    made = _add("argmax", _tensor(x), _list(dimension)[0])
    return _add("_to_copy", made, dtype=torch_dtype(dtype))


def _cumsum(x: Any, axis: Any, *, exclusive: bool = False, reverse: bool = False) -> Any:
    source, dim = _tensor(x), _list(axis)[0]
    made = _add("flip", source, [dim]) if reverse else source
    made = _add("cumsum", made, dim)
    made = _add("flip", made, [dim]) if reverse else made
    return _add("sub", made, source) if exclusive else made


_builtin(_arg_max, "ArgMaxV2")
_builtin(_cumsum, "Cumsum")


def by_name(name: str, inputs: dict[str, Any], attrs: dict[str, Any]) -> Any:
    """A call with inputs and attributes by their names, checked against the operator's own."""
    fn = BUILTINS[name]
    known = list(inspect.signature(fn).parameters)
    for given in (*inputs, *attrs):
        if given not in known:
            raise ValueError(f"{name} has no input or attribute {given!r}; it has {known}")
    return fn(**inputs, **attrs)
