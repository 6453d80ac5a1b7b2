"""The surfaces of torch that an operator must work on, each as one small proof."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from torchgraft.op import schema as schemas
from torchgraft.op.compare import Miss, compare, flat, outcome, seed, written_of
from torchgraft.op.samples import Case, clone

Function = Callable[..., Any]


class NotApplicable(Exception):
    """Why a surface says nothing about an operator."""


class Probe:
    """An operator and one sample to try it with, as functions of the sample's tensors alone."""

    def __init__(self, op: Any, device: str, cases: Sequence[Case]) -> None:
        self.op, self.device, self.cases = op, device, cases
        self.values = cases[0].values
        self.writes = bool(schemas.written(op.parsed))

    def double(self) -> list[Any]:
        """The first sample in float64, which finite differences need."""
        found = [c.values for c in self.cases if c.dtype == torch.float64]
        if not found or not any(t.is_floating_point() for t in flat(found[0])):
            raise NotApplicable("no sample in float64")
        return found[0]

    def function(self, fn: Function, values: Sequence[Any], copies: bool = False) -> Function:
        """`fn` of the tensors among the values, the other values fixed. With `copies` it is run on
        copies, and what it writes to them is part of the result: gradients go through those."""
        parsed, copies = self.op.parsed, copies and self.writes

        def run(*tensors: Tensor) -> Any:
            given = iter([tensor.clone() for tensor in tensors] if copies else tensors)
            mine = [_refill(value, given) for value in values]
            result = schemas.call(parsed, fn, mine)
            return [result, written_of(self.op, mine)] if copies else result

        # Dynamo counts recompilations by code object; this one is a program of its own.
        run.__code__ = run.__code__.replace(co_name=f"run_{id(run)}")
        return run


def _refill(value: Any, given: Any) -> Any:
    if isinstance(value, Tensor):
        return next(given)
    if isinstance(value, (list, tuple)):
        return [_refill(item, given) for item in value]
    return value


def _leaves(values: Sequence[Any]) -> list[Tensor]:
    """Copies of the tensors, those that can be differentiated watched by autograd."""
    return [t.requires_grad_() if t.is_floating_point() else t for t in flat(clone(values))]


