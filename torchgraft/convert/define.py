"""`@graft.converter`: a function that replaces one call by others, checked against the schema."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torchgraft import _torch
from torchgraft.errors import BadConverter
from torchgraft.fx.names import operator_named
from torchgraft.passes.registry import current, is_default

if TYPE_CHECKING:
    from torchgraft.config import Config

_P = inspect.Parameter
When = Callable[..., Any]
BUILTIN: tuple[Converter, ...] = ()
"""Converters that come with torchgraft; every other one goes before them."""


@dataclasses.dataclass(frozen=True)
class Converter:
    """One way to write a call in other calls. `str(it)` is its name, file and line."""

    name: str
    ops: tuple[Any, ...]
    fn: Callable[..., Any]
    when: When | None = None

    @property
    def where(self) -> str:
        """File and line of the function; of one in C++, its library."""
        if (library := getattr(self.fn, "where", None)) is not None:
            return str(library)
        code = getattr(inspect.unwrap(self.fn), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(self.fn)

    def __call__(self, net: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn(net, *args, **kwargs)

    def __str__(self) -> str:
        return f"{self.name} ({self.where})"


def converter(
    target: Any,
    *,
    when: When | None = None,
    all_overloads: bool = False,
    name: str | None = None,
    register: bool = True,
) -> Callable[[Callable[..., Any]], Converter]:
    """Make a function `(net, *the op's arguments)` a converter, and register it.

    `target` is an `OpOverload`, a schema's text (of which the name and the overload count, nothing
    else), or a packet with `all_overloads=True`. `when` takes the op's arguments and gives True,
    False, or a string: the reason why not. The function gives the result, or `NotImplemented`, or
    raises `graft.Declined(reason)`; then the next converter is asked, and in the end torch runs the
    call as it is. A later converter goes before an earlier one, and each sees only calls that it
    did not make itself. `register=False` is for `Config(converters=[it])`.

    >>> import torch, torchgraft as graft
    >>> @graft.converter("aten::square(Tensor self) -> Tensor", register=False)
    ... def square(net: graft.Net, x: graft.Value) -> graft.Value:
    ...     return net.add("aten::mul", x, x)
    >>> config = graft.Config(mode="eager", converters=[square])
    >>> compiled = graft.compile(lambda x: torch.square(x), (torch.ones(2),), config=config)
    >>> [node.op for node in compiled.report.nodes]
    ['aten.mul.Tensor']
    """

    def decorate(fn: Callable[..., Any]) -> Converter:
        title = name or str(getattr(fn, "__name__", type(fn).__name__))
        ops = _ops(title, target, all_overloads)
        for op in ops:
            _check(title, fn, op, exact=len(ops) == 1)
        made = Converter(title, ops, fn, when)
        if register:
            current().converters.add(made)
        return made

    return decorate


def _ops(name: str, target: Any, all_overloads: bool) -> tuple[Any, ...]:
    if isinstance(target, str):
        target = operator_named(target)
    if _torch.is_op(target):
        ops: tuple[Any, ...] = (target,)
    elif _torch.is_packet(target):
        ops = tuple(getattr(target, overload) for overload in target.overloads())
        if not all_overloads:
            raise BadConverter(
                name,
                f"{target} is a packet of {len(ops)} overloads ({', '.join(map(str, ops))})",
                f"Name one of them, such as {ops[0]}, or say all_overloads=True.",
            )
        ops = tuple(op for op in ops if not op._schema.is_mutable)
    else:
        raise BadConverter(
            name, f"{target!r} is no operator", "Give torch.ops.ns.op.overload, or schema text."
        )
    for op in ops:
        if op._schema.is_mutable:
            raise BadConverter(
                name, f"{op} writes its inputs", "Convert the functional form; graphs hold that."
            )
    return ops


def _check(name: str, fn: Callable[..., Any], op: Any, *, exact: bool) -> None:
    """Raise `BadConverter` unless the signature is `(net, *the schema's arguments)`."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # a builtin without a signature: its call will tell
    arguments = op._schema.arguments
    given = list(signature.parameters.values())
    free = {p.kind for p in given} & {_P.VAR_POSITIONAL, _P.VAR_KEYWORD}
    problem: str | None = None
    if free or not exact:
        try:
            named = {a.name: a for a in arguments if a.kwarg_only}
            signature.bind(None, *(a for a in arguments if not a.kwarg_only), **named)
        except TypeError as error:
            problem = str(error)
    elif len(given) != len(arguments) + 1:
        problem = f"it takes {len(given)} arguments, the schema asks for net and {len(arguments)}"
    else:
        found = (_differs(p, a) for p, a in zip(given[1:], arguments, strict=True))
        problem = next((text for text in found if text), None)
    if problem is not None:
        raise BadConverter(
            name,
            f"its signature {signature} does not fit {op._schema}: {problem}",
            f"Write def {name}({expected(op)}).",
        )


def _differs(given: inspect.Parameter, argument: Any) -> str | None:
    # `self` may have any name: in a plain function it would mislead.
    if given.name != argument.name and argument.name != "self":
        return f"argument {given.name!r} stands where the schema has {argument.name!r}"
    if (given.kind is given.KEYWORD_ONLY) != argument.kwarg_only:
        return f"{argument.name!r} is {'' if argument.kwarg_only else 'not '}keyword-only"
    default = tuple(given.default) if isinstance(given.default, list) else given.default
    has = given.default is not given.empty
    if has != argument.has_default_value():
        return f"{argument.name!r} has {'no' if has else 'a'} default in the schema"
    if has and _default(argument) != default:
        return f"the default of {argument.name!r} is {argument.default_value!r}, not {default!r}"
    return None


def _default(argument: Any) -> Any:
    value = argument.default_value
    return tuple(value) if isinstance(value, list) else value


def expected(op: Any) -> str:
    """The parameters that a converter of an operator has, as source."""
    parts = ["net"]
    for argument in op._schema.arguments:
        if argument.kwarg_only and "*" not in parts:
            parts.append("*")
        name = "x" if argument.name == "self" else argument.name
        has = argument.has_default_value()
        parts.append(f"{name}={_default(argument)!r}" if has else name)
    return ", ".join(parts)


def candidates(config: Config) -> dict[Any, list[Converter]]:
    """By operator, the converters that a compile with this config asks, in order."""
    registry = config.registry if config.registry is not None else current()
    table: dict[Any, list[Converter]] = {}
    loaded: list[Converter] = []
    if is_default(registry):
        from torchgraft.native.bridge import converters

        loaded = converters()
    given = [*reversed(config.converters), *reversed(list(registry.converters))]
    for one in [*given, *loaded, *BUILTIN]:
        for op in one.ops:
            table.setdefault(op, []).append(one)
    return table


def converters_for(op: Any, config: Config | None = None) -> list[Converter]:
    """The converters of an operator (an overload, a packet or a name), first asked first.

    >>> import torch, torchgraft as graft
    >>> graft.converters_for(torch.ops.aten.cumsum.default)
    []
    """
    from torchgraft.config import Config

    table = candidates(config or Config())
    if isinstance(op, str):
        op = operator_named(op)
    overloads: Iterable[Any] = (op,)
    if _torch.is_packet(op):
        overloads = (getattr(op, overload) for overload in op.overloads())
    found = [one for overload in overloads for one in table.get(overload, [])]
    return list(dict.fromkeys(found))
