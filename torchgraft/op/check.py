"""`graft.check`: an operator is right on every surface, or the reason why it is not."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torchgraft import _torch
from torchgraft.errors import CheckFailed, KernelBuild, UnknownName, first_line
from torchgraft.op import surfaces as surfaces_
from torchgraft.op.compare import (
    TAIL,
    Miss,
    check_inputs,
    compare,
    compare_fake,
    seed,
    written_of,
)
from torchgraft.op.define import Op
from torchgraft.op.kernel import Kernel, choose
from torchgraft.op.samples import DTYPES, Case, cases, clone
from torchgraft.op.schema import call
from torchgraft.op.surfaces import NotApplicable, Probe

OK, MISS, NOT_APPLICABLE = "ok", "MISS", "–"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One surface on one device."""

    op: str
    surface: str
    device: str
    status: str  # "ok", "MISS" or "–" (does not apply)
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """What `graft.check` found. `str` is the table; `misses` are the cells that are not right."""

    cells: tuple[Cell, ...]

    @property
    def ok(self) -> bool:
        return not self.misses

    @property
    def misses(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.status == MISS)

    def assert_ok(self) -> None:
        """Raise `CheckFailed` with the table unless everything is right."""
        if not self.ok:
            lines = [f"{cell.surface}, {cell.device}: {cell.reason}" for cell in self.misses]
            raise CheckFailed(str(self), lines)

    def __str__(self) -> str:
        heads = ("operator", "surface", "device", "", "reason")
        rows = [(c.op, c.surface, c.device, c.status, c.reason) for c in self.cells]
        widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(4)]
        return "\n".join(
            "  ".join([*(row[i].ljust(widths[i]) for i in range(4)), row[4]]).rstrip()
            for row in [heads, *rows]
        )


def check(
    op: Op,
    *,
    devices: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    surfaces: Iterable[str] | None = None,
) -> Result:
    """Whether an operator is right everywhere, as a table: surface by device, a reason a miss.

    Each kernel is held to the reference over the operator's samples and variants of them (large
    with an odd size, empty, 0-d, strided, NaN and inf, each dtype); fakes are held to the kernels,
    gradients to the reference's and to finite differences. What the reference refuses is left out.
    `devices` are those that the operator has kernels for and this machine has. In a test:
    `graft.check(my_op).assert_ok()`.
    """
    known = {"kernels": None, **surfaces_.SURFACES}
    chosen = tuple(surfaces or known)
    for name in chosen:
        if name not in known:
            raise UnknownName("surface", name, known, where="graft.check")
    with torch.random.fork_rng():  # a body may draw random numbers: every run is seeded
        return Result(tuple(_cells(op, devices or _devices(op), tuple(dtypes), chosen)))


def _cells(
    op: Op, devices: Sequence[str], dtypes: tuple[torch.dtype, ...], chosen: Sequence[str]
) -> list[Cell]:
    cells: list[Cell] = []
    for device in devices:
        refusals: list[Exception] = []
        every = list(cases(op, device, dtypes, refusals))
        if not every:
            why = f" ({first_line(refusals[0])})" if refusals else ""
            reason = f"the reference takes none of the samples{why}; write @op.samples"
            cells.append(Cell(op.name, "samples", device, MISS, reason))
            continue
        if "kernels" in chosen:
            cells += _kernels(op, device, every)
        for name in chosen:
            if name != "kernels":
                probe = Probe(op, device, every)
                cells.append(_cell(op, name, device, surfaces_.SURFACES[name], probe))
    return cells


def _devices(op: Op) -> list[str]:
    return sorted({"cpu", *filter(_is_here, (kernel.device for kernel in op.kernels))})


def _is_here(device: str) -> bool:
    """Whether this machine has a device; `npu` is whatever torch's spare backend is named after."""
    if device == "npu" and _torch.private_device() != device:
        return False
    module = getattr(torch, device, None)
    return module is not None and bool(module.is_available())


def _cell(op: Op, name: str, device: str, run: Callable[[Any], None], subject: Any) -> Cell:
    try:
        run(subject)
    except NotApplicable as reason:
        return Cell(op.name, name, device, NOT_APPLICABLE, str(reason))
    except Miss as reason:
        return Cell(op.name, name, device, MISS, str(reason))
    except Exception as error:  # whatever a surface raises is why it is missed
        return Cell(op.name, name, device, MISS, first_line(error))
    return Cell(op.name, name, device, OK)


def _kernels(op: Op, device: str, every: list[Case]) -> list[Cell]:
    """A cell for each kernel, and one for the fake against whatever each call was given to."""
    declared = [kernel for kernel in op.kernels if kernel.device == device]
    groups: dict[Kernel | None, list[Case]] = {kernel: [] for kernel in declared}
    for case in every:
        groups.setdefault(choose(declared, case.values, {}), []).append(case)
    cells = []
    for kernel, mine in groups.items():
        name = f"kernel: {kernel.where if kernel else 'the reference'}"
        cells.append(_cell(op, name, device, _run_kernel(op), mine))
    cells.append(_cell(op, "fake", device, _run_fake(op), every))
    return cells


def _run_kernel(op: Op) -> Callable[[list[Case]], None]:
    def one(case: Case) -> None:
        before, after = clone(case.values), clone(case.values)
        seed()
        try:
            with torch.no_grad():
                results = call(op.parsed, op.overload, after)
        except KernelBuild:
            raise
        except Exception as error:
            raise Miss(
                f"refused, and the reference takes it ({first_line(error)}); "
                f"give the kernel a when=, or check(dtypes=...)"
            ) from error
        check_inputs(op, before, after, results)
        compare(op, [*_flat(results), *written_of(op, after)], case.values)

    def run(mine: list[Case]) -> None:
        if not mine:
            raise Miss("no sample reaches it; add one that its when= accepts")
        _each(one, mine)

    return run


def _run_fake(op: Op) -> Callable[[list[Case]], None]:
    def one(case: Case) -> None:
        real: list[torch.Tensor] | None = None
        with torch.no_grad(), contextlib.suppress(Exception):  # the kernel's cell has why
            real = _flat(call(op.parsed, op.overload, clone(case.values)))
        if real is not None:
            compare_fake(op, real, case.values)

    return lambda every: _each(one, every)


def _each(prove: Callable[[Case], None], every: list[Case]) -> None:
    """Raise the most telling `Miss` over all cases: the first, unless one knows more."""
    misses: list[str] = []
    for case in every:
        try:
            prove(case)
        except Miss as reason:
            misses.append(f"{case.name}: {reason}")
    if misses:
        best = next((miss for miss in misses if TAIL in miss), misses[0])
        more = f" ({len(misses)} of {len(every)} cases)" if len(misses) > 1 else ""
        raise Miss(best + more)


def _flat(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _torch.flatten(value)[0] if isinstance(leaf, torch.Tensor)]
