from typing import NoReturn

from torchgraft.compat import refused


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise refused.missing(f"{__name__}.{name}", refused.REFUSED[__name__])
