"""What `torchgraft run` decides for the scripts it runs; processes that those start inherit it."""

from __future__ import annotations

import os

from torchgraft.compat import device
from torchgraft.config import MODES
from torchgraft.errors import UnknownName

MODE = "TORCHGRAFT_MODE"


def mode(wanted: str) -> str:
    """The mode to compile in: what the script means, unless the environment says another. No code
    is generated for the simulated device, where every mode is `eager`."""
    chosen = os.environ.get(MODE, wanted)
    if chosen not in MODES:
        raise UnknownName("mode", chosen, MODES, where=MODE)
    return chosen if device.is_mapped() else "eager"
