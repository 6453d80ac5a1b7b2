from typing import Any

from torchgraft.compat.air.ge import Cast, Clone, Const, builder, custom_op

__all__ = ["Cast", "Clone", "Const", "custom_op"]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return builder(name)
