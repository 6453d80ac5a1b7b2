"""The call of a compiled program: check the inputs, run, give the outputs their structure.

The usual call (the declared tensors, as declared) takes a function generated for the signature:
a few attribute reads, or one call of C++ where that is built, then the program. Everything else
(keyword or nested inputs, other strides, inputs that require grad, a mismatch) takes `Call.slow`,
which is plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from torchgraft import _torch
from torchgraft.errors import InputMismatch
from torchgraft.run.host import define
from torchgraft.signature import Signature, TensorSpec, entangled, tensors


class Call:
    """One signature bound to its program.

    `views` are the outputs that are an input or views of one, with the input's number among the
    tensors: each makes its output from that input.
    """

    def __init__(
        self,
        signature: Signature,
        run: _torch.Flat,
        states: Sequence[Tensor],
        views: Mapping[int, tuple[int, Callable[..., Tensor]]] = MappingProxyType({}),
    ) -> None:
        self.signature, self.run, self.states = signature, run, tuple(states)
        self.views = views

    def slow(self, leaves: Sequence[Any]) -> Any:
        """Run on leaves that fit the signature; strides are adapted, gradients are not recorded."""
        specs = [spec for _, spec in tensors(self.signature.specs)]
        given = [leaves[i] for i, _ in tensors(self.signature.specs)]
        for leaf, spec in zip(given, specs, strict=True):
            if spec.mutated and leaf.is_leaf and leaf.requires_grad and torch.is_grad_enabled():
                raise InputMismatch(
                    spec.name,
                    "a tensor that the program may write to",
                    "a leaf that requires grad",
                    f"Call it under torch.no_grad(), or pass {spec.name}.detach().",
                )
        owners, given = given, [leaf.detach() for leaf in given]
        fitted = [restride(leaf, spec) for leaf, spec in zip(given, specs, strict=True)]
        copied = [used is not leaf for leaf, used in zip(given, fitted, strict=True)]
        with torch.no_grad(), _torch.no_autocast():
            outputs = list(self.run([*fitted, *self.states]))
            for leaf, used, spec in zip(given, fitted, specs, strict=True):
                if spec.mutated and used is not leaf:
                    leaf.copy_(used)
            for output, (i, view) in self.views.items():
                if copied[i]:  # of what the caller has, not of its copy
                    outputs[output] = view(*given)
        known = {id(leaf): owner for leaf, owner in zip(given, owners, strict=True)}
        outputs = [known.get(id(output), output) for output in outputs]  # an input is itself
        return _torch.unflatten(outputs, self.signature.out_tree)


def restride(leaf: Tensor, spec: TensorSpec) -> Tensor:
    """The tensor in the memory layout that a program was compiled for."""
    if spec.layout != torch.strided:
        return leaf
    leaf = leaf.resolve_conj().resolve_neg()
    if spec.stride is None:
        return leaf.contiguous(memory_format=spec.format)
    if leaf.stride() == spec.stride:
        return leaf
    fitted = torch.empty_strided(leaf.shape, spec.stride, dtype=leaf.dtype, device=leaf.device)
    return fitted.copy_(leaf)


Check = Callable[[tuple[Any, ...]], bool]
"""Whether a call's arguments are plain tensors as declared, and no mode changes what they do."""