def _total(result: Any) -> Tensor:
    """One number that depends on every floating-point result, and on each element differently."""
    total: Any = 0.0
    for tensor in flat(result):
        if tensor.is_floating_point():
            weights = torch.arange(1, tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
            total = total + (tensor * weights.reshape(tensor.shape).sin()).sum()
    if not isinstance(total, Tensor):
        raise NotApplicable("no floating-point result")
    return total


def _gradients(run: Function, leaves: list[Tensor]) -> list[Tensor | None]:
    total = _total(run(*leaves))
    if not total.requires_grad:
        raise NotApplicable("the reference has no gradient")
    wrt = [leaf for leaf in leaves if leaf.requires_grad]
    return list(torch.autograd.grad(total, wrt, allow_unused=True))


def _same_gradients(
    probe: Probe, values: Sequence[Any], got: Sequence[Tensor | None], want: Sequence[Any]
) -> None:
    arguments = zip(probe.op.parsed.arguments, values, strict=True)
    names = [a.name for a, value in arguments for t in flat(value) if t.is_floating_point()]
    for name, mine, theirs in zip(names, got, want, strict=True):
        if mine is None and theirs is None:
            continue
        like: Any = mine if theirs is None else theirs
        a, b = (torch.zeros_like(like) if t is None else t for t in (mine, theirs))
        if not torch.allclose(a, b, rtol=1e-5, atol=1e-8, equal_nan=True):
            raise Miss(_gradient_reason(name, a, b))


def _gradient_reason(name: str, mine: Tensor, theirs: Tensor) -> str:
    ratio = (mine / theirs)[theirs.abs() > 1e-9]
    if ratio.numel() and torch.allclose(ratio, ratio[0].expand_as(ratio), rtol=1e-4):
        return (
            f"the gradient of {name!r} has the wrong scale: it is {ratio[0].item():.4g} times "
            f"that of the reference"
        )
    worst = (mine - theirs).abs().max().item()
    return f"the gradient of {name!r} is not that of the reference: up to {worst:.3g} away"


def gradient(probe: Probe) -> None:
    values = probe.double()
    both = (probe.op.overload, probe.op.reference)
    run, reference = (probe.function(fn, values, copies=True) for fn in both)
    want = _gradients(reference, _leaves(values))
    _same_gradients(probe, values, _gradients(run, _leaves(values)), want)
    if not torch.autograd.gradcheck(
        lambda *t: _total(run(*t)), _leaves(values), fast_mode=True, raise_exception=False
    ):
        raise Miss("gradcheck: the gradient is not that of finite differences")


def double_backward(probe: Probe) -> None:
    if probe.writes:
        raise NotApplicable("it writes its input")
    values = probe.double()
    leaves = _leaves(values)
    _gradients(probe.function(probe.op.reference, values), _leaves(values))
    run = probe.function(probe.op.overload, values)
    torch.autograd.gradgradcheck(lambda *t: _total(run(*t)), leaves, fast_mode=True)


def func_grad(probe: Probe) -> None:
    if probe.writes:
        raise NotApplicable("it writes its input")
    values = probe.double()
    _gradients(probe.function(probe.op.reference, values), _leaves(values))
    tensors = flat(clone(values))
    wrt = tuple(i for i, t in enumerate(tensors) if t.is_floating_point())
    found = [
        torch.func.grad(lambda *t, run=run: _total(run(*t)), argnums=wrt)(*tensors)
        for run in (probe.function(f, values) for f in (probe.op.overload, probe.op.reference))
    ]
    _same_gradients(probe, values, *found)


def vmap(probe: Probe) -> None:
    if probe.writes:
        raise NotApplicable("it writes its input")
    values = probe.values
    tensors = flat(clone(values))
    if not tensors:
        raise NotApplicable("no tensors")
    batches = [torch.stack([t, t.flip(0) if t.ndim else t]) for t in tensors]
    try:
        batched = flat(torch.vmap(probe.function(probe.op.overload, values))(*batches))
    except RuntimeError as error:
        if "randomness error mode" in str(error):
            raise NotApplicable("it draws random numbers") from error
        raise
    run = probe.function(probe.op.reference, values)
    single = [flat(run(*(b[i] for b in batches))) for i in range(2)]
    for got, a, b in zip(batched, *single, strict=True):
        torch.testing.assert_close(got, torch.stack([a, b]), equal_nan=True)


def meta(probe: Probe) -> None:
    real = outcome(probe.op, probe.op.overload, probe.values)
    kind = [_to_meta(value) for value in probe.values]
    results = flat(schemas.call(probe.op.parsed, probe.op.overload, kind))
    for got, want in zip(results, real, strict=False):
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            raise Miss(f"{tuple(got.shape)} {got.dtype}, really {tuple(want.shape)} {want.dtype}")


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    return [_to_meta(v) for v in value] if isinstance(value, (list, tuple)) else value


def _forward(probe: Probe, program: Function) -> None:
    """Raise unless a program of the sample's tensors gives what the reference gives."""
    mine = clone(probe.values)
    seed()
    with torch.no_grad():
        results = flat(program(*flat(mine)))
    compare(probe.op, [*results, *written_of(probe.op, mine)], probe.values)


class _Module(torch.nn.Module):
    def __init__(self, run: Function) -> None:
        super().__init__()
        self.run = run

    def forward(self, *tensors: Tensor) -> Any:
        return self.run(*tensors)


_OPCHECKS = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
_REGISTRATION = "test_autograd_registration"  # torch has it for these devices only
_HAVE_REGISTRATION = {"cpu", "cuda", "xpu"}


def opcheck(probe: Probe) -> None:
    op = probe.op
    registered = torch.device(probe.device).type in _HAVE_REGISTRATION
    checks = _OPCHECKS + [_REGISTRATION] * registered
    for values in [probe.values, *([] if probe.writes else [_watched(probe.values)])]:
        args = [v for v, a in zip(values, op.parsed.arguments, strict=True) if not a.kwarg_only]
        kwargs = {
            a.name: v for v, a in zip(values, op.parsed.arguments, strict=True) if a.kwarg_only
        }
        torch.library.opcheck(op.overload, tuple(args), kwargs, test_utils=checks)


def _watched(values: Sequence[Any]) -> list[Any]:
    given = iter(_leaves(values))
    return [_refill(value, given) for value in values]


def compiled(probe: Probe) -> None:
    run = probe.function(probe.op.overload, probe.values)
    _forward(probe, torch.compile(run, backend="aot_eager", fullgraph=True))
    try:
        values = probe.double()
        reference = probe.function(probe.op.reference, values, copies=True)
        want = _gradients(reference, _leaves(values))
    except NotApplicable:
        return
    run = torch.compile(
        probe.function(probe.op.overload, values, copies=True), backend="aot_eager", fullgraph=True
    )
    _same_gradients(probe, values, _gradients(run, _leaves(values)), want)


def exported(probe: Probe) -> None:
    module = _Module(probe.function(probe.op.overload, probe.values))
    program = torch.export.export(module, tuple(flat(clone(probe.values))))
    names = {str(node.target) for node in program.graph.nodes}
    if str(probe.op.overload) not in names:
        raise Miss(f"the exported program does not call it; it calls {', '.join(sorted(names))}")
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    _forward(probe, torch.export.load(file).module())


def traced(probe: Probe) -> None:
    if not probe.op.parsed.returns:
        raise NotApplicable("it returns nothing, and a trace is of results")
    if any(isinstance(value, torch.device) for value in probe.values):
        raise NotApplicable("torch.jit.trace takes no device")
    run = probe.function(probe.op.overload, probe.values)
    trace: Any = torch.jit.trace
    _forward(probe, _through_file(trace(run, tuple(flat(clone(probe.values))), check_trace=False)))


def scripted(probe: Probe) -> None:
    params = ", ".join(f"{a.name}: {_script_type(a)}" for a in probe.op.parsed.arguments)
    space, base = probe.op.name.split("::")
    names = ", ".join(
        f"{a.name}={a.name}" if a.kwarg_only else a.name for a in probe.op.parsed.arguments
    )
    text = f"def call({params}):\n    return torch.ops.{space}.{base.partition('.')[0]}({names})\n"
    script = _through_file(torch.jit.CompilationUnit(text).call)
    mine = clone(probe.values)
    seed()
    with torch.no_grad():
        results = flat(script(*mine))
    compare(probe.op, [*results, *written_of(probe.op, mine)], probe.values)


def _script_type(argument: Any) -> str:
    return str(argument.type).replace("number", "float").replace("Device", "torch.device")


def _through_file(script: Any) -> Any:
    file, load = io.BytesIO(), cast(Any, torch.jit.load)
    torch.jit.save(script, file)
    file.seek(0)
    return load(file)


def grafted(probe: Probe) -> None:
    from torchgraft.compile import compile

    if not flat(probe.values):
        raise NotApplicable("no tensors")
    module = _Module(probe.function(probe.op.overload, probe.values))
    program = compile(module, tuple(flat(clone(probe.values))), mode="eager")
    _forward(probe, program)
    base = probe.op.name.replace("::", ".")
    # One that writes is launched inside a wrapper that writes copies.
    if not probe.writes and not any(node.op.startswith(base) for node in program.report.nodes):
        raise Miss("it is not launched as itself")


SURFACES: dict[str, Callable[[Probe], None]] = {
    "opcheck": opcheck,
    "gradient": gradient,
    "double backward": double_backward,
    "func.grad": func_grad,
    "vmap": vmap,
    "meta": meta,
    "compile": compiled,
    "export, saved": exported,
    "jit.trace, saved": traced,
    "jit.script, saved": scripted,
    "graft.compile": grafted,
}
