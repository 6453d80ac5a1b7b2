"""`graft.load_ops`: what `torchgraft op-plugin` built, in another process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchgraft.op.plugin import Loaded


def load_ops(folder: str | os.PathLike[str] = ".torchgraft") -> Loaded:
    """Declare the operators that `torchgraft op-plugin` kept in a folder, and say which.

    Its files are checked against the hashes in its manifest first. Loading it again changes
    nothing. `torchgraft.op.plugin.functions()` has what torch_npu would make functions of.
    """
    from torchgraft.op import (
        plugin,
    )  # needs the packages of the extra `plugin`, as little else does

    return plugin.load(folder)
