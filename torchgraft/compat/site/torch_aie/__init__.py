"""Torch-AIE off the NPU."""

from torch_aie import _compile_spec, _enums, npu
from torchgraft.compat import backends, device
from torchgraft.compat.aie import libraries
from torchgraft.compat.aie.compile import compile, export_engine, finalize, set_device
from torchgraft.compat.aie.enums import CompileMode, PrecisionPolicy, TensorFormat, dtype
from torchgraft.compat.aie.inputs import Input

__all__ = [
    "CompileMode",
    "Input",
    "PrecisionPolicy",
    "TensorFormat",
    "_compile_spec",
    "_enums",
    "compile",
    "dtype",
    "export_engine",
    "finalize",
    "npu",
    "set_device",
]

device.activate()
libraries.activate()
backends.register()
