from typing import NoReturn

from torchgraft.compat.refused import REFUSED, missing


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__") or name in ("transfer_to_npu", "module", "function"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    which = "function" if name[0].islower() else "module"
    raise missing(f"{__name__}.{name}", REFUSED[f"{__name__}.{which}"])
