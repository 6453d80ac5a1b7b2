"""Whether a state dict fits a program."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from torchgraft.errors import WeightMismatch


def check_weights(
    held: Mapping[str, Tensor], new: Mapping[str, Tensor], *, extra: bool = False
) -> None:
    """Raise `WeightMismatch`, with everything that is wrong, where new weights do not fit.

    Types are compared, not values; with `extra`, there may be more of them.
    """
    problems = [f"missing: {name}" for name in held.keys() - new.keys()]
    if not extra:
        problems += [f"not in the program: {name}" for name in new.keys() - held.keys()]
    for name in held.keys() & new.keys():
        one, two = held[name], new[name]
        if not isinstance(two, Tensor):
            problems.append(f"{name}: {type(two).__name__}, not a tensor")
        elif two.layout != one.layout:
            problems.append(f"{name}: layout {two.layout} for {one.layout}")
        elif two.is_meta:
            problems.append(f"{name}: it has no values (device meta)")
        elif one.shape != two.shape or one.dtype != two.dtype:
            problems.append(
                f"{name}: {two.dtype} {tuple(two.shape)} for {one.dtype} {tuple(one.shape)}"
            )
    if problems:
        raise WeightMismatch(sorted(problems))
