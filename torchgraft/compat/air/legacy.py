"""What builders of older generated files call: they fill in a message for one operator, field by
field, and make a tensor of each of its outputs. Here the message becomes a call."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torchgraft.compat.air import attr as attrs
from torchgraft.compat.air.ge import custom_op, unregistered
from torchgraft.convert.net import Value
from torchgraft.errors import NotOnThisDevice
from torchgraft.op.declare import TABLE

_NUMBERS = itertools.count()


class Edge(str):
    """The name of an output of an operator, with the value itself."""

    __slots__ = ("value",)
    value: Value | None

    def __new__(cls, text: str, value: Value | None = None) -> Edge:
        made = super().__new__(cls, text)
        made.value = value
        return made


class _Desc:
    """The description of an input or an output; of its fields, the name counts."""

    def __init__(self) -> None:
        self.name = ""
        self.attr: defaultdict[str, _Attr] = defaultdict(_Attr)

    def CopyFrom(self, other: Any) -> None: ...


class _Descs(list[_Desc]):
    def add(self) -> _Desc:
        self.append(_Desc())
        return self[-1]


class _Attr(SimpleNamespace):
    """The value of an attribute: whichever field is set."""

    def __init__(self) -> None:
        super().__init__()
        self.list = SimpleNamespace(i=[], f=[], b=[], s=[], dt=[], val_type=0)
        self.list_list_int, self.list_list_float = _Lists(), _Lists()

    def taken(self) -> Any:
        for name, value in vars(self).items():
            if not name.startswith("list"):
                return value
        lists = [*vars(self.list).values(), self.list_list_int, self.list_list_float]
        return next((v for v in lists if isinstance(v, list) and v), [])


class _Lists(list[list[Any]]):
    """A list of lists, filled as a message is."""

    def CopyFrom(self, other: list[list[Any]]) -> None:
        self[:] = other


class Op:
    """The message. Asking for its first output makes the call."""

    def __init__(self) -> None:
        self.type = self.name = ""
        self.input: list[str] = []
        self.input_desc, self.output_desc = _Descs(), _Descs()
        self.attr: defaultdict[str, _Attr] = defaultdict(_Attr)
        self._made: list[Value] | None = None

    def output(self, index: int) -> Value:
        if self._made is None:
            self._made = self._call()
        return self._made[index]

    def _call(self) -> list[Value]:
        prototype = TABLE.prototypes.get(self.type)
        if prototype is None:
            raise unregistered(self.type)
        data = [getattr(edge, "value", None) for edge in self.input if not edge.endswith(":-1")]
        fed = dict(zip((desc.name for desc in self.input_desc), data, strict=True))
        inputs: dict[str, Any] = {}
        for port in prototype.inputs:
            if port.kind == "dynamic":
                names = [f"{port.name}{i}" for i in range(len(fed))]
                inputs[port.name] = [fed[name] for name in names if name in fed]
            else:
                inputs[port.name] = fed.get(port.name)
        kinds = {one.name: attrs.KINDS[one.type] for one in prototype.attrs}
        given = {
            name: kinds[name](_text(value.taken()))
            for name, value in self.attr.items()
            if name in kinds
        }
        made = custom_op(self.type, inputs=inputs, attrs=given)
        return list(made) if isinstance(made, (tuple, list)) else [made]


def _text(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_text(one) for one in value]
    return value.decode() if isinstance(value, bytes) else value


class _Ops:
    def add(self) -> Op:
        return Op()


class _Graph:
    """Hands out messages; the graph itself is torch's."""

    op = _Ops()


def get_default_ge_graph() -> _Graph:
    """Where the message of an operator is made: `get_default_ge_graph().op.add()`."""
    return _Graph()


def next_unique_name(name: str | None, op: str) -> str:
    """The name given, or a new one of the operator's."""
    return name or f"{op}_{next(_NUMBERS)}"


def get_invalid_desc() -> _Desc:
    """The description of an input that is not given."""
    return _Desc()


def compat_as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def trans_to_list_list(lists: Sequence[Sequence[Any]]) -> _Lists:
    """What an attribute of lists of lists is filled from."""
    return _Lists([list(one) for one in lists])


class Message:
    """A message that generated files import, and do not make."""

    def __init__(self) -> None:
        raise NotOnThisDevice("the protobuf of a GE graph", "Use torchair.ge.custom_op.")


def compat_as_bytes_list(texts: list[Any]) -> list[bytes]:
    return [compat_as_bytes(text) for text in texts]
