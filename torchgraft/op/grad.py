"""The gradient of an operator: the author's, or that of the reference body."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchgraft import _torch
from torchgraft._torch import calls
from torchgraft.errors import BadGradient, BadOp, SignatureMismatch
from torchgraft.op import schema as schemas

Values = list[Any]


@dataclasses.dataclass(frozen=True)
class Backward:
    """An author's backward, and the names of what is saved for it."""

    fn: Callable[..., Any]
    save: tuple[str, ...]


@dataclasses.dataclass
class Call:
    """What a call leaves for its backward besides tensors: everything by its place, tensors as
    the number under which they were saved."""

    layout: Any = None  # of the parameters
    results: Any = None  # of the results
    written: Sequence[int] = ()  # the slots of tensors that it writes
    before: dict[int, Tensor] = dataclasses.field(default_factory=dict)  # their values until then


_MOST_SEEN = 1000
"""Arguments that an operator remembers; with others it is watched each time."""


class Slot(int):
    """The number of a tensor among those that autograd was shown."""


def _take(value: Any, tensors: list[Tensor]) -> Any:
    """The layout of a value: each tensor moved to `tensors`, its number in its place."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return Slot(len(tensors) - 1)
    if isinstance(value, (list, tuple)):
        return [_take(item, tensors) for item in value]
    return value


def _put(layout: Any, tensors: Sequence[Any]) -> Any:
    """The value that a layout is of."""
    if isinstance(layout, Slot):
        return tensors[layout]
    if isinstance(layout, list):
        return [_put(item, tensors) for item in layout]
    return layout


def _flat(value: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    _take(value, tensors)
    return tensors


def _slots(layout: Any) -> list[Slot]:
    if isinstance(layout, list):
        return [slot for item in layout for slot in _slots(item)]
    return [layout] if isinstance(layout, Slot) else []


def _differentiable(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def autograd_kernel(op: Any) -> Callable[..., Any]:
    """What the dispatcher calls for tensors that autograd may watch."""
    overload, name, schema = op.overload, op.name, op.parsed
    grad_enabled, any_requires_grad = torch.is_grad_enabled, _torch.any_requires_grad
    below, forward_mode = _torch.below_autograd, _torch.in_forward_mode
    writes = schemas.written(schema)
    node = _writing_node(op) if writes else _node(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if forward_mode():
            return op.reference(*args, **kwargs)  # its operators carry the tangents
        if grad_enabled() and any_requires_grad(*args, **kwargs):
            return _differentiate(op, node, args, kwargs)
        with below():
            return overload(*args, **kwargs)

    def writing(*args: Any, **kwargs: Any) -> Any:
        if forward_mode() or (_torch.in_functorch() and any_requires_grad(*args, **kwargs)):
            raise BadOp(
                name,
                op.where,
                f"it writes {', '.join(writes)}, and torch.func derives nothing through a write.",
                "Declare a form that returns a new tensor.",
            )
        values = zip(schema.arguments, schemas.bind(schema, args, kwargs), strict=True)
        tensors = _flat([value for argument, value in values if argument.name in writes])
        if grad_enabled() and any_requires_grad(*args, **kwargs):
            if any(tensor.is_leaf and tensor.requires_grad for tensor in tensors):
                raise BadOp(
                    name,
                    op.where,
                    f"it writes {', '.join(writes)}, here a leaf that needs a gradient.",
                    "Call it under torch.no_grad(), or on a copy.",
                )
            return _differentiate(op, node, args, kwargs)
        with below():
            result = overload(*args, **kwargs)
        for tensor in tensors:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        return result

    return writing if writes else kernel


def _differentiate(op: Any, node: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors: list[Tensor] = []
    call = Call(_take(schemas.bind(op.parsed, args, kwargs), tensors))
    if _torch.in_functorch():
        with _torch.one_level():
            outputs = node.apply(call, *tensors)
    else:
        outputs = node.apply(call, *tensors)
    result = _put(call.results, outputs)
    if not result:
        return None
    return result[0] if len(result) == 1 else tuple(result)


def _node(op: Any) -> Any:
    """The autograd node of an operator's calls."""
    schema = op.parsed

    def forward(call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        with _torch.below_autograd():
            result = schemas.call(schema, op.overload, _put(call.layout, tensors))
        flat: list[Tensor] = []
        call.results = _take([result] if len(schema.returns) == 1 else list(result or ()), flat)
        return tuple(flat)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, tensors = inputs[0], inputs[1:]
        if whole := [t for t in output if not _differentiable(t)]:
            ctx.mark_non_differentiable(*whole)
        if op.gradient is None:
            ctx.save_for_backward(*tensors)
            return
        ctx.shapes = [t.shape for t in tensors]
        ctx.keep = _saved(op, ctx.call, len(tensors))
        ctx.save_for_backward(*((*tensors, *output)[i] for i in ctx.keep))

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[1:]
        if op.gradient is None:
            layout = ctx.call.layout

            def again(every: list[Any]) -> list[Tensor]:
                return _flat(schemas.call(schema, op.reference, _put(layout, every)))

            return None, *derive(op, layout, again, ctx.saved_tensors, needs, grads)
        saved = dict(zip(ctx.keep, ctx.saved_tensors, strict=True))
        return None, *_authored(op, ctx.call, saved, ctx.shapes, needs, grads)

    body: dict[str, Any] = {
        "forward": forward,
        "setup_context": setup_context,
        "backward": backward,
    }
    name = f"{op.name.replace('::', '_')}_backward"
    return type(name, (_torch.OneLevel,), {k: staticmethod(v) for k, v in body.items()})


def _writing_node(op: Any) -> Any:
    """The autograd node of calls that write: what they write is their results, too.

    The values before the write are kept, since the body is run again on them.
    """
    schema, writes = op.parsed, schemas.written(op.parsed)

    def forward(call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        places = zip(schema.arguments, call.layout, strict=True)
        call.written = [slot for a, layout in places if a.name in writes for slot in _slots(layout)]
        call.before = {slot: tensors[slot].detach().clone() for slot in call.written}
        with _torch.below_autograd():
            result = schemas.call(schema, op.overload, _put(call.layout, tensors))
        flat = [tensors[slot] for slot in call.written]
        returned = [result] if len(schema.returns) == 1 else list(result or ())
        call.results = _take(returned, flat)
        return tuple(flat)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, tensors = inputs[0], inputs[1:]
        ctx.mark_dirty(*output[: len(ctx.call.written)])
        if whole := [t for t in output if not _differentiable(t)]:
            ctx.mark_non_differentiable(*whole)
        ctx.save_for_backward(*(ctx.call.before.get(i, t) for i, t in enumerate(tensors)))
        ctx.call.before = {}

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise BadOp(
                op.name,
                op.where,
                f"it writes {', '.join(writes)}, and its gradient is not derived a second time.",
                "Declare a form that returns a new tensor.",
            )
        needs, layout, written = ctx.needs_input_grad[1:], ctx.call.layout, ctx.call.written

        def again(every: list[Any]) -> list[Tensor]:
            for slot in written:
                every[slot] = every[slot].clone()
            result = schemas.call(schema, op.reference, _put(layout, every))
            return [*(every[slot] for slot in written), *_flat(result)]

        return None, *derive(op, layout, again, ctx.saved_tensors, needs, grads)

    name = f"{op.name.replace('::', '_')}_backward"
    body: dict[str, Any] = {
        "forward": forward,
        "setup_context": setup_context,
        "backward": backward,
    }
    return type(name, (_torch.OneLevel,), {k: staticmethod(v) for k, v in body.items()})


def _refuse_random(op: Any, called: Any) -> None:
    if torch.Tag.nondeterministic_seeded in called.tags:
        raise BadOp(
            op.name,
            op.where,
            f"its body draws random numbers ({called}), so running it again gives no gradient.",
            f"Write @{op.name.partition('::')[2]}.backward, and save what it needs of the draw.",
        )


def derive(
    op: Any,
    layout: Any,
    rerun: Callable[[list[Any]], list[Tensor]],
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
    grads: Sequence[Any],
) -> list[Tensor | None]:
    """The gradients of the reference body, which is run again on the saved inputs.

    Plain torch operators do it, so it is differentiable again, and a compiler sees through it.
    """
    wrt = [i for i, need in enumerate(needs) if need]
    key = repr(layout)  # whether it draws may depend on what is no tensor

    def body(*chosen: Tensor) -> tuple[Tensor, ...]:
        every: list[Any] = list(tensors)
        for i, tensor in zip(wrt, chosen, strict=True):
            every[i] = tensor
        if key in op.repeats:
            found = rerun(every)
        else:
            with calls.seeing(partial(_refuse_random, op)):
                found = rerun(every)
            if len(op.repeats) < _MOST_SEEN:
                op.repeats.add(key)
        return tuple(out for out in found if _differentiable(out))

    result: list[Tensor | None] = [None] * len(tensors)
    chosen = [tensors[i] for i in wrt]
    known = [g for g in grads if g is not None and _differentiable(g)]
    found: Sequence[Tensor | None]
    if _torch.in_functorch():
        found = torch.func.vjp(body, *chosen)[1](tuple(known))
    else:
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            fresh = [
                t.view_as(t) if again and t.requires_grad else t.detach().requires_grad_()
                for t in chosen
            ]
            pairs = [(o, g) for o, g in zip(body(*fresh), known, strict=True) if o.requires_grad]
        outs, into = [o for o, _ in pairs], [g for _, g in pairs]
        found = (
            torch.autograd.grad(outs, fresh, into, create_graph=again, allow_unused=True)
            if outs
            else [None] * len(fresh)
        )
    for i, gradient in zip(wrt, found, strict=True):
        result[i] = gradient
    return result


def _names(op: Any) -> tuple[list[str], list[str]]:
    """The names of the parameters, and of the results: `out`, or `out0`, `out1`, …"""
    results = [r.name for r in op.parsed.returns]
    if len(results) == 1:
        results = [results[0] or "out"]
    return [a.name for a in op.parsed.arguments], [
        name or f"out{i}" for i, name in enumerate(results)
    ]


def _saved(op: Any, call: Call, inputs: int) -> list[int]:
    """Which of the inputs and outputs, counted through, are kept for the author's backward."""
    params, results = _names(op)
    keep: list[int] = []
    for name in op.gradient.save:
        if name in params:
            keep += _slots(call.layout[params.index(name)])
        else:
            keep += [slot + inputs for slot in _slots(call.results[results.index(name)])]
    return keep


def _authored(
    op: Any,
    call: Call,
    saved: dict[int, Tensor],
    shapes: list[Any],
    needs: Sequence[bool],
    grads: Sequence[Any],
) -> list[Any]:
    """The author's gradients, checked: as many as there are tensor parameters, of their shapes."""
    params, results = _names(op)
    count = len(shapes)
    every = [saved.get(i) for i in range(count + len(grads))]
    wanted = list(inspect.signature(op.gradient.fn).parameters)[len(results) :]
    values: dict[str, Any] = {}
    for name in wanted:
        if name in params:
            values[name] = _put(call.layout[params.index(name)], every)
        else:
            values[name] = _put(call.results[results.index(name)], every[count:])
    returned = op.gradient.fn(*_put(call.results, grads), **values)
    given = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    tensors = [a for a in op.parsed.arguments if schemas.is_tensor(a)]
    at = schemas.where(op.gradient.fn)
    if len(given) != len(tensors):
        names = ", ".join(a.name for a in tensors)
        raise BadGradient(
            op.name, at, f"it returned {len(given)} for {len(tensors)} tensor parameters ({names})"
        )
    flat: list[Any] = [None] * count
    for argument, gradient in zip(tensors, given, strict=True):
        _spread(op, at, argument.name, call.layout[params.index(argument.name)], gradient, flat)
    for i, (gradient, need) in enumerate(zip(flat, needs, strict=True)):
        if gradient is not None and need and gradient.shape != shapes[i]:
            name = next(a.name for a in tensors if i in _slots(call.layout[params.index(a.name)]))
            raise BadGradient(
                op.name,
                at,
                f"the gradient of {name!r} has shape {tuple(gradient.shape)}, "
                f"{name!r} has {tuple(shapes[i])}",
            )
    return [g if need else None for g, need in zip(flat, needs, strict=True)]


def _spread(op: Any, at: str, name: str, layout: Any, gradient: Any, flat: list[Any]) -> None:
    if gradient is None or layout is None:
        return
    if isinstance(layout, Slot):
        if not isinstance(gradient, Tensor):
            kind = type(gradient).__name__
            raise BadGradient(op.name, at, f"the gradient of {name!r} is a {kind}, not a tensor")
        flat[layout] = gradient
        return
    if not isinstance(gradient, (list, tuple)) or len(gradient) != len(layout):
        raise BadGradient(op.name, at, f"{name!r} is a list of {len(layout)}; so is its gradient")
    for item, one in zip(layout, gradient, strict=True):
        _spread(op, at, name, item, one, flat)


def check_backward(op: Any, fn: Callable[..., Any], save: Sequence[str]) -> Backward:
    """A backward as the operator can use it; raises when its parameters are not to be had."""
    if writes := schemas.written(op.parsed):
        raise BadOp(
            op.name,
            schemas.where(fn),
            f"it writes {', '.join(writes)}; its gradient is always derived from the body.",
            "Leave the backward out, or declare a form that returns a new tensor.",
        )
    params, results = _names(op)
    at, problems = schemas.where(fn), []
    have = list(inspect.signature(fn).parameters)
    tensors = {a.name for a in op.parsed.arguments if schemas.is_tensor(a)}
    for name in save:
        if name not in tensors and name not in results:
            known = ", ".join([*sorted(tensors), *results])
            problems.append(f"save= names {name!r}; a tensor to save is one of: {known}")
    if len(have) < len(results):
        problems.append(
            f"it takes ({', '.join(have)}), and there is one gradient for each of "
            f"{len(results)} results, first"
        )
    for name in have[len(results) :]:
        if name in save or (name in params and name not in tensors):
            continue
        if name in tensors or name in results:
            problems.append(f"it takes {name!r}, which is not in save={tuple(save)!r}")
        else:
            problems.append(f"it takes {name!r}, which is no parameter of the reference")
    if problems:
        against = f"its reference ({op.where})"
        raise SignatureMismatch(op.name, "the backward", at, against, problems)
    return Backward(fn, tuple(save))
