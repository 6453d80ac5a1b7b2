"""Memory for constants that calls read from end to end: huge pages, where the system has them.

A product of one row reads its weights once, as fast as memory gives them; with pages of 4 KiB the
processor spends as long again on finding out where they are (docs/performance.md).
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

PAGE = 2 << 20
ROOM = 32 * PAGE
"""Bytes that are asked for at once. Those that nothing is put into are never given."""
LEAST = 1 << 18
"""Bytes from which on a tensor is large: few ordinary pages are found without looking them up."""
_LINE = 64


@functools.cache
def has_huge() -> bool:
    """Whether the system gives huge pages to who asks for them."""
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
    return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in setting


class Pages:
    """Huge pages for the constants of one program, one behind the other. They are given back when
    the last tensor in them is gone."""

    def __init__(self) -> None:
        self._room: mmap.mmap | None = None
        self._next = self._end = 0

    def settle(self, tensor: Tensor) -> Tensor:
        """A copy in huge pages, laid out alike. The tensor itself where that is not for it: it is
        small, has gaps, or is not in the processor's memory; or there are no such pages."""
        size = tensor.numel() * tensor.element_size()
        if size < LEAST or not has_huge() or not _is_plain(tensor):
            return tensor
        if self._room is None or self._next + size > self._end:
            # One page more: the first of them begins somewhere in the first that there are.
            self._room = mmap.mmap(-1, max(ROOM, size) + PAGE, flags=_PRIVATE)
            self._room.madvise(mmap.MADV_HUGEPAGE)
            self._next = -_bytes(self._room, 0, 1).data_ptr() % PAGE
            self._end = len(self._room)
        flat = _bytes(self._room, self._next, size).view(tensor.dtype)
        self._next += -(-size // _LINE) * _LINE
        return flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor.detach())

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies with the strides that the tensors have, in huge pages where those are large. What
        shares memory shares it again: of each memory one stretch is copied, with gaps in it."""
        spans: dict[int, tuple[int, int]] = {}
        for tensor in tensors:
            start, end = _span(tensor)
            low, high = spans.get(_address(tensor), (start, end))
            spans[_address(tensor)] = min(low, start), max(high, end)
        made: dict[int, Tensor] = {}
        found = []
        for tensor in tensors:
            low, high = spans[address := _address(tensor)]
            low -= low % _LINE  # all stay as aligned as they were
            if address not in made:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                part = whole.set_(tensor.untyped_storage())[low:high]
                copy = self.settle(part)
                made[address] = part.clone() if copy is part else copy
            start, end = _span(tensor)
            mine = made[address][start - low : end - low].view(tensor.dtype)
            found.append(mine.as_strided(tensor.shape, tensor.stride()))
        return found


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its memory that a tensor lies in."""
    start, size = int(tensor.storage_offset()), tensor.element_size()
    last = int(sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)))
    return start * size, (start + last + 1 if tensor.numel() else start) * size


_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


def _bytes(room: mmap.mmap, start: int, count: int) -> Tensor:
    return torch.frombuffer(room, dtype=torch.uint8, offset=start, count=count)


def _is_plain(tensor: Tensor) -> bool:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    # Only of a tensor without gaps and overlaps does another one get the strides.
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
