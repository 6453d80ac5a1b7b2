"""Weights in the safetensors format, each at a multiple of 64 bytes, read where they lie.

The library's writer packs tensors without gaps and its reader wants a file of its own, so this
writes and maps the (simple) format itself; what it writes, the library reads.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchgraft.errors import BadPackage, NotSavable
from torchgraft.package.archive import ALIGNMENT
from torchgraft.package.codec import field, index

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_MOST_HEADER = 100 << 20  # as the library has it


def write(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """The file in parts; the data of CPU tensors is not copied."""
    header: dict[str, Any] = {}
    parts: list[bytes | memoryview] = []
    at = 0
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in _NAMES:
            kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
            raise NotSavable(
                f"{name!r} is a tensor of {kind}, which safetensors has not",
                "Compute it in the model from plain tensors.",
            )
        data = bytes_of(tensor)
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(data)],
        }
        parts.append(data)
        at += len(data)
        if pad := -at % ALIGNMENT:
            header[f".pad{len(parts)}"] = {
                "dtype": "U8",
                "shape": [pad],
                "data_offsets": [at, at + pad],
            }
            parts.append(bytes(pad))
            at += pad
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return [struct.pack("<Q", len(text)) + text, *parts]


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements of a tensor in order; not copied where they lie so on the CPU."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    memory = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    memory.tensor = flat  # type: ignore[attr-defined]  # its owner, for as long as the view lives
    return memoryview(memory).cast("B")


def digest(tensor: Tensor) -> str:
    """The hash of a tensor's elements, as they are written."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def read(data: memoryview) -> dict[str, Tensor]:
    """The tensors of a file in memory, as views of it."""
    if len(data) < 8 or (length := struct.unpack_from("<Q", data)[0]) > min(
        len(data) - 8, _MOST_HEADER
    ):
        raise BadPackage("the weights are cut off")
    try:
        header = json.loads(bytes(data[8 : 8 + length]))
    except (ValueError, RecursionError) as error:
        raise BadPackage(f"the header of the weights is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise BadPackage("the header of the weights is not an object")
    content = data[8 + length :]
    found: dict[str, Tensor] = {}
    for name, entry in header.items():
        if name != "__metadata__" and not name.startswith(".pad"):
            found[name] = _tensor(name, entry, content)
    return found


def _tensor(name: str, entry: Any, content: memoryview) -> Tensor:
    dtype = _DTYPES.get(field(entry, "dtype", str))
    offsets = field(entry, "data_offsets", list)
    if dtype is None or len(offsets) != 2:
        raise BadPackage(f"weight {name!r} has no known type")
    shape = [index(size, 2**63) for size in field(entry, "shape", list)]
    count = 1
    for size in shape:
        count *= size
    start, end = (index(at, len(content) + 1) for at in offsets)
    if end - start != count * dtype.itemsize:
        raise BadPackage(f"weight {name!r} has another size than its shape says")
    if not count:
        return torch.empty(shape, dtype=dtype)
    if start % dtype.itemsize:
        raise BadPackage(f"weight {name!r} is not aligned")
    return torch.frombuffer(content, dtype=dtype, count=count, offset=start).reshape(shape)
