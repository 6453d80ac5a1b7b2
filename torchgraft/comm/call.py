"""The collectives of a plan as what their launches call: a group by name, a start, a wait."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

import torchgraft.comm.peer  # noqa: F401 (declares what a plan may launch)
from torchgraft import _torch
from torchgraft._torch import groups
from torchgraft.comm.agree import Frame, Guard, said
from torchgraft.comm.group import find
from torchgraft.errors import GraftError, WrongGroup
from torchgraft.plan import Collective, Plan, PlanStep
from torchgraft.run.host import Kernel


@contextlib.contextmanager
def told(plan: Plan) -> Iterator[None]:
    """Let the other ranks know where a plan is refused in the block: they wait for this one."""
    try:
        yield
    except Exception as error:
        if plan.collectives:
            Guard(plan).refuse(error)
        raise


def bind(
    plan: Plan, kernels: Mapping[str, Kernel], frame: Frame | None = None
) -> tuple[Plan, dict[str, Kernel], Callable[[_torch.Flat], _torch.Flat]]:
    """The plan with a kernel of its own for each collective, and what to put around the function
    that runs it: before the first collective, the ranks must agree."""
    bound, steps, guard = dict(kernels), list[PlanStep](), Guard(plan, frame)
    for number, step in enumerate(plan.steps):
        if isinstance(step, Collective):
            call = Call(kernels[step.kernel].fn, step, number, guard)
            step = dataclasses.replace(step, kernel=f"{step.kernel} {number}")
            bound[step.kernel] = Kernel(call)
        steps.append(step)

    def guarded(run: _torch.Flat) -> _torch.Flat:
        def agreed(args: list[Any]) -> Any:
            guard.enter()
            return run(args)

        return agreed

    return dataclasses.replace(plan, steps=tuple(steps)), bound, guarded


class Call:
    """One collective. Over when its result is there, on CUDA as far as its stream is concerned."""

    def __init__(self, op: Callable[..., Any], step: Collective, number: int, guard: Guard) -> None:
        self._op, self._step, self._number, self._guard = op, step, number, guard
        self._group: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self._step
        if self._group is None or not groups.is_group_alive(self._group):
            self._group = self._found(args)
        if step.nbytes is None:
            self._guard.same_sizes(self._number, args)
        try:
            result = self._op(*args[:-1], groups.group_name(self._group), **kwargs)
            return _waited(result)
        except GraftError:
            raise
        except Exception as error:
            raise self._guard.failed(self._number, self._group, error) from error

    def _found(self, args: tuple[Any, ...]) -> Any:
        """The group, which must have as many ranks as the program was compiled for."""
        step = self._step
        group = find(step.group, said(step), step.line)
        for given, argument in zip(args, self._op._schema.arguments, strict=False):  # type: ignore[attr-defined]
            if argument.name == "group_size" and given != group.size():
                raise WrongGroup(said(step), step.line, step.group, given, group.size())
        return group


def _waited(result: Any) -> Any:
    if isinstance(result, Tensor):
        return groups.wait_tensor(result)
    return [groups.wait_tensor(one) for one in result]
