from typing import NoReturn

from torchgraft.compat.refused import REFUSED
from torchgraft.errors import NotOnThisDevice


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise NotOnThisDevice(f"{__name__}.{name}", REFUSED[__name__])
