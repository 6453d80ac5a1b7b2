"""What Dynamo and AOTAutograd do with calls that are there for what they say, not for a value."""

from __future__ import annotations

import contextlib
from typing import Any


def inline_only(function: Any) -> Any:
    """The function, which Dynamo follows where others call it and does not compile by itself: it
    would give back a context manager of torch's that it cannot make anew (2.11 to 2.13)."""
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameExecStrategy(
        eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    )
    eval_frame.set_code_exec_strategy(function.__code__, skip)
    return function


def each_call_kept() -> contextlib.AbstractContextManager[Any]:
    """Let AOTAutograd's partitioner not make one of two equal calls (2.11 to 2.13): it takes calls
    that have effects for equal, too."""
    from torch._functorch import config

    held: contextlib.AbstractContextManager[Any] = config.patch("cse", False)
    return held
