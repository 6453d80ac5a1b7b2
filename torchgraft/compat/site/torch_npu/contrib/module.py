from typing import NoReturn

from torchgraft.compat.refused import REFUSED, missing


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise missing(f"{__name__}.{name}", REFUSED[__name__])
