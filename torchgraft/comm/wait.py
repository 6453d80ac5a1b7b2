"""Waiting for keys of a store, with an end to it."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import Any

_SLICE = 10.0
"""Seconds that one wait holds the store; Ctrl-C is heard in between."""
_PAUSE = 0.05


def missing(store: Any, keys: Sequence[str], seconds: float) -> list[str]:
    """Wait until all the keys are there, or for so long; those that are not there then."""
    end = time.monotonic() + seconds
    left = list(keys)
    while left and (rest := end - time.monotonic()) > 0:
        try:
            store.wait(left, datetime.timedelta(seconds=min(rest, _SLICE)))
            return []
        except RuntimeError:  # the slice is over
            left = [key for key in left if not store.check([key])]
    return left


def polled(store: Any, key: str, seconds: float) -> bool:
    """Wait for something long, such as a compile; whether the key is there then. torch warns on
    standard error whenever a wait of its own is over, which one that is cut in slices often is."""
    end = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    return True
