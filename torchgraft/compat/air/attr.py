"""`torchair.ge.attr`: values of attributes, each of a stated type."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch

from torchgraft.errors import NotOnThisDevice
from torchgraft.op.dtypes import dtype_name


class Attr:
    """The value of an attribute of an operator."""

    item: ClassVar[tuple[type, ...]] = ()
    depth: ClassVar[int] = 0

    def __init__(self, value: Any) -> None:
        self._check(value, self.depth)
        self.value = value

    def _check(self, value: Any, depth: int) -> None:
        if depth:
            wrong = f"{type(self).__name__} takes a list, got {value!r} ({type(value).__name__})"
            assert isinstance(value, (list, tuple)), wrong
            for one in value:
                self._check(one, depth - 1)
            return
        wanted = " or ".join(kind.__name__ for kind in self.item)
        fits = isinstance(value, self.item) and (bool in self.item or not isinstance(value, bool))
        assert fits, f"{type(self).__name__} takes {wanted}, got {value!r} ({type(value).__name__})"

    @property
    def plain(self) -> Any:
        """The value as an operator of torch takes it."""
        return self.value

    @classmethod
    def get(cls, message: Any) -> NoReturn:
        """The value that a message of the NPU's compiler holds."""
        raise NotOnThisDevice(f"attr.{cls.__name__}.get", "Use the .value of what was given.")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.value == other.value

    def __hash__(self) -> int:
        return hash((type(self), str(self.value)))

    def __repr__(self) -> str:
        return f"attr.{type(self).__name__}({self.value!r})"


class Bool(Attr):
    item = (bool,)


class Int(Attr):
    item = (int,)


class Float(Attr):
    item = (float, int)


class Str(Attr):
    item = (str,)


class DataType(Attr):
    """A dtype: a number of `torchair.ge.DataType`, or torch's."""

    item = (int, torch.dtype)

    @property
    def plain(self) -> Any:
        return dtype_name(self.value)


class ListBool(Bool):
    depth = 1


class ListInt(Int):
    depth = 1


class ListFloat(Float):
    depth = 1


class ListStr(Str):
    depth = 1


class ListDataType(DataType):
    depth = 1

    @property
    def plain(self) -> Any:
        return [dtype_name(one) for one in self.value]


class ListListInt(Int):
    depth = 2


class ListListFloat(Float):
    depth = 2


KINDS: dict[str, type[Attr]] = {
    "Bool": Bool,
    "Int": Int,
    "Float": Float,
    "String": Str,
    "Type": DataType,
    "ListBool": ListBool,
    "ListInt": ListInt,
    "ListFloat": ListFloat,
    "ListString": ListStr,
    "ListType": ListDataType,
    "ListListInt": ListListInt,
    "ListListFloat": ListListFloat,
}
"""By the type that a prototype gives an attribute."""
