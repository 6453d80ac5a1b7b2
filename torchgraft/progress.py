"""Progress of long work: counted where it is done, shown where somebody wants to see it.

Code that goes through candidates, passes or regions does so with `each`. Nothing is shown or
imported unless standard error is a terminal and a `shown` is open around it, as commands have it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")
_bars: ContextVar[Progress | None] = ContextVar("torchgraft_progress", default=None)


def each(what: str, items: Sequence[T], name: Callable[[T], str] | None = None) -> Iterator[T]:
    """The items, one by one, under a bar that counts them; `name` says which one is at work.

    >>> [tile * 2 for tile in each("tuning", [8, 16], name=str)]
    [16, 32]
    """
    bars = _bars.get()
    if bars is None:
        yield from items
        return
    task = bars.add_task(what, total=len(items))
    try:
        for item in items:
            bars.update(task, description=what if name is None else f"{what} {name(item)}")
            bars.refresh()
            yield item
            bars.advance(task)
    finally:
        bars.remove_task(task)


@contextlib.contextmanager
def shown(what: str, *, ticks: bool = True) -> Iterator[None]:
    """Show progress on the terminal while something is under way, and wipe it off at the end.

    Without `ticks` no thread redraws it: for work that is being timed.
    """
    if _bars.get() is not None or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        auto_refresh=ticks,
        redirect_stdout=sys.stdout.isatty(),  # what goes to a file or a pipe goes there
    ) as bars:
        bars.add_task(what, total=None)
        token = _bars.set(bars)
        try:
            yield
        finally:
            _bars.reset(token)
