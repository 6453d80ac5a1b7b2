"""`TORCHGRAFT_LOGS=passes,match,plan`: what a compile does, while it does it.

The same goes to Python's logging: the loggers are `torchgraft.passes` and so on.
"""

from __future__ import annotations

import logging

from torchgraft.errors import UnknownName

NAMES = ("passes", "match", "plan")
ROOT = "torchgraft"


def configure(text: str | None) -> None:
    """Show the named logs on standard error; `all` is every one of them."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in names:
        if name not in (*NAMES, "all"):
            raise UnknownName("log", name, (*NAMES, "all"), where="TORCHGRAFT_LOGS")
    for name in NAMES if "all" in names else names:
        logger = logging.getLogger(f"{ROOT}.{name}")
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"[torchgraft {name}] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
