"""The simulated device `npu`: a device of torch's own kind, in C++, built and loaded once.

`activate()` gives this process `torch.npu`, `x.npu()` and `"npu:0"`; see docs/npu.md.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import backend_registration

from torchgraft import _torch
from torchgraft.compat import device, typed
from torchgraft.errors import BadValue
from torchgraft.native import build

_lock = threading.Lock()


def activate() -> None:
    """Give this process the device. The first time on a machine this compiles it, in a minute."""
    with _lock:
        library()


@functools.cache
def library() -> ctypes.CDLL:
    """The device, loaded; renaming torch's spare device can be done once in a process."""
    path = build("npu").lib / "libtorchgraft_npu.so"
    registration: Any = backend_registration  # untyped in torch
    load: Any = torch.ops.load_library
    registration.rename_privateuse1_backend("npu")
    load(str(path))
    found = ctypes.CDLL(str(path))
    found.graft_npu_open.restype = ctypes.c_char_p
    found.graft_npu_set_adversary.argtypes = [ctypes.c_int64]
    found.graft_npu_adversary.restype = ctypes.c_int64
    found.graft_npu_forked.restype = ctypes.c_bool
    if said := found.graft_npu_open():
        raise ValueError(said.decode())
    from torchgraft.compat.simulated import npu

    _torch.register_device("npu", npu)
    registration.generate_methods_for_privateuse1_backend(for_storage=True)
    parallel: Any = torch.nn.DataParallel
    parallel.__init__ = device.undivided(parallel.__init__)
    torch.set_default_tensor_type = typed.defaults(torch.set_default_tensor_type, "npu")
    atexit.register(found.graft_npu_stop)
    return found


@contextlib.contextmanager
def adversary(seed: int) -> Iterator[None]:
    """Inside, streams are as late as the program permits; which ones, the seed decides.

    A task that is held back runs when somebody waits for it. So a missing wait shows in some seed,
    every time, and not once in a thousand runs. `TORCHGRAFT_NPU_ADVERSARY=seed` does it for a
    whole process.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise BadValue("seed", seed, "an integer from 0 to 2**63 - 1")
    found = library()
    before = found.graft_npu_adversary()
    found.graft_npu_set_adversary(seed)
    try:
        yield
    finally:
        found.graft_npu_set_adversary(before)
