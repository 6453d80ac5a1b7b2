"""Plans, signatures and trees as JSON and back. What comes in is checked; nothing in it is run."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchgraft import _torch
from torchgraft.errors import BadPackage, NotSavable
from torchgraft.plan import Buffer, Collective, Free, Launch, Plan, PlanStep, Record, Wait
from torchgraft.signature import ConstSpec, Signature, Spec, TensorSpec

DEEPEST = 64
"""How deep values may be nested."""

# --- Values ---

_OBJECTS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def value(item: Any) -> Any:
    """An argument of a launch as JSON."""
    if isinstance(item, Buffer):
        return {"b": item.index}
    if isinstance(item, (list, torch.Size)):
        return [value(part) for part in item]
    if isinstance(item, tuple):
        return {"t": [value(part) for part in item]}
    if isinstance(item, float):
        return item if math.isfinite(item) else {"f": str(item)}
    if isinstance(item, complex):
        return {"c": [value(item.real), value(item.imag)]}
    if isinstance(item, torch.device):
        return {"device": str(item)}
    for kind, cls in _OBJECTS.items():
        if isinstance(item, cls):
            return {kind: str(item).removeprefix("torch.")}
    if item is None or isinstance(item, (bool, int, str)):
        return item
    if isinstance(item, numbers.Integral):  # sympy's, in torch 2.11
        return int(item)
    raise NotSavable(f"{item!r} ({type(item).__name__}) has no form in a file", "")


def to_value(data: Any, device: Device = torch.device, depth: int = 0) -> Any:
    """The inverse of `value`; `device` makes a device of its name."""
    if depth > DEEPEST:
        raise BadPackage(f"a value is nested more than {DEEPEST} deep")
    if data is None or isinstance(data, (bool, str, float)):
        return data
    if isinstance(data, int):
        return _int(data)
    if isinstance(data, list):
        return [to_value(part, device, depth + 1) for part in data]
    if isinstance(data, dict) and len(data) == 1:
        [(kind, inner)] = data.items()
        if kind == "b":
            return Buffer(index(inner))
        if kind == "t" and isinstance(inner, list):
            return tuple(to_value(part, device, depth + 1) for part in inner)
        if kind == "f" and inner in ("inf", "-inf", "nan"):
            return float(inner)
        if kind == "c" and isinstance(inner, list) and len(inner) == 2:
            real, imaginary = (to_value(part, device, depth + 1) for part in inner)
            if isinstance(real, float) and isinstance(imaginary, float):
                return complex(real, imaginary)
        if kind == "device" and isinstance(inner, str):
            return device(inner)
        if kind in _OBJECTS and isinstance(inner, str):
            return named(kind, inner)
    raise BadPackage(f"not a value: {str(data)[:80]}")


Device = Callable[[str], torch.device]


def named(kind: str, name: str) -> Any:
    """A dtype, a layout or a memory format by its name."""
    found = getattr(torch, name, None)
    if not isinstance(found, _OBJECTS[kind]):
        raise BadPackage(f"there is no {kind} {name!r} in torch")
    return found


def _int(data: Any) -> int:
    if not isinstance(data, int) or isinstance(data, bool) or not -(2**63) <= data < 2**63:
        raise BadPackage(f"not an integer of 64 bits: {str(data)[:80]}")
    return data


def index(data: Any, end: int = 2**31) -> int:
    """A number from 0 to below `end`."""
    if not 0 <= _int(data) < end:
        raise BadPackage(f"{data} is out of range, there are {end}")
    return int(data)


def text(data: Any) -> str:
    if not isinstance(data, str):
        raise BadPackage(f"not a text: {str(data)[:80]}")
    return data


def field(data: Any, name: str, kind: type) -> Any:
    """`data[name]`, which must be of a type; a number that counts is no truth value."""
    if not isinstance(data, dict) or name not in data:
        raise BadPackage(f"{name!r} is missing in {str(data)[:80]}")
    found = data[name]
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise BadPackage(f"{name!r} must be a {kind.__name__}: {str(found)[:80]}")
    return found


# --- Plans ---


def plan(made: Plan) -> dict[str, Any]:
    return {
        "inputs": [buffer.index for buffer in made.inputs],
        "constants": [[buffer.index, name] for buffer, name in made.constants],
        "steps": [_step(step) for step in made.steps],
        "outputs": [value(out) for out in made.outputs],
        "shared": [[one.index, two.index] for one, two in made.shared],
    }


def _step(step: PlanStep) -> dict[str, Any]:
    if isinstance(step, Launch):
        told = {name: getattr(step, name) for name in _TOLD if isinstance(step, Collective)}
        return {
            "launch": step.kernel,
            "stream": step.stream,
            "args": [value(arg) for arg in step.args],
            "kwargs": [[name, value(arg)] for name, arg in step.kwargs],
            "outputs": [None if out is None else out.index for out in step.outputs],
            "unpack": step.unpack,
            "writes": [buffer.index for buffer in step.writes],
            **({"collective": told} if told else {}),
        }
    if isinstance(step, Free):
        return {"free": step.buffer.index, "stream": step.stream}
    return {"record" if isinstance(step, Record) else "wait": step.event, "stream": step.stream}


def to_plan(data: Any, device: Device = torch.device) -> Plan:
    """The plan of its JSON; `BadPlan` where it makes no sense."""
    return Plan(
        tuple(Buffer(index(one)) for one in field(data, "inputs", list)),
        tuple((Buffer(index(b)), text(name)) for b, name in pairs(data, "constants")),
        tuple(_to_step(step, device) for step in field(data, "steps", list)),
        tuple(to_value(out, device) for out in field(data, "outputs", list)),
        tuple((Buffer(index(a)), Buffer(index(b))) for a, b in pairs(data, "shared")),
    )


def pairs(data: Any, name: str) -> list[Any]:
    """`data[name]`, which must be a list of lists of two."""
    return rows(data, name, 2)


def rows(data: Any, name: str, length: int) -> list[Any]:
    """`data[name]`, which must be a list of lists of a length."""
    found: list[Any] = field(data, name, list)
    if not all(isinstance(row, list) and len(row) == length for row in found):
        raise BadPackage(f"{name!r} must be a list of lists of {length}")
    return found


def _to_step(data: Any, device: Device) -> PlanStep:
    stream = field(data, "stream", str)
    if "launch" in data:
        outputs = [None if b is None else Buffer(index(b)) for b in field(data, "outputs", list)]
        if not (unpack := field(data, "unpack", bool)) and len(outputs) > 1:
            raise BadPackage("a launch that gives one value has several outputs")
        launch = (
            text(data["launch"]),
            tuple(to_value(arg, device) for arg in field(data, "args", list)),
            tuple((text(k), to_value(arg, device)) for k, arg in pairs(data, "kwargs")),
            tuple(outputs),
            unpack,
            stream,
            tuple(Buffer(index(b)) for b in field(data, "writes", list)),
        )
        if "collective" not in data:
            return Launch(*launch)
        return _collective(launch, field(data, "collective", dict))
    if "free" in data:
        return Free(Buffer(index(data["free"])), stream)
    if "record" in data:
        return Record(field(data, "record", str), stream)
    return Wait(field(data, "wait", str), stream)


def _collective(launch: tuple[Any, ...], told: Any) -> Collective:
    if not launch[1] or not isinstance(launch[1][-1], str):
        raise BadPackage("a collective names no group")
    bytes_, line = told.get("nbytes"), told.get("line")
    about: dict[str, Any] = {
        "kind": field(told, "kind", str),
        "type": field(told, "type", str),
        "nbytes": None if bytes_ is None else index(bytes_, 2**63),
        "line": None if line is None else text(line),
    }
    return Collective(*launch, **about)


_TOLD = ("kind", "type", "nbytes", "line")


# --- Expressions of sizes ---


def expression(expr: Any) -> Any:
    """A size or a condition (sympy) as JSON."""
    if isinstance(expr, (bool, int)):
        return expr
    if getattr(expr, "is_Symbol", False):
        return {"s": str(expr)}
    if getattr(expr, "is_Integer", False):
        return int(expr)
    if str(expr) in ("True", "False"):
        return str(expr) == "True"
    if getattr(expr, "is_Rational", False):
        return {"e": "Rational", "a": [int(expr.p), int(expr.q)]}
    for name, function in _torch.size_functions().items():
        if expr.func is function:
            return {"e": name, "a": [expression(arg) for arg in expr.args]}
    raise NotSavable(f"a size is {expr}, and {expr.func.__name__} has no form in a file", "")


def to_expression(data: Any, depth: int = 0) -> Any:
    """The inverse of `expression`."""
    if isinstance(data, bool):
        return data
    if isinstance(data, int):
        return _int(data)
    if depth > DEEPEST or not isinstance(data, dict):
        raise BadPackage(f"not a size: {str(data)[:80]}")
    if set(data) == {"s"}:
        return _torch.size_symbol(text(data["s"]))
    function = _torch.size_functions().get(text(data.get("e")))
    args = [to_expression(arg, depth + 1) for arg in field(data, "a", list)]
    if function is None or (data["e"] == "Pow" and args[1:] not in ([2], [3], [4], [-1])):
        raise BadPackage(f"not a size: {str(data)[:80]}")
    try:
        return function(*args)
    except (TypeError, ValueError, ArithmeticError, AssertionError, AttributeError) as error:
        raise BadPackage(f"not a size: {str(data)[:80]} ({error})") from None


# --- Trees of arguments and results ---

_BUILT_IN = {tuple: "tuple", list: "list", dict: "dict"}


def tree(spec: Any) -> Any:
    """The structure of a call or a result as JSON."""
    if spec.is_leaf():
        return "*"
    children = spec.children()
    if spec.type is dict:
        return {"dict": [[value(k), tree(c)] for k, c in zip(spec.context, children, strict=True)]}
    if spec.type in _BUILT_IN:
        return {_BUILT_IN[spec.type]: [tree(child) for child in children]}
    name = getattr(spec.type, "__name__", str(spec.type))
    if getattr(torch.return_types, name, None) is spec.type:
        return {"returns": [name, [tree(child) for child in children]]}
    try:
        return {"pytree": _torch.dump_tree(spec)}
    except Exception as error:
        raise NotSavable(
            f"a {name} among its inputs or outputs has no form in a file ({error})",
            "Register it with torch.utils._pytree and a serialized_type_name, or use a dict.",
        ) from error


def to_tree(data: Any) -> Any:
    """The inverse of `tree`."""
    return _torch.flatten(_nested(data))[1]


def _nested(data: Any, depth: int = 0) -> Any:
    if data == "*":
        return "*"
    if isinstance(data, dict) and len(data) == 1 and depth <= DEEPEST:
        [(kind, inner)] = data.items()
        if kind == "dict":
            return _dict([(to_value(k), _nested(v, depth + 1)) for k, v in pairs(data, "dict")])
        if kind in ("tuple", "list") and isinstance(inner, list):
            parts = [_nested(part, depth + 1) for part in inner]
            return tuple(parts) if kind == "tuple" else parts
        if kind == "returns" and isinstance(inner, list) and len(inner) == 2:
            name, parts = text(inner[0]), field({"of": inner[1]}, "of", list)
            found = getattr(torch.return_types, name, None)
            if isinstance(found, type) and getattr(found, "n_fields", -1) == len(parts):
                return found([_nested(part, depth + 1) for part in parts])
        if kind == "pytree" and isinstance(inner, str):
            try:
                return _torch.parse_tree(inner)
            except Exception as error:
                raise BadPackage(
                    f"its inputs or outputs hold an object of a class that is not known here "
                    f"({error}); import what registers it first"
                ) from None
    raise BadPackage(f"not a structure of arguments: {str(data)[:80]}")


def _dict(items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    try:
        return dict(items)
    except TypeError:
        raise BadPackage("a dict has a key that cannot be one") from None


# --- Signatures ---


def signature(made: Signature) -> dict[str, Any]:
    return {
        "inputs": [_spec(spec) for spec in made.specs],
        "tree": tree(made.tree),
        "out_tree": tree(made.out_tree),
        "ranges": {name: list(bounds) for name, bounds in made.ranges.items()},
        "guards": [[expression(condition), line] for condition, line in made.guards],
    }


def _spec(spec: Spec) -> dict[str, Any]:
    if isinstance(spec, ConstSpec):
        return {"kind": "const", "name": spec.name, "value": value(spec.value)}
    assert isinstance(spec, TensorSpec), spec
    return {
        "kind": "tensor",
        "name": spec.name,
        "shape": [expression(size) for size in spec.shape],
        "dtype": value(spec.dtype)["dtype"],
        "device": str(spec.device),
        "stride": None if spec.stride is None else list(spec.stride),
        "format": value(spec.format)["memory_format"],
        "mutated": spec.mutated,
        "layout": value(spec.layout)["layout"],
    }


def to_signature(data: Any, device: Device = torch.device) -> Signature:
    """The inverse of `signature`."""
    ranges: dict[str, tuple[int, int | None]] = {}
    for name, bounds in field(data, "ranges", dict).items():
        if not isinstance(bounds, list) or len(bounds) != 2:
            raise BadPackage(f"not a range: {str(bounds)[:80]}")
        ranges[name] = (index(bounds[0], 2**63), None if bounds[1] is None else _int(bounds[1]))
    guards = tuple((to_expression(expr), text(line)) for expr, line in pairs(data, "guards"))
    inputs = [_to_spec(one, device) for one in field(data, "inputs", list)]
    found = Signature(
        tuple(inputs),
        to_tree(data.get("tree")),
        to_tree(data.get("out_tree")),
        ranges,
        tuple((expr, line) for expr, line in guards if expr is not True),
    )
    if found.tree.type is not tuple or [c.type for c in found.tree.children()] != [tuple, dict]:
        raise BadPackage("'tree' is not that of (args, kwargs)")
    if found.tree.num_leaves != len(inputs):
        raise BadPackage(f"{len(inputs)} inputs for {found.tree.num_leaves} places in the call")
    return found


def _to_spec(data: Any, device: Device) -> Spec:
    if field(data, "kind", str) == "const":
        return ConstSpec(field(data, "name", str), to_value(data.get("value")))
    stride = data.get("stride")
    shape = tuple(to_expression(size) for size in field(data, "shape", list))
    if stride is not None and (not isinstance(stride, list) or len(stride) != len(shape)):
        raise BadPackage(f"not strides: {str(stride)[:80]}")
    return TensorSpec(
        field(data, "name", str),
        shape,
        named("dtype", field(data, "dtype", str)),
        device(field(data, "device", str)),
        None if stride is None else tuple(_int(step) for step in stride),
        field(data, "mutated", bool),
        named("memory_format", field(data, "format", str)),
        named("layout", field(data, "layout", str)),
    )


# --- What a launch calls ---

_FUNCTIONS: tuple[Any, ...] = (
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod),
    *(operator.neg, operator.pow, operator.lt, operator.le, operator.gt, operator.ge, operator.eq),
    *(operator.ne, operator.and_, operator.or_, operator.getitem, operator.abs, operator.pos),
    *(torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_float, torch.sym_int, torch.sym_ite),
    *(math.ceil, math.floor, math.trunc, round),
)
BUILTINS: Mapping[str, Callable[..., Any]] = {fn.__name__: fn for fn in _FUNCTIONS}
"""Functions of sizes and of sequences that a launch may name besides operators."""


_TORCH = {"aten", "prims", "prim", "mkldnn", "onednn", "mkl", "inductor", "quantized_decomposed"}
_TORCH |= {"_c10d_functional", "_dtensor", "torchgraft"}  # the last has send and recv


def is_torchs(name: str) -> bool:
    """Whether an operator, such as `aten::relu`, comes with torch."""
    return name.partition("::")[0] in _TORCH


def target(fn: Any) -> dict[str, str] | None:
    """An operator or a built-in function as JSON; None: it is something else."""
    if _torch.is_op(fn):
        name, _, overload = fn.name().partition(".")
        return {"kind": "op", "name": name, "overload": overload}
    if _torch.is_higher_order(fn):
        return {"kind": "higher", "name": fn.name()}
    for name, known in BUILTINS.items():
        if fn is known:
            return {"kind": "builtin", "name": name}
    return None


def to_target(data: Any) -> Any:
    """The inverse of `target`; None where this process has no such operator."""
    kind, name = field(data, "kind", str), field(data, "name", str)
    if kind == "builtin" and name in BUILTINS:
        return BUILTINS[name]
    if kind == "higher":
        return getattr(torch.ops.higher_order, name, None)
    if kind == "op" and name.count("::") == 1:
        space, _, base = name.partition("::")
        packet = getattr(getattr(torch.ops, space), base, None)
        return getattr(packet, field(data, "overload", str) or "default", None)
    raise BadPackage(f"not something to call: {str(data)[:80]}")
