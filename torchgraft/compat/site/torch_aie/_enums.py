from torchgraft.compat.aie.enums import CompileMode, PrecisionPolicy, TensorFormat, dtype

__all__ = ["CompileMode", "PrecisionPolicy", "TensorFormat", "dtype"]
