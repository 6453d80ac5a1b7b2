"""What `torch_aie` and `mindietorch` both are."""

from torchgraft.compat import backends, device
from torchgraft.compat.aie import builtin, libraries
from torchgraft.compat.aie.compile import compile, export_engine, finalize, set_device
from torchgraft.compat.aie.enums import CompileMode, PrecisionPolicy, TensorFormat, dtype
from torchgraft.compat.aie.inputs import Input

__all__ = [
    "CompileMode",
    "Input",
    "PrecisionPolicy",
    "TensorFormat",
    "compile",
    "dtype",
    "export_engine",
    "finalize",
    "set_device",
]


def activate() -> None:
    """What importing one of them does to the process."""
    device.activate()
    libraries.activate()
    builtin.activate()
    backends.register()
