"""The call of a compiled program: check the inputs, run, give the outputs their structure.

The usual call (the declared tensors, as declared) takes a function generated for the signature:
a few attribute reads, then the program. Everything else (keyword or nested inputs, other strides,
inputs that require grad, a mismatch) takes `Call.slow`, which is plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgraft import _torch
from torchgraft.errors import InputMismatch
from torchgraft.inputs import Signature, TensorSpec, tensors
from torchgraft.run.host import define


class Call:
    """One signature bound to its program."""

    def __init__(self, signature: Signature, run: _torch.Flat, states: Sequence[Tensor]) -> None:
        self.signature, self.run, self.states = signature, run, tuple(states)

    def slow(self, leaves: Sequence[Any]) -> Any:
        """Run on leaves that fit the signature; strides are adapted, gradients are not recorded."""
        given = [leaves[i] for i, _ in tensors(self.signature.specs)]
        fitted = [
            _restride(leaf.detach(), spec)
            for leaf, (_, spec) in zip(given, tensors(self.signature.specs), strict=True)
        ]
        with torch.no_grad(), _torch.no_autocast():
            outputs = self.run([*fitted, *self.states])
            for leaf, used, (_, spec) in zip(
                given, fitted, tensors(self.signature.specs), strict=True
            ):
                if spec.mutated and used.data_ptr() != leaf.data_ptr():
                    leaf.copy_(used)
        return _torch.unflatten(outputs, self.signature.out_tree)


def _restride(leaf: Tensor, spec: TensorSpec) -> Tensor:
    if spec.stride is None:
        return leaf if leaf.is_contiguous() else leaf.contiguous()
    if leaf.stride() == spec.stride:
        return leaf
    fitted = torch.empty_strided(leaf.shape, spec.stride, dtype=leaf.dtype, device=leaf.device)
    return fitted.copy_(leaf)


def make(calls: Sequence[Call]) -> Callable[..., Any]:
    """A callable for one or several signatures (gears) of one program."""

    signatures = [call.signature for call in calls]

    def slow(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index, leaves = fit(signatures, args, kwargs)
        return calls[index].slow(leaves)

    return _fast(calls[0], slow) or (lambda *args, **kwargs: slow(args, kwargs))


def fit(
    signatures: Sequence[Signature], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, list[Any]]:
    """Which signature a call fits, and its leaves; raises `InputMismatch` when none."""
    error: InputMismatch | None = None
    for i, signature in enumerate(signatures):
        leaves, tree = _torch.flatten((args, _torch.sorted_like(signature.tree, kwargs)))
        if tree != signature.tree:
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
    if len(signatures) == 1:
        raise error
    gears = "; ".join(
        ", ".join(f"{spec.name} {spec}" for _, spec in tensors(signature.specs))
        for signature in signatures
    )
    raise InputMismatch(error.name, f"one of the gears ({gears})", error.got, "Add that gear.")


def _fast(call: Call, slow: Callable[..., Any]) -> Callable[..., Any] | None:
    """The generated call, where the inputs are a plain row of tensors of fixed shape."""
    specs = call.signature.specs
    plain = all(
        isinstance(spec, TensorSpec) and all(isinstance(size, int) for size in spec.shape)
        for spec in specs
    )
    if not plain or not _torch.is_row(call.signature.tree, len(specs)):
        return None
    scope: dict[str, Any] = {
        "Tensor": Tensor,
        "run": call.run,
        "slow": slow,
        "autocast": _torch.any_autocast,
        "states": call.states,
    }
    names = [f"x{i}" for i in range(len(specs))]
    checks = []
    for i, (name, spec) in enumerate(zip(names, specs, strict=True)):
        assert isinstance(spec, TensorSpec)
        scope |= {f"shape{i}": torch.Size(spec.shape), f"dtype{i}": spec.dtype}
        checks += [
            f"type({name}) is Tensor",
            f"{name}.shape == shape{i}",
            f"{name}.dtype is dtype{i}",
            f"not {name}.requires_grad",
        ]
        if spec.device.type == "cpu":
            checks.append(f"{name}.is_cpu")
        else:
            scope[f"device{i}"] = spec.device
            checks.append(f"{name}.device == device{i}")
        if spec.stride is None:
            checks.append(f"{name}.is_contiguous()")
        else:
            scope[f"stride{i}"] = spec.stride
            checks.append(f"{name}.stride() == stride{i}")
    inputs = ", ".join([*names, *(["*states"] if call.states else [])])
    lines = [
        "def call(*args, **kwargs):",
        f"    if kwargs or len(args) != {len(specs)} or autocast(): return slow(args, kwargs)",
        f"    {', '.join(names)}, = args" if names else "    pass",
        f"    if not ({' and '.join(checks) or 'True'}): return slow(args, kwargs)",
        "    args = None",
        f"    return {_result(call, scope, f'run([{inputs}])')}",
    ]
    fast: Callable[..., Any] = define("call", "\n".join(lines) + "\n", scope)
    return fast


def _result(call: Call, scope: dict[str, Any], flat: str) -> str:
    tree = call.signature.out_tree
    if tree.is_leaf():
        return f"{flat}[0]"
    if tree.type is tuple and all(child.is_leaf() for child in tree.children()):
        return f"tuple({flat})"
    scope |= {"unflatten": _torch.unflatten, "tree": tree}
    return f"unflatten({flat}, tree)"
