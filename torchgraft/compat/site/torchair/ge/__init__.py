from torchgraft.compat.air import attr
from torchgraft.compat.air.ge import (
    Cast,
    Clone,
    Const,
    DataType,
    Format,
    Tensor,
    TensorSpec,
    custom_op,
)

__all__ = [
    "Cast",
    "Clone",
    "Const",
    "DataType",
    "Format",
    "Tensor",
    "TensorSpec",
    "attr",
    "custom_op",
]
