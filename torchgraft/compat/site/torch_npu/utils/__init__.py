"""What extensions are built with."""

from torch_npu.utils import cpp_extension

__all__ = ["cpp_extension"]
