"""Whether collectives may be part of a captured CUDA graph."""

from __future__ import annotations

import torch

from torchgraft._torch import groups
from torchgraft.comm.agree import said
from torchgraft.comm.group import find
from torchgraft.plan import Plan

LEAST_NCCL = (2, 9, 6)
"""The first NCCL whose collectives can be captured."""


def refusal(plan: Plan) -> str | None:
    """Why the plan's collectives cannot be captured (None: they can). To be asked at the first
    call, when there are groups."""
    for step in plan.collectives:
        group = find(step.group, said(step), step.line)
        backend = groups.group_backend(group, torch.device("cuda"))
        if backend != "nccl":
            return f"{said(step)} goes through {backend}, and only NCCL can be captured"
        if step.nbytes is None:
            return f"the sizes of {said(step)} must be compared between the ranks at each call"
    if not plan.collectives:
        return None
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if version < LEAST_NCCL:
        return f"NCCL {_dotted(version)} cannot be captured, {_dotted(LEAST_NCCL)} can"
    return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
