from torchgraft.compat.air import attr
from torchgraft.compat.air.convert import register_fx_node_ge_converter
from torchgraft.compat.air.ge import DataType, Tensor, TensorSpec
from torchgraft.compat.air.ir import IrDef, auto_convert_to_tensor, ge_op

__all__ = [
    "DataType",
    "IrDef",
    "Tensor",
    "TensorSpec",
    "attr",
    "auto_convert_to_tensor",
    "ge_op",
    "register_fx_node_ge_converter",
]
