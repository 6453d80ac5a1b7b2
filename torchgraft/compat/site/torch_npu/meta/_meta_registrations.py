"""`m`, the library that Meta kernels of `npu::` operators are registered in."""

from torch_npu.op_plugin.meta._meta_registrations import m

__all__ = ["m"]
