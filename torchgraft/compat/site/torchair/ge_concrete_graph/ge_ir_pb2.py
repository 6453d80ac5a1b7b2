from torchgraft.compat.air.legacy import Message as AttrDef
from torchgraft.compat.air.legacy import Message as GraphDef
from torchgraft.compat.air.legacy import Message as OpDef
from torchgraft.compat.air.legacy import Message as TensorDef
from torchgraft.compat.air.legacy import Message as TensorDescriptor

__all__ = ["AttrDef", "GraphDef", "OpDef", "TensorDef", "TensorDescriptor"]
