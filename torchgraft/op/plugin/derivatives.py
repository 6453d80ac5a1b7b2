"""The derivatives file of op-plugin: formulas of gradients, in torch's own syntax."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch

from torchgraft import _torch
from torchgraft.errors import BadPrototype
from torchgraft.op.plugin.document import Place, read_yaml
from torchgraft.op.plugin.expression import Expression
from torchgraft.op.plugin.functions import Entry, Versions
from torchgraft.op.prototype import Note, among

_NOT = ("not_differentiable", "non_differentiable")


@dataclasses.dataclass(frozen=True)
class Derivative:
    """The gradients of an operator: each formula, and the arguments that it is for."""

    name: str
    where: str
    formulas: tuple[tuple[tuple[str, ...], Expression], ...]


@dataclasses.dataclass(frozen=True)
class Derivatives:
    found: tuple[Derivative, ...]
    notes: tuple[Note, ...] = ()
    problems: tuple[str, ...] = ()


def read_derivatives(
    text: str, path: str, version: str, entries: Mapping[str, Entry]
) -> Derivatives:
    """The formulas for the operators among `entries`; for others they become notes."""
    notes: list[Note] = []
    problems: list[str] = []
    found: dict[str, Derivative] = {}
    try:
        top = read_yaml(text, path)
        items, versions = _items(top, version) if top is not None else ([], None)
    except BadPrototype as error:
        return Derivatives((), (), (str(error),))
    versions = versions or Versions([], version)
    for item in items:
        try:
            one = _read(item, versions, entries, notes)
        except BadPrototype as error:
            problems.append(str(error))
            continue
        if one is not None:
            found.setdefault(one.name, one)
    return Derivatives(tuple(found.values()), tuple(notes), tuple(problems))


def _items(top: Place, version: str) -> tuple[list[Place], Versions | None]:
    if top.is_list:
        return top.items(), None
    items: list[Place] = []
    versions = None
    for key, _, value in top.entries(("all_version", "backward")):
        if key == "all_version":
            versions = Versions([item.text() for item in value.items()], version)
        else:
            items = value.items()
    return items, versions


def _read(
    item: Place, versions: Versions, entries: Mapping[str, Entry], notes: list[Note]
) -> Derivative | None:
    parts = {key: (place, value) for key, place, value in item.entries()}
    if "name" not in parts:
        raise item.bad("an entry without 'name'", "name: f(Tensor x) -> Tensor")
    schema = parts.pop("name")[1].text()
    name = schema.partition("(")[0].strip()
    if "version" in parts and not versions.has(parts.pop("version")[1]):
        return None
    if name not in entries:
        what = "its derivative is not used: the functions file has no such operator here"
        notes.append(Note(name, item.where, what))
        return None
    parsed = entries[name].parsed
    try:
        same = str(_torch.parse_schema(f"npu::{schema}")) == str(parsed)
    except RuntimeError:
        same = False
    if not same:
        raise item.bad(schema, f"the schema of the functions file, {entries[name].schema}")
    if any(arg.alias_info is not None for arg in (*parsed.arguments, *parsed.returns)):
        what = "its derivative is not used: torch derives no operator that writes its input"
        notes.append(Note(name, item.where, what))
        return None
    arguments = [arg.name for arg in parsed.arguments]
    returns = [ret.name or f"result{i}" for i, ret in enumerate(parsed.returns)]
    known = (*arguments, *returns, "result", "grad", "grads", "grad_input_mask")
    known += tuple(f"grad_{one}" for one in returns)
    formulas = []
    for key, (place, value) in parts.items():
        targets = tuple(part.strip() for part in key.split(","))
        if key == "output_differentiability" or re.match(r"result\d*$|auto_", key):
            notes.append(Note(name, place.where, f"{key!r} is not used: gradients go backward"))
            continue
        for target in targets:
            if target not in arguments:
                raise place.bad(f"unknown argument {target!r}", among(arguments, target))
        if value.text() in _NOT:
            continue
        try:
            formula = Expression(value.text())
        except ValueError as error:
            raise value.bad(str(error), "a formula that torchgraft can evaluate") from None
        for used in formula.names:
            if used not in known:
                raise value.bad(f"unknown name {used!r}", among(known, used))
        formulas.append((targets, formula))
    return Derivative(name, item.where, tuple(formulas))


def register_derivative(derivative: Derivative, entry: Entry, library: Any) -> None:
    """Give the operator its gradient, in every way that torch asks for one."""
    parsed = entry.parsed
    arguments = [arg.name for arg in parsed.arguments]
    results = [ret.name or f"result{i}" for i, ret in enumerate(parsed.returns)]
    used = {name for _, formula in derivative.formulas for name in formula.names}
    keep_results = bool(used & {"result", *results})

    def setup(ctx: Any, inputs: Any, keyword_only_inputs: Any = None, output: Any = None) -> None:
        values = dict(zip(arguments, inputs, strict=False)) | (keyword_only_inputs or {})
        outputs = output if isinstance(output, tuple) else (output,)
        kept = {name: value for name, value in values.items() if name in used}
        if keep_results:
            kept |= dict(zip(results, outputs, strict=False)) | {"result": outputs[0]}
        tensors = {k: v for k, v in kept.items() if isinstance(v, torch.Tensor)}
        ctx.save_for_backward(*tensors.values())
        ctx.names = list(tensors)
        ctx.plain = {k: v for k, v in kept.items() if k not in tensors}

    def backward(ctx: Any, *grads: Any) -> Any:
        values = dict(zip(ctx.names, ctx.saved_tensors, strict=True)) | ctx.plain
        values |= {"grad": grads[0], "grads": list(grads)}
        values |= {f"grad_{name}": grad for name, grad in zip(results, grads, strict=False)}
        gradients: dict[str, Any] = {}
        for targets, formula in derivative.formulas:
            needed = [ctx.needs_input_grad[arguments.index(one)] for one in targets]
            if any(needed):
                value = formula.evaluate(values | {"grad_input_mask": needed})
                several = len(targets) > 1 or isinstance(value, tuple | list)
                gradients |= dict(zip(targets, value if several else [value], strict=False))
        positional = [arg.name for arg in parsed.arguments if not arg.kwarg_only]
        given = tuple(gradients.get(name) for name in positional)
        return given if len(given) != 1 else given[0]

    if any(arg.kwarg_only for arg in parsed.arguments):
        context: Any = setup
    else:

        def context(ctx: Any, inputs: Any, output: Any) -> None:
            setup(ctx, inputs, None, output)

    torch.library.register_autograd(
        f"npu::{entry.name}", backward, setup_context=context, lib=library
    )
