from torchgraft.compat.air.attr import (
    Bool,
    DataType,
    Float,
    Int,
    ListBool,
    ListDataType,
    ListFloat,
    ListInt,
    ListListFloat,
    ListListInt,
    ListStr,
    Str,
)

__all__ = [
    "Bool",
    "DataType",
    "Float",
    "Int",
    "ListBool",
    "ListDataType",
    "ListFloat",
    "ListInt",
    "ListListFloat",
    "ListListInt",
    "ListStr",
    "Str",
]
