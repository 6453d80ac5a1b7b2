"""C++ converters and passes, as converters and patterns of Python.

A library registers lambdas with `libtorch_aie`; each is asked with a description of one call (its
arguments as JSON, its constant tensors as tensors), and writes what stands in its place through a
callback, call by call, so that it sees the shapes of what it made.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft import _torch
from torchgraft.convert.define import Converter
from torchgraft.convert.net import Net, Value
from torchgraft.errors import BadConverter, Declined, GraftError, NoMatch, first_line
from torchgraft.fx import meta
from torchgraft.fx.names import operator_named, packet, split
from torchgraft.fx.script.runtime import ENUMS, number_of
from torchgraft.native.driver import Root, build
from torchgraft.passes.pattern.define import Pattern, pattern

if TYPE_CHECKING:
    from torchgraft.passes.pattern.rewrite import Match

_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)
_DTYPES = ENUMS["ScalarType"]
_NUMBERED = (torch.dtype, torch.layout, torch.memory_format)


def load(root: Root | None = None) -> None:
    """Load `libtorch_aie` (building it first unless a root is given), so that libraries that link
    it are found wherever they are."""
    root = root or build("runtime")
    ctypes.CDLL(str(root.lib / "libtorch_aie.so"), ctypes.RTLD_GLOBAL)


def converters() -> list[Converter]:
    """The converters of the C++ libraries that this process has loaded, first asked first."""
    made = [_converter(entry) for entry in reversed(_registered()) if not entry["subgraph"]]
    return [one for one in made if one is not None]


def patterns() -> list[Pattern]:
    """The passes of the C++ libraries that this process has loaded."""
    return [_pattern(entry) for entry in reversed(_registered()) if entry["subgraph"]]


def _registered() -> list[dict[str, Any]]:
    if not _torch.schemas_of("torchgraft_native::registered"):  # the library is not loaded
        return []
    entries: list[dict[str, Any]] = json.loads(torch.ops.torchgraft_native.registered())
    for entry in entries:
        if entry["problem"]:
            kind = "pattern" if entry["subgraph"] else "schema"
            raise BadConverter(
                _title(entry), f"its {kind} does not parse: {entry['problem']}", "Mend the text."
            )
    return entries


def _title(entry: Mapping[str, Any]) -> str:
    return f"{entry['text'].split('(', 1)[0].strip()} of {Path(entry['library']).name}"


class _Asked:
    """A C++ converter as a function; `where` is the library that it is in, `content` its hash."""

    def __init__(self, entry: Mapping[str, Any], op: Any, extra: Sequence[Any]) -> None:
        self.id, self.where = int(entry["id"]), str(entry["library"])
        self.op, self.extra, self.content = op, extra, content_of(entry)
        self.kind = entry["text"].split("(", 1)[0].split(".", 1)[0].strip()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __call__(self, net: Net, *args: Any, **kwargs: Any) -> Any:
        schema = self.op._schema.arguments
        given = dict(zip((a.name for a in schema), args, strict=False)) | kwargs
        values = [given.get(a.name, a.default_value) for a in schema]
        wanted = net.node.meta["val"]
        many = isinstance(wanted, (tuple, list))
        used = [True]
        if many:
            parts = {user.args[1] for user in net.node.users}
            used = [i in parts for i in range(len(wanted))]
        call = _Call(net, self.id, self.kind, [*values, *self.extra], used)
        reason, results = call.run()
        if reason is not None:
            raise Declined(reason)
        return tuple(results) if many else results[0]


def content_of(entry: Mapping[str, Any]) -> object:
    """The hash of the library that a converter is in; where there is none, nothing equals it."""
    return entry["content"] or object()


# TorchScript writes `_convolution`, and in-place calls; graphs hold the functional core.
_ALIASES = {"aten::_convolution": ("aten::convolution", (False, False, True, True))}


def _converter(entry: Mapping[str, Any]) -> Converter | None:
    name, extra = _ALIASES.get(entry["text"].split("(", 1)[0].strip(), (entry["text"], ()))
    space, base, overload = split(name)
    try:
        op = operator_named(f"{space}::{base}.{overload or 'default'}")
        if op._schema.is_mutable and base.endswith("_"):
            op = operator_named(f"{space}::{base[:-1]}.{overload or 'default'}")
    except GraftError as error:
        if not _exists(f"{space}::{base}"):
            return None  # its operators may be loaded later
        raise BadConverter(_title(entry), first_line(error), "Name an overload.") from error
    return Converter(_title(entry), (op,), _Asked(entry, op, extra))


def _exists(name: str) -> bool:
    try:
        packet(name)
    except GraftError:
        return False
    return True


def _pattern(entry: Mapping[str, Any]) -> Pattern:
    made = _made_pattern(int(entry["id"]), entry["text"], entry["library"])
    made.content = content_of(entry)
    return made


@functools.lru_cache(maxsize=256)  # tracing a pattern costs more than matching it
def _made_pattern(number: int, text: str, library: str) -> Pattern:
    name = f"custom_pass_{number} of {Path(library).name}"
    made = pattern(text, name=name, register=False)
    made.where = library
    results = len(re.split(r",", text.rsplit("return", 1)[1]))

    def replace(m: Match) -> Any:
        place = min(node for node in m.outputs if isinstance(node, Node))
        net = Net(m.graph.gm, place)
        values = [m[slot.name] for slot in made.slots]
        call = _Call(net, number, "torch_aie::subgraph", values, [True] * results)
        reason, outputs = call.run()
        if reason is not None:
            net.drop()
            raise NoMatch(f"{name}: {reason}", place)
        return [value.node for value in outputs]

    # A quantize layer gives int8 where the pattern gave float: such a pass means it.
    made.replace(replace, nodes=True, changes_type=True)
    return made


class _Call:
    """One question to a C++ converter."""

    def __init__(
        self, net: Net, number: int, kind: str, values: Sequence[Any], used: Sequence[bool]
    ) -> None:
        self.net, self.number, self.kind, self.used = net, number, kind, used
        self.tensors: list[Tensor] = []
        self.values: list[Value] = []
        self.args = [self._encode(value) for value in values]

    def run(self) -> tuple[str | None, list[Any]]:
        """The reason for a refusal, or the results."""
        call = {
            "kind": self.kind,
            "args": self.args,
            "results": list(self.used),
            "line": meta.source_line(self.net.node) or "",
        }
        callback = _CALLBACK(self._request)
        address = ctypes.cast(callback, ctypes.c_void_p).value
        said = json.loads(
            torch.ops.torchgraft_native.convert(
                self.number, json.dumps(call), self.tensors, address
            )
        )
        if "refused" in said:
            return str(said["refused"]), []
        return None, [None if one is None else self.values[one] for one in said["results"]]

    def _request(self, text: bytes) -> int:
        """A call of an operator (or a constant) that the converter wants in the graph."""
        try:
            answer: dict[str, Any] = {"values": self._add(json.loads(text))}
        except Exception as error:  # the converter's to handle, or its refusal
            answer = {"error": first_line(error)}
        torch.ops.torchgraft_native.answer(json.dumps(answer))
        return 0

    def _add(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        if "constant" in request:
            held = torch.ops.torchgraft_native.held(request["constant"])
            return [self._value(self.net.constant(held))]
        args = [self._decode(arg) for arg in request["args"]]
        kwargs = {name: self._decode(arg) for name, arg in request["kwargs"].items()}
        made = self.net.add(request["op"], *args, **kwargs)
        return [self._value(one) for one in (made if isinstance(made, tuple) else (made,))]

    def _value(self, value: Value) -> dict[str, Any]:
        """A tensor of the graph, as C++ knows it. A size that is not known is -1."""
        shape = [size if isinstance(size, int) else -1 for size in value.shape]
        self.values.append(value)
        return {
            "v": len(self.values) - 1,
            "shape": shape,
            "dtype": number_of(value.dtype),
        }

    def _encode(self, value: Any) -> Any:
        if isinstance(value, Node):
            value = Value(value)
        if isinstance(value, Value):
            if not isinstance(value.node.meta["val"], Tensor):
                return {"unknown": "a number that is computed while the program runs"}
            known = _constant(self.net.gm, value.node)
            return self._value(value) | ({} if known is None else self._held(known))
        if isinstance(value, Tensor):
            return self._held(value)
        if isinstance(value, _NUMBERED):
            return number_of(value)
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, (list, tuple)):
            return [self._encode(item) for item in value]
        if isinstance(value, float):
            return {"f": repr(value)}
        if value is None or isinstance(value, (bool, int, str)):
            return value
        return {"unknown": f"{value!r}, which C++ has no type for"}

    def _held(self, tensor: Tensor) -> dict[str, Any]:
        self.tensors.append(tensor.detach())
        return {"c": len(self.tensors) - 1}

    def _decode(self, arg: Any) -> Any:
        if isinstance(arg, list):
            return [self._decode(item) for item in arg]
        if not isinstance(arg, dict):
            return arg
        kinds: dict[str, Callable[[Any], Any]] = {
            "v": self.values.__getitem__,
            "f": float,
            "dtype": _DTYPES.__getitem__,
            "device": torch.device,
            "c": lambda number: self.net.constant(torch.ops.torchgraft_native.held(number)),
        }
        [(kind, value)] = arg.items()
        return kinds[kind](value)


def _constant(gm: GraphModule, node: Node) -> Tensor | None:
    """The tensor that a node stands for, where it is known at compile time."""
    if node.op != "get_attr":
        return None
    held = meta.attribute(gm, str(node.target))
    return held if isinstance(held, Tensor) else None
