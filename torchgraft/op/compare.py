"""Results of a kernel against those of the reference, in words when they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchgraft import _torch
from torchgraft.errors import first_line
from torchgraft.op import schema as schemas
from torchgraft.op.samples import clone

TOLERANCES = {
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1.3e-6, 1e-5),
}
_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


TAIL = "the tail is not computed"


class Miss(Exception):
    """A reason why a surface is not right."""


def flat(value: Any) -> list[Tensor]:
    """The tensors of nested lists and tuples, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in flat(item)]
    return []


def widen(value: Any) -> Any:
    """Floating-point tensors and dtypes in double precision."""
    if isinstance(value, Tensor):
        return value.to(_WIDE.get(value.dtype, value.dtype))
    if isinstance(value, (list, tuple)):
        return [widen(item) for item in value]
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def seed() -> None:
    """Let what runs next draw the random numbers that every other run drew."""
    torch.manual_seed(0)


def outcome(op: Any, fn: Any, values: Sequence[Any]) -> list[Tensor]:
    """What a call gives: its results, then the inputs that it may write, as they are after."""
    mine = clone(values)
    seed()
    results = flat(schemas.call(op.parsed, fn, mine))
    return [*results, *written_of(op, mine)]


def written_of(op: Any, values: Sequence[Any]) -> list[Tensor]:
    """The tensors among these arguments that the operator declares to write."""
    names = schemas.written(op.parsed)
    pairs = zip(op.parsed.arguments, values, strict=True)
    return [tensor for a, value in pairs if a.name in names for tensor in flat(value)]


def limits(op: Any, dtype: torch.dtype) -> tuple[float, float]:
    """How far results of a dtype may be apart: the author's word, else the dtype's precision."""
    if dtype in op.tolerances:
        rtol, atol, _ = op.tolerances[dtype]
        return rtol, atol
    return TOLERANCES.get(dtype, (0.0, 0.0))


