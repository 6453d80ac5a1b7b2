from torchgraft.compat.air.config import CompilerConfig

__all__ = ["CompilerConfig"]
