"""`graft.pattern`: a function, or TorchScript IR text, becomes a pattern."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from torchgraft.errors import BadPattern, UnknownName
from torchgraft.passes.pattern import slots as _slots
from torchgraft.passes.pattern import text, trace
from torchgraft.passes.pattern.rewrite import Match
from torchgraft.passes.pattern.slots import Slot
from torchgraft.passes.pattern.trace import Template

if TYPE_CHECKING:
    from torchgraft.passes.pattern.check import Checked

STAGE = "pattern"
"""The stage of patterns: after the built-in passes that clean up, before those that fold."""

Types = Mapping[str, str] | Sequence[Mapping[str, str]]
Source = Callable[..., Any] | str
R = TypeVar("R", bound=Callable[[Match], Any])


class Pattern:
    """Calls to look for, and what to put in their place. Made by `graft.pattern`.

    Without a replacement it only counts: `report.matches` says how often it occurs.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        slots: Sequence[Slot],
        *,
        where: str,
        types: Sequence[Mapping[str, str]] = (),
        stage: str = STAGE,
        before: tuple[str, ...] = (),
        after: tuple[str, ...] = (),
    ) -> None:
        self.name, self.fn, self.slots, self.where = name, fn, tuple(slots), where
        self.types, self.stage, self.before, self.after = tuple(types), stage, before, after
        self.replacement: Callable[[Match], Any] | None = None
        self.content: object = None  # the hash of the library that a pass in C++ is in
        self.changes_type = self.builds_nodes = False

    @functools.cached_property
    def templates(self) -> list[Template]:
        """What a graph must look like; one for each way in which the body decomposes."""
        return trace.templates(self.name, self.fn, self.slots, self.types)

    @overload
    def replace(self, fn: R, *, changes_type: bool = ..., nodes: bool = ...) -> R: ...

    @overload
    def replace(
        self, fn: None = None, *, changes_type: bool = ..., nodes: bool = ...
    ) -> Callable[[R], R]: ...

    def replace(
        self, fn: R | None = None, *, changes_type: bool = False, nodes: bool = False
    ) -> R | Callable[[R], R]:
        """Say what stands in the place of a match: a function of a `graft.Match`.

        It is torch code on the match's values, and returns what the pattern returns: as many
        tensors, of the same shape, dtype and device; with `changes_type` others are taken, and
        the rest of the graph is typed anew. It refuses a match with `raise graft.NoMatch(why)`.
        With `nodes` it gets and returns nodes of the graph, made with `m.graph.call(op, ...)`.
        """

        def decorate(fn: R) -> R:
            try:
                inspect.signature(fn).bind(None)
            except TypeError as error:
                why = f"its replacement cannot be called with a graft.Match ({error})"
                raise BadPattern(self.name, why, "Write `def _(m: graft.Match)`.") from None
            self.replacement = fn
            self.changes_type, self.builds_nodes = changes_type, nodes
            return fn

        return decorate(fn) if fn is not None else decorate

    def using(self, fn: Callable[[Match], Any], name: str | None = None, **options: Any) -> Pattern:
        """A copy with another replacement, such as a kernel of your own; it is not registered."""
        made = copy.copy(self)
        made.name = name or self.name
        made.replace(fn, **options)
        return made

    def __copy__(self) -> Pattern:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def check(self, trials: int = 20, *, seed: int = 0, **given: Any) -> Checked:
        """Draw inputs, run the pattern and its replacement, compare the results.

        `given` fixes arguments: `quantize.check(lo=-128, hi=127)`; a list of values is drawn from.
        Raises `PatternChanged` with the inputs that gave another result, and `NeverFired` when
        the replacement refused everything that was drawn.
        """
        from torchgraft.passes.pattern.check import check

        return check(self, trials, seed, given)

    def __call__(self, *args: Any) -> Any:
        """The pattern's own function."""
        return self.fn(*args)

    def __repr__(self) -> str:
        return f"<torchgraft.pattern {self.name} at {self.where}>"


@overload
def pattern(
    what: Source,
    *,
    name: str | None = ...,
    types: Types = ...,
    stage: str = ...,
    before: str | Sequence[str] = ...,
    after: str | Sequence[str] = ...,
    register: bool = ...,
) -> Pattern: ...


@overload
def pattern(
    what: None = None,
    *,
    name: str | None = ...,
    types: Types = ...,
    stage: str = ...,
    before: str | Sequence[str] = ...,
    after: str | Sequence[str] = ...,
    register: bool = ...,
) -> Callable[[Source], Pattern]: ...


def pattern(
    what: Source | None = None,
    *,
    name: str | None = None,
    types: Types = (),
    stage: str = STAGE,
    before: str | Sequence[str] = (),
    after: str | Sequence[str] = (),
    register: bool = True,
) -> Pattern | Callable[[Source], Pattern]:
    """Make a typed function (or TorchScript IR text) a pattern, and register it.

    Its arguments bind by name whatever stands in their place, its literals match literally. It is
    traced and normalised as every graph is, so it fires whichever front end a program came from.
    `types` says what tensors look like where that decides how the body decomposes:
    `types={"x": "[b, s, h]", "w": "f32[h]"}`, or a list of such for several forms; sizes are names,
    and stand for any size. Patterns run in the order of registration; `before` and `after` name
    patterns and passes. `stage` is "pre" or "post" to run beside the passes there. With
    `register=False` it is for `Config(patterns=[it])`, and traced when it is first used.

    >>> import torch, torchgraft as graft
    >>> from torch import Tensor
    >>> with graft.Registry():
    ...     @graft.pattern
    ...     def double(x: Tensor, n: float) -> Tensor:
    ...         return x * n + x * n
    ...     @double.replace
    ...     def _(m: graft.Match) -> Tensor:
    ...         return m.x * (2 * m.n)
    ...     compiled = graft.compile(lambda x: x * 3 + x * 3, (torch.ones(2),), mode="eager")
    >>> compiled(torch.ones(2)), compiled.report.matches["double"]
    (tensor([6., 6.]), 1)
    """

    def make(what: Source) -> Pattern:
        if isinstance(what, str):
            title = name or "pattern"
            fn, slots = text.parse(title, what)
            where = _caller()
        else:
            title = name or what.__name__
            fn, slots = what, _slots.read(title, what)
            where = f"{what.__code__.co_filename}:{what.__code__.co_firstlineno}"
        made = Pattern(
            title,
            fn,
            slots,
            where=where,
            types=[types] if isinstance(types, Mapping) else list(types),
            stage=_stage(stage, title),
            before=(before,) if isinstance(before, str) else tuple(before),
            after=(after,) if isinstance(after, str) else tuple(after),
        )
        if register:
            _ = made.templates  # a pattern that can never match is told now
            from torchgraft.passes.registry import current

            current().register(made)
        return made

    return make if what is None else make(what)


def _stage(stage: str, name: str) -> str:
    if stage not in ("pre", STAGE, "post"):
        raise UnknownName("stage", stage, ("pre", STAGE, "post"), where=f"pattern {name!r}")
    return stage


def _caller() -> str:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
