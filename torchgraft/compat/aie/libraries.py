"""C++ libraries of converters and passes, which link `libtorch_aie.so`."""

from __future__ import annotations

from torchgraft.native import bridge
from torchgraft.native.driver import built


def activate() -> None:
    """Let `torch.ops.load_library` find `libtorch_aie.so`, where `torchgraft native` has built it:
    a library that was linked against it need not say where it is."""
    if (root := built("runtime")) is not None:
        bridge.load(root)
