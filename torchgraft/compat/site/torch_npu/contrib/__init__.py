from typing import NoReturn

from torchgraft.compat import refused


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__") or name in ("transfer_to_npu", "module", "function"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    which = "function" if name[0].islower() else "module"
    raise refused.missing(f"{__name__}.{name}", refused.REFUSED[f"{__name__}.{which}"])
