from torchgraft.compat.air.ge import Const, DataType, Format, Tensor, TensorSpec
from torchgraft.compat.air.ir import TensorType, auto_convert_to_tensor
from torchgraft.compat.air.legacy import (
    compat_as_bytes,
    compat_as_bytes_list,
    get_default_ge_graph,
    get_invalid_desc,
    next_unique_name,
)
from torchgraft.compat.air.legacy import trans_to_list_list as trans_to_list_list_float
from torchgraft.compat.air.legacy import trans_to_list_list as trans_to_list_list_int

__all__ = [
    "Const",
    "DataType",
    "Format",
    "Tensor",
    "TensorSpec",
    "TensorType",
    "auto_convert_to_tensor",
    "compat_as_bytes",
    "compat_as_bytes_list",
    "get_default_ge_graph",
    "get_invalid_desc",
    "next_unique_name",
    "trans_to_list_list_float",
    "trans_to_list_list_int",
]
