"""The schema of an operator from a function's signature, and whether another function fits it."""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchgraft import _torch
from torchgraft.errors import BadOp, SignatureMismatch

Function = Callable[..., Any]
_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")


def where(fn: Any) -> str:
    """The file and line of a function."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(fn)


def registered(name: str) -> Any:
    """The schema of `ns::name` or `ns::name.overload`; None where nobody has defined it."""
    space, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, space), base, None)
    found = getattr(packet, overload or "default", None)
    return None if found is None else found._schema


def schema_text(spec: str, body: Function, mutates: Sequence[str]) -> str:
    """`ns::name(Tensor x) -> Tensor`, of a name and a typed body, or the text given as it is."""
    name, paren, _ = spec.partition("(")
    name = name.strip()
    if not _NAME.fullmatch(name):
        raise BadOp(
            spec, where(body), "this is no name of an operator.", "Write it as 'namespace::name'."
        )
    if paren:
        text = spec
    else:
        try:
            text = _inferred(body, mutates, name)
        except ValueError as error:
            said = str(error).removeprefix("infer_schema(func): ").partition(" Got func")[0]
            raise BadOp(
                name,
                where(body),
                f"its signature gives no schema: {said}",
                "Annotate every parameter and the result, or give the schema: "
                f"@graft.op('{name}(Tensor x, float alpha=1.0) -> Tensor').",
            ) from None
    return _checked(text, name, body)


def _inferred(body: Function, mutates: Sequence[str], name: str) -> str:
    """The schema of a typed body. Defaults that are lists are put in here: torch has no text for
    them."""
    signature = inspect.signature(body)
    lists = {
        p.name: p.default for p in signature.parameters.values() if type(p.default) in (list, tuple)
    }
    if not lists or not isinstance(body, types.FunctionType):
        return torch.library.infer_schema(body, mutates_args=mutates, op_name=name)
    twin = types.FunctionType(
        body.__code__, body.__globals__, body.__name__, None, body.__closure__
    )
    twin.__annotations__ = body.__annotations__
    twin.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            p.replace(default=f"<{p.name}>") if p.name in lists else p
            for p in signature.parameters.values()
        ]
    )
    text = torch.library.infer_schema(twin, mutates_args=mutates, op_name=name)
    for parameter, default in lists.items():
        text = text.replace(f'"<{parameter}>"', str(list(default)))
    return text


def _checked(text: str, name: str, body: Function) -> str:
    try:
        schema = _torch.parse_schema(text)
    except RuntimeError as error:
        said = str(error).strip().replace("\n", "\n  ")
        raise BadOp(name, where(body), f"its schema does not parse:\n  {said}", text) from None
    if any(result.alias_info is not None for result in schema.returns):
        raise BadOp(
            name,
            where(body),
            "it returns one of its inputs, which torch.compile does not take of an operator.",
            "Return nothing (-> ()) where an input is written, and a new tensor elsewhere.",
        )
    check_signature(schema, name, "the reference", body, body)
    return text


def _default(argument: Any) -> Any:
    if not argument.has_default_value():
        return inspect.Parameter.empty
    value = argument.default_value
    dtype = "ScalarType" in str(argument.real_type) and isinstance(value, int)
    return DTYPES.get(value, value) if dtype else value


DTYPES = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    8: torch.complex32,
    9: torch.complex64,
    10: torch.complex128,
    11: torch.bool,
    12: torch.qint8,
    13: torch.quint8,
    14: torch.qint32,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    27: torch.uint16,
    28: torch.uint32,
    29: torch.uint64,
}
"""Dtypes by the numbers that C++ has for them, which is what schemas store, too."""


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return type(a) is type(b) and a == b if isinstance(a, bool) or isinstance(b, bool) else a == b


def _show(default: Any) -> str:
    return "no default" if default is inspect.Parameter.empty else f"default {default!r}"


def check_signature(schema: Any, name: str, part: str, fn: Function, reference: Function) -> None:
    """Raise unless `fn` takes the schema's parameters, in their order, with their defaults."""
    have = list(inspect.signature(fn).parameters.values())
    want = list(schema.arguments)
    other = "the schema" if fn is reference else "the reference"
    problems: list[str] = []
    if [p.name for p in have] != [a.name for a in want]:
        problems.append(
            f"it takes ({', '.join(p.name for p in have)}), "
            f"{other} ({', '.join(a.name for a in want)})"
        )
    else:
        for mine, theirs in zip(have, want, strict=True):
            if mine.kind not in (mine.POSITIONAL_OR_KEYWORD, mine.KEYWORD_ONLY):
                problems.append(f"{mine} is not a plain parameter")
            elif (mine.kind == mine.KEYWORD_ONLY) > theirs.kwarg_only:
                problems.append(f"{mine.name} is keyword-only, and is not in {other}")
            if not _same(mine.default, _default(theirs)):
                problems.append(
                    f"{mine.name} has {_show(mine.default)}, in {other} {_show(_default(theirs))}"
                )
    if problems:
        against = "its schema" if fn is reference else f"its reference ({where(reference)})"
        raise SignatureMismatch(name, part, where(fn), against, problems)


def is_tensor(argument: Any) -> bool:
    """Whether a parameter or result holds tensors: `Tensor`, `Tensor?`, `Tensor[]`, `Tensor?[]`."""
    return "Tensor" in str(argument.type)


def written(schema: Any) -> tuple[str, ...]:
    """The parameters that the operator writes."""
    return tuple(a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)


def bind(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The value of every parameter in order, defaults filled in."""
    values = list(args)
    for argument in schema.arguments[len(values) :]:
        given = argument.name in kwargs
        values.append(kwargs[argument.name] if given else _default(argument))
    return values


def call(schema: Any, fn: Function, values: Sequence[Any]) -> Any:
    """`fn` on the value of every parameter, keyword-only ones by name."""
    args = [v for v, a in zip(values, schema.arguments, strict=True) if not a.kwarg_only]
    kwargs = {a.name: v for v, a in zip(values, schema.arguments, strict=True) if a.kwarg_only}
    return fn(*args, **kwargs)
