from torchgraft.compat.air.ge import dtype_promote

__all__ = ["dtype_promote"]
