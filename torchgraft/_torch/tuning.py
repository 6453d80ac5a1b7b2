"""Inductor's own tuning, which can be told to end. torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


class Untimed:
    """How many products, convolutions and kernels Inductor has not tuned, for want of time."""

    count = 0


@contextlib.contextmanager
def until(over: Callable[[], bool]) -> Iterator[Untimed]:
    """Inductor times ways to compute something until it is `over`. From then on a product or a
    convolution is a library's, and a kernel stays as it was written. For this thread, which must be
    the only one that compiles.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.select_algorithm import (
        AlgorithmSelectorCache,
        ExternKernelCaller,
        get_algorithm_selector_cache,
    )

    untimed, here = Untimed(), threading.get_ident()
    choose, descend = (
        AlgorithmSelectorCache.do_autotuning,
        CachingAutotuner.coordinate_descent_tuning,
    )

    def is_over() -> bool:
        ends = threading.get_ident() == here and over()
        untimed.count += ends
        return ends

    def first_of(choices: list[Any]) -> Any:
        libraries = (choice for choice in choices if isinstance(choice, ExternKernelCaller))
        return next(libraries, choices[0])

    def offered(choices: list[Any]) -> list[Any]:
        return [first_of(choices)] if len(choices) > 1 and is_over() else choices

    def chosen(
        self: Any, name: str, nodes: Any, layout: Any, gens: Any, key: Any, choices: list[Any],
        *args: Any, **kwargs: Any
    ) -> Any:  # fmt: skip
        if is_over():  # what was offered before and is chosen from only now
            return {first_of(choices): 1.0}
        return choose(self, name, nodes, layout, gens, key, choices, *args, **kwargs)

    def descended(self: Any, launcher: Any, *args: Any, **kwargs: Any) -> Any:
        if is_over():
            launcher.config.found_by_coordesc = True  # or its next call would begin again
            return launcher
        return descend(self, launcher, *args, **kwargs)  # type: ignore[no-untyped-call]

    choosers = get_algorithm_selector_cache().preprocessing_fns
    choosers.append(offered)
    try:
        with (
            mock.patch.object(AlgorithmSelectorCache, "do_autotuning", chosen),
            mock.patch.object(CachingAutotuner, "coordinate_descent_tuning", descended),
        ):
            yield untimed
    finally:
        choosers.remove(offered)
