from torchgraft.compat.air.ir import IrDef, ge_op

__all__ = ["IrDef", "ge_op"]