def expect(op: Any, values: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """What the reference gives, in the dtype of the arguments and computed in double."""
    plain = outcome(op, op.reference, values)
    try:
        wide = outcome(op, op.reference, widen(values))
    except Exception:  # a reference may insist on its dtypes
        return plain, plain
    if [t.shape for t in wide] != [t.shape for t in plain]:
        return plain, plain
    return plain, [w.to(p.dtype) for w, p in zip(wide, plain, strict=True)]


def compare(op: Any, got: Sequence[Tensor], values: Sequence[Any]) -> None:
    """Raise `Miss` unless each element is near the reference, plain or computed in double."""
    plain, wide = expect(op, values)
    if len(got) != len(plain):
        raise Miss(f"{len(got)} tensors, the reference gives {len(plain)}")
    for i, (mine, a, b) in enumerate(zip(got, plain, wide, strict=True)):
        label = f"result {i}" if len(got) > 1 else "the result"
        if mine.dtype != a.dtype:
            raise Miss(f"{label} is {mine.dtype}, the reference gives {a.dtype}")
        if mine.shape != a.shape:
            raise Miss(
                f"{label} has shape {tuple(mine.shape)}, the reference gives {tuple(a.shape)}"
            )
        rtol, atol = limits(op, mine.dtype)
        near = _near(mine, a, rtol, atol) | _near(mine, b.to(a.device), rtol, atol)
        if not bool(near.all()):
            raise Miss(_describe(label, mine, b, near))


def _near(mine: Tensor, theirs: Tensor, rtol: float, atol: float) -> Tensor:
    if mine.dtype.is_floating_point or mine.dtype.is_complex:
        return torch.isclose(mine, theirs, rtol=rtol, atol=atol, equal_nan=True)
    return mine == theirs


def _describe(label: str, mine: Tensor, theirs: Tensor, near: Tensor) -> str:
    """Where results differ; a wrong end of the array is called that."""
    wrong = (~near).reshape(-1).nonzero().reshape(-1)
    total, first, last = near.numel(), int(wrong[0]), int(wrong[-1])
    place = tuple(int(i) for i in torch.unravel_index(wrong[0], near.shape)) if near.ndim else ()
    got, want = mine.reshape(-1)[first].item(), theirs.reshape(-1)[first].item()
    text = f"{label} differs in {len(wrong)} of {total} elements, first at {place}: "
    text += f"{got} instead of {want}"
    if total > 16 and last == total - 1 and len(wrong) == total - first and 2 * first > total:
        text += f"; {TAIL}: elements 0 to {first - 1} agree, the rest do not"
    return text


def compare_fake(op: Any, real: Sequence[Tensor], values: Sequence[Any]) -> None:
    """Raise `Miss` unless the fake's results look as the real ones do, and are new tensors."""
    mode = _torch.fake_mode_of(())
    leaves, tree = _torch.flatten(clone(list(values)))
    leaves = [_torch.fake_of(mode, v) if isinstance(v, Tensor) else v for v in leaves]
    fakes = _torch.unflatten(leaves, tree)
    try:
        with mode:
            results = flat(schemas.call(op.parsed, op.overload, fakes))
    except Exception as error:
        raise Miss(f"the fake raised {first_line(error)}") from error
    inputs = named(op, fakes)
    for i, fake in enumerate(results):
        label = f"result {i}" if len(results) > 1 else "its result"
        for name, tensor in inputs:
            if _torch.is_alias(fake, tensor):
                raise Miss(
                    f"the fake returns an alias: {label} shares memory with input {name!r}; "
                    f"return a new tensor, such as torch.empty_like({name})"
                )
        _same_form(label, fake, real[i])


def _same_form(label: str, fake: Tensor, real: Tensor) -> None:
    if fake.dtype != real.dtype:
        raise Miss(f"the fake has the wrong dtype: {label} is {fake.dtype}, really {real.dtype}")
    if fake.device.type != real.device.type:
        raise Miss(
            f"the fake has the wrong device: {label} is on {fake.device}, really {real.device}"
        )
    if fake.ndim != real.ndim or any(
        isinstance(f, int) and f != r for f, r in zip(fake.shape, real.shape, strict=True)
    ):
        raise Miss(
            f"the fake has the wrong shape: {label} is {tuple(fake.shape)}, "
            f"really {tuple(real.shape)}"
        )
    matter = [d for d in range(real.ndim) if real.shape[d] > 1] if real.numel() else []
    if all(isinstance(s, int) for s in fake.stride()) and any(
        fake.stride(d) != real.stride(d) for d in matter
    ):
        raise Miss(
            f"the fake has the wrong stride: {label} has {fake.stride()}, really {real.stride()}; "
            f"write @op.fake for it, or make both .contiguous()"
        )


def named(op: Any, values: Sequence[Any]) -> list[tuple[str, Tensor]]:
    """The tensors among the arguments, each with its parameter's name."""
    pairs = zip(op.parsed.arguments, values, strict=True)
    return [(a.name, tensor) for a, value in pairs for tensor in flat(value)]


def check_inputs(op: Any, before: Sequence[Any], after: Sequence[Any], results: Any) -> None:
    """Raise `Miss` when a call wrote an input that it does not declare, or returned one."""
    writes = schemas.written(op.parsed)
    for (name, old), (_, new) in zip(named(op, before), named(op, after), strict=True):
        if name not in writes and not torch.equal(*_bits(old, new)):
            raise Miss(
                f"the kernel writes its input {name!r}, which the schema does not declare; write "
                f"a new tensor, or declare mutates=({name!r},)"
            )
        for result in flat(results):
            if _torch.is_alias(result, new):
                raise Miss(
                    f"the kernel returns an alias of its input {name!r}; return a new tensor"
                )


def _bits(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    if old.dtype.is_floating_point or old.dtype.is_complex:
        return old.nan_to_num(nan=12345.0), new.nan_to_num(nan=12345.0)
    return old, new
