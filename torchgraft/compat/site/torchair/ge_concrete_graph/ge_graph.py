from torchgraft.compat.air.ge import Const, DataType, Format, Tensor, TensorSpec
from torchgraft.compat.air.ir import auto_convert_to_tensor

__all__ = ["Const", "DataType", "Format", "Tensor", "TensorSpec", "auto_convert_to_tensor"]
