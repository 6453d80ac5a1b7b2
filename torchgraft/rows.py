"""`graft.Rows`: a program over batches of any length, columns in and columns out.

What a worker of a batch job or a server holds. It needs NumPy, and no engine in particular.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgraft import _torch
from torchgraft.compile import Compiled
from torchgraft.errors import BadValue, UnknownName
from torchgraft.package.load import load
from torchgraft.signature import ConstSpec, Signature, TensorSpec, tensors

if TYPE_CHECKING:
    import numpy as np

    Columns = Mapping[str, np.ndarray[Any, Any]]


class Rows:
    """A program whose inputs and outputs have one row for each item of a batch.

    Inputs are the columns of their names. A batch goes through the smallest gear that holds it, its
    rest filled with zeros; one that is longer than the largest gear is cut. So rows must not depend
    on each other. On CUDA, batches are copied from pinned memory. Results are added to the columns:
    `output` (`output0`, … where there are several), or the keys of a dict.

    >>> import numpy as np, torch, torchgraft as graft
    >>> gears = graft.Input(gears=[(1, 3), (4, 3)])
    >>> rows = graft.Rows(graft.compile(torch.nn.ReLU(), (gears,), mode="eager"))
    >>> rows({"id": np.arange(2), "input": np.array([[-1.0, 0, 1], [2, -3, 4]])})["output"]
    array([[0., 0., 1.],
           [2., 0., 4.]], dtype=float32)
    """

    def __init__(
        self,
        program: Compiled | str | os.PathLike[str],
        device: torch.device | str | None = None,
    ) -> None:
        self.program = program if isinstance(program, Compiled) else load(program, device)
        self._gears = [source.signature for source in self.program.captures]
        if not self._gears:
            raise BadValue("program", self.program, "one that is compiled as a whole")
        for signature in self._gears:
            _check(self.program.name, signature)

    @property
    def inputs(self) -> dict[str, tuple[int | None, ...]]:
        """What a row of each input looks like: its sizes, None where there are several."""
        found: dict[str, tuple[int | None, ...]] = {}
        for signature in self._gears:
            for _, spec in tensors(signature.specs):
                sizes = tuple(s if isinstance(s, int) else None for s in spec.shape[1:])
                known = found.setdefault(spec.name, sizes)
                same = zip(known, sizes, strict=True)
                found[spec.name] = tuple(a if a == b else None for a, b in same)
        return found

    def __call__(self, batch: Columns) -> dict[str, np.ndarray[Any, Any]]:
        """The batch with the program's results."""
        import numpy as np

        given = {}
        for _, spec in tensors(self._gears[0].specs):
            if spec.name not in batch:
                raise UnknownName("column", spec.name, batch, f"input of {self.program.name}")
            given[spec.name] = np.atleast_1d(batch[spec.name])
        counts = {name: len(column) for name, column in given.items()}
        rows = max(counts.values())
        if min(counts.values()) != rows:
            raise BadValue("batch", counts, "columns of one length")
        gears = [one for one in self._gears if _fits(one, given)] or self._gears
        most = max(_range(gear)[1] for gear in gears)
        pieces = []
        for start in range(0, max(rows, 1), most):
            part = {name: column[start : start + most] for name, column in given.items()}
            pieces.append(self._run(part, min(rows - start, most), gears))
        made = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        return {**batch, **made}

    def _run(self, given: Columns, rows: int, gears: list[Signature]) -> dict[str, Any]:
        """One call: rows that some gear holds, with as many zeros as it takes."""
        least = [max(rows, _range(gear)[0]) for gear in gears]
        able = [i for i, gear in enumerate(gears) if least[i] <= _range(gear)[1]]
        gear = min(able, key=lambda i: least[i])
        specs = gears[gear].specs
        leaves = [
            _filled(spec, given[spec.name], least[gear])
            if isinstance(spec, TensorSpec)
            else spec.value
            for spec in specs
            if isinstance(spec, (TensorSpec, ConstSpec))
        ]
        args, kwargs = _torch.unflatten(leaves, gears[gear].tree)
        made = self.program(*args, **kwargs)
        return {name: _taken(value, least[gear], rows) for name, value in _named(made)}


def _check(name: str, signature: Signature) -> None:
    sizes = {spec.shape[:1] for _, spec in tensors(signature.specs)}
    others = [s for s in signature.specs if not isinstance(s, (TensorSpec, ConstSpec))]
    if len(sizes) != 1 or () in sizes or others:
        takes = ", ".join(f"{spec.name}: {spec}" for spec in signature.specs)
        raise BadValue(name, takes, "tensor inputs with the same rows in dim 0")


def _range(signature: Signature) -> tuple[int, int]:
    """The least and the most rows that a gear takes."""
    rows = next(tensors(signature.specs))[1].shape[0]
    low, high = (rows, rows) if isinstance(rows, int) else signature.ranges[str(rows)]
    return low, high if high is not None else 1 << 62


def _fits(signature: Signature, given: Columns) -> bool:
    """Whether a gear takes rows of these sizes."""
    for _, spec in tensors(signature.specs):
        sizes = given[spec.name].shape[1:]
        if len(sizes) != len(spec.shape) - 1:
            return False
        for want, size in zip(spec.shape[1:], sizes, strict=True):
            if isinstance(want, int) and want != size:
                return False
    return True


def _filled(spec: TensorSpec, column: np.ndarray[Any, Any], rows: int) -> Tensor:
    import numpy as np

    dtype = torch.float32 if spec.dtype == torch.bfloat16 else spec.dtype  # NumPy has no bfloat16
    pin = spec.device.type == "cuda"
    held = torch.zeros((rows, *column.shape[1:]), dtype=dtype, pin_memory=pin)
    into = held.numpy()
    if not np.can_cast(column.dtype, into.dtype, "same_kind"):
        raise BadValue(f"column {spec.name!r}", column.dtype, f"values for {spec.dtype}")
    into[: len(column)] = column
    return held.to(spec.device, spec.dtype, non_blocking=pin)


def _named(made: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(made, Mapping):
        yield from made.items()
    elif isinstance(made, (tuple, list)):
        yield from ((f"output{i}", value) for i, value in enumerate(made))
    else:
        yield "output", made


def _taken(value: Any, size: int, rows: int) -> np.ndarray[Any, Any]:
    if not isinstance(value, Tensor) or value.shape[:1] != (size,):
        got = tuple(value.shape) if isinstance(value, Tensor) else value
        raise BadValue("result", got, f"a tensor of {size} rows, as the batch has")
    value = value[:rows].cpu()
    made: np.ndarray[Any, Any] = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return made