def make(calls: Sequence[Call], native: Callable[..., Check] | None = None) -> Callable[..., Any]:
    """A callable for one or several signatures (gears) of one program. `native` makes checks in
    C++ of dtypes, devices, sizes (-1: any), strides (None: contiguous in a format) and formats."""

    signatures = [call.signature for call in calls]

    def slow(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index, leaves = fit(signatures, args, kwargs)
        return calls[index].slow(leaves)

    return _fast(calls, slow, native) or (lambda *args, **kwargs: slow(args, kwargs))


def fit(
    signatures: Sequence[Signature], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, list[Any]]:
    """Which signature a call fits, and its leaves; raises `InputMismatch` when none."""
    if _torch.in_functorch():
        raise InputMismatch(
            "arguments",
            "a plain call",
            "one inside torch.func (grad, vmap, jvp)",
            "Transform the model first, and give that to torch.compile(backend='torchgraft').",
        )
    error: InputMismatch | None = None
    for i, signature in enumerate(signatures):
        flat, tree = _torch.flatten((args, kwargs))
        same = tree == signature.tree
        leaves = flat if same else _torch.flatten_like(signature.tree, (args, kwargs))
        if leaves is None:
            raise InputMismatch(
                "arguments",
                f"a call like {_torch.show_tree(signature.tree)}",
                _torch.show_tree(tree),
                "Call it with the same positional, keyword and nested arguments as declared.",
            )
        error = signature.misfit(leaves)
        if error is None:
            return i, leaves
    assert error is not None
    if len(signatures) == 1 or not error.is_size:
        raise error
    gears = "; ".join(
        ", ".join(f"{spec.name} {spec}" for _, spec in tensors(signature.specs))
        for signature in signatures
    )
    raise InputMismatch(
        error.name,
        f"one of the gears ({gears})",
        error.got,
        "Add that shape to gears=[...] of its graft.Input, or pad it to one of them.",
    )


def _fast(
    calls: Sequence[Call], slow: Callable[..., Any], native: Callable[..., Check] | None
) -> Callable[..., Any] | None:
    """The generated call, where the inputs of every signature are a plain row of tensors."""
    count = len(calls[0].signature.specs)
    if not all(_torch.is_row(call.signature.tree, count) for call in calls):
        return None
    scope: dict[str, Any] = {
        "Tensor": Tensor,
        "slow": slow,
        "autocast": _torch.any_autocast,
        "transform": _torch.in_functorch,
        "evaluate": _torch.evaluate,
    }
    names = [f"x{i}" for i in range(count)]
    around = "" if native else " or autocast() or transform()"
    lines = [
        "def call(*args, **kwargs):",
        f"    if kwargs or len(args) != {count}{around}:",
        "        return slow(args, kwargs)",
        f"    {', '.join(names)}, = args" if names else "    pass",
    ]
    for i, call in enumerate(calls):
        checks = _checks(f"_{i}", call.signature, names, scope, native)
        if checks is None:
            return None
        scope |= {f"run_{i}": call.run, f"states_{i}": call.states}
        inputs = ", ".join([*names, *([f"*states_{i}"] if call.states else [])])
        lines += [
            "    try:",
            f"        fits = {' and '.join(checks) or 'True'}",
            "    except RuntimeError:",  # a nested tensor has no shape
            "        fits = False",
            "    if fits:",
            "        args = None",  # only the program holds the inputs, so that it can free them
            f"        return {_result(call, scope, f'run_{i}([{inputs}])', f'tree_{i}')}",
        ]
    lines.append("    return slow(args, kwargs)")
    fast: Callable[..., Any] = define("call", "\n".join(lines) + "\n", scope)
    return fast


def _checks(
    tag: str,
    signature: Signature,
    names: Sequence[str],
    scope: dict[str, Any],
    native: Callable[..., Check] | None,
) -> list[str] | None:
    """Conditions under which the arguments are just as declared; None where that takes more."""
    checks: list[str] = []
    bound: dict[str, str] = {}
    specs = [spec for spec in signature.specs if isinstance(spec, TensorSpec)]
    if len(specs) < len(names) or any(spec.layout != torch.strided for spec in specs):
        return None
    if native is not None:
        scope[f"plain{tag}"] = native([_plain(spec) for spec in specs])
        checks.append(f"plain{tag}(args)")
    for i, (name, spec) in enumerate(zip(names, specs, strict=True)):
        sizes = _size_checks(spec.shape, f"{name}.shape", f"{tag}_{i}", signature, bound, scope)
        if sizes is None:
            return None
        if native is None:
            scope |= {f"dtype{tag}_{i}": spec.dtype, f"device{tag}_{i}": spec.device}
            checks += [f"type({name}) is Tensor", *sizes, *_tensor_checks(spec, name, f"{tag}_{i}")]
        elif not all(isinstance(size, int) for size in spec.shape):
            checks += sizes
    if signature.written and len(names) > 1:
        scope["entangled"] = entangled
        checks.append(f"not entangled(({', '.join(names)}), {signature.written})")
    symbols = ", ".join(f"({symbol!r}, {name})" for symbol, name in bound.items())
    for k, (condition, _) in enumerate(signature.guards):
        scope[f"guard{tag}_{k}"] = condition
        checks.append(f"evaluate(guard{tag}_{k}, ({symbols},))")
    return checks


def _plain(spec: TensorSpec) -> tuple[Any, ...]:
    """A tensor's declaration as C++ takes it."""
    sizes = [size if isinstance(size, int) else -1 for size in spec.shape]
    return spec.dtype, spec.device, sizes, spec.stride, spec.format


def _tensor_checks(spec: TensorSpec, name: str, tag: str) -> list[str]:
    """Conditions on a tensor of the declared shape."""
    checks = [f"{name}.dtype is dtype{tag}"]
    on_cpu = spec.device.type == "cpu"
    checks.append(f"{name}.is_cpu" if on_cpu else f"{name}.device == device{tag}")
    checks.append(f"not {name}.requires_grad")
    if spec.stride is None:
        layout = "" if spec.format is torch.contiguous_format else f"memory_format={spec.format}"
        checks.append(f"{name}.is_contiguous({layout})")
    else:
        checks.append(f"{name}.stride() == {spec.stride}")
    if spec.dtype.is_complex:
        checks.append(f"not {name}.is_conj()")
    elif spec.stride is not None or all(size in (0, 1) for size in spec.shape):
        checks.append(f"not {name}.is_neg()")  # the imaginary part of a conjugate
    return checks


def _size_checks(
    shape: tuple[Any, ...],
    given: str,
    tag: str,
    signature: Signature,
    bound: dict[str, str],
    scope: dict[str, Any],
) -> list[str] | None:
    """Conditions on one shape; a symbol is bound to a variable where it first occurs."""
    if all(isinstance(size, int) for size in shape):
        scope[f"shape{tag}"] = torch.Size(shape)
        return [f"{given} == shape{tag}"]
    checks = [f"len(h{tag} := {given}) == {len(shape)}"]
    for dim, size in enumerate(shape):
        part = f"h{tag}[{dim}]"
        if isinstance(size, int):
            checks.append(f"{part} == {size}")
        elif str(size) in bound:
            checks.append(f"{part} == {bound[str(size)]}")
        elif str(size) in signature.ranges:
            bound[str(size)] = variable = f"s{tag}_{dim}"
            low, high = signature.ranges[str(size)]
            upper = "" if high is None else f" <= {high}"
            checks.append(f"{low} <= ({variable} := {part}){upper}")
        else:
            return None
    return checks


def _result(call: Call, scope: dict[str, Any], flat: str, name: str) -> str:
    tree = call.signature.out_tree
    if tree.is_leaf():
        return f"{flat}[0]"
    if tree.type is tuple and all(child.is_leaf() for child in tree.children()):
        return f"tuple({flat})"
    scope |= {"unflatten": _torch.unflatten, name: tree}
    return f"unflatten({flat}, {name})"
