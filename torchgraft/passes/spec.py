"""`Pass` and `@graft.fx_pass`: what a pass is, whoever wrote it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from torchgraft.config import Config
from torchgraft.errors import BadPass, UnknownName

STAGES = ("pre", "built-in", "post")


@dataclasses.dataclass(frozen=True)
class Pass:
    """A named rewrite of a graph, in place.

    `fn` takes a `graft.Graph` (`takes_graph`) or `(gm, example_inputs, config)`; what it returns is
    ignored. The object is callable in the second form, so a decorated pass is a plain pass, too.
    """

    name: str
    stage: str
    fn: Callable[..., Any]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    takes_graph: bool = False

    @property
    def where(self) -> str:
        """File and line of the function."""
        fn = inspect.unwrap(self.fn)
        code = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(fn)

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], config: Config) -> None:
        if self.takes_graph:
            from torchgraft.fx.edit import Graph

            self.fn(Graph(gm, example_inputs, config))
        else:
            self.fn(gm, example_inputs, config)


def fx_pass(
    fn: Callable[..., Any] | None = None,
    *,
    stage: str = "post",
    before: str | Sequence[str] = (),
    after: str | Sequence[str] = (),
    name: str | None = None,
    register: bool = True,
) -> Any:
    """Make a function of one `graft.Graph` a pass, and register it in the current registry.

    Every `pre` pass runs before the built-in ones, every `post` pass after them; `before` and
    `after` order by name. `register=False` gives the pass without registering it, for
    `Config(post_passes=[it])`.

    >>> import torch, torchgraft as graft
    >>> aten = torch.ops.aten
    >>> @graft.fx_pass(stage="pre", register=False)
    ... def relu_off(graph: graft.Graph) -> None:
    ...     for node in graph.all(aten.relu.default):
    ...         graph.replace(node, node.args[0])
    >>> config = graft.Config(mode="eager", pre_passes=[relu_off])
    >>> graft.compile(torch.nn.ReLU(), inputs=(torch.ones(2),), config=config)(-torch.ones(2))
    tensor([-1., -1.])
    """

    def decorate(fn: Callable[..., Any]) -> Pass:
        title = name or str(getattr(fn, "__name__", type(fn).__name__))
        _check_arity(title, fn, 1, "a graft.Graph")
        spec = Pass(title, _stage(stage), fn, _names(before), _names(after), takes_graph=True)
        if register:
            from torchgraft.passes.registry import current

            current().register(spec)
        return spec

    return decorate(fn) if fn is not None else decorate


def as_pass(fn: Callable[..., Any], stage: str) -> Pass:
    """A pass from what a user put into `Config(pre_passes=...)` or `post_passes`."""
    if isinstance(fn, Pass):
        return dataclasses.replace(fn, stage=stage)
    name = getattr(fn, "__name__", type(fn).__name__)
    _check_arity(name, fn, 3, "(gm, example_inputs, config)")
    return Pass(name, stage, fn)


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _stage(stage: str) -> str:
    if stage not in ("pre", "post"):
        raise UnknownName("stage", stage, ("pre", "post"), where="fx_pass")
    return stage


def _check_arity(name: str, fn: Callable[..., Any], count: int, what: str) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # a builtin without a signature: its call will tell
    try:
        signature.bind(*range(count))
    except TypeError as error:
        raise BadPass(
            name,
            f"its signature {signature} cannot be called with {what} ({error})",
            "Write `def fn(gm, example_inputs, config)`, or `@graft.fx_pass` over `def fn(graph)`.",
        ) from None
