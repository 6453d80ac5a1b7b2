"""`register_replacement`: two functions, the calls to look for and those to put in their place."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import torchgraft as graft
from torchgraft import _torch
from torchgraft.compat.notes import without_effect
from torchgraft.passes.pattern.define import Pattern
from torchgraft.passes.registry import current

_NUMBERS = itertools.count()


def register_replacement(
    search_fn: Callable[..., Any],
    replace_fn: Callable[..., Any],
    example_inputs: Sequence[Any],
    trace_fn: Any = None,
    extra_check: Callable[[Any], Any] | None = None,
    search_fn_pattern: Any = None,
    scalar_workaround: dict[str, Any] | None = None,
    skip_duplicates: bool = False,
) -> Pattern:
    """Replace what `search_fn` computes by what `replace_fn` does, wherever a graph has it.

    `example_inputs` say which arguments are tensors; `scalar_workaround` has values for those
    that are numbers. `extra_check` is asked about each match: `match.kwargs`, `match.nodes`.
    """
    idle = {"trace_fn": "a pattern is traced as every program is"} if trace_fn else {}
    if search_fn_pattern is not None:
        idle["search_fn_pattern"] = "the function itself is the pattern"
    without_effect("register_replacement.", idle)
    kinds = _kinds(search_fn, example_inputs, scalar_workaround or {})
    for entry in current() if skip_duplicates else ():
        if isinstance(entry, Pattern) and _same(entry, search_fn, replace_fn):
            return entry

    def replace(m: graft.Match) -> Any:
        values = {name: m[name] for name in kinds}
        if extra_check is not None and not extra_check(_Match(m, values)):
            raise graft.NoMatch("extra_check said no")
        return replace_fn(*values.values())

    title = f"{search_fn.__name__}#{next(_NUMBERS)}"
    typed = _typed(search_fn, kinds)
    made: Pattern = graft.pattern(typed, name=title, types=_types(kinds), register=False)
    made.replace(replace)
    made.__dict__["origin"] = (search_fn, replace_fn)
    current().register(made)
    return made


class _Match:
    """What `extra_check` holds."""

    def __init__(self, found: graft.Match, values: dict[str, Any]) -> None:
        self.kwargs, self.nodes = values, found.nodes
        self.args = list(values.values())

    def output_node(self) -> Any:
        return self.nodes[-1]


def _same(entry: Any, search_fn: Any, replace_fn: Any) -> bool:
    return getattr(entry, "origin", None) == (search_fn, replace_fn)


def _kinds(
    fn: Callable[..., Any], examples: Sequence[Any], scalars: dict[str, Any]
) -> dict[str, Any]:
    """An example of each argument, by name."""
    names = list(inspect.signature(fn).parameters)
    if len(examples) + len(scalars) < len(names):
        raise ValueError(
            f"register_replacement: {fn.__name__} takes {', '.join(names)}; "
            f"{len(examples)} example_inputs and {len(scalars)} scalars do not cover them"
        )
    free = iter(examples)
    return {name: scalars[name] if name in scalars else next(free) for name in names}


def _types(kinds: dict[str, Any]) -> dict[str, str]:
    """The ranks of the tensors; equal sizes get one name, and stand for any size."""
    return {
        name: f"[{', '.join(f'd{size}' for size in value.shape)}]"
        for name, value in kinds.items()
        if isinstance(value, torch.Tensor)
    }


def _typed(fn: Callable[..., Any], kinds: dict[str, Any]) -> Any:
    """The function with the types that its examples tell."""

    def typed(*args: Any) -> Any:
        return fn(*args)

    typed.__name__ = fn.__name__
    typed.__code__ = typed.__code__.replace(
        co_filename=fn.__code__.co_filename, co_firstlineno=fn.__code__.co_firstlineno
    )
    typed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=_hint(v))
            for name, v in kinds.items()
        ]
    )
    typed.__annotations__ = {name: _hint(value) for name, value in kinds.items()}
    return typed


def _hint(value: Any) -> Any:
    return torch.Tensor if isinstance(value, torch.Tensor) or _torch.is_fake(value) else type(value)
