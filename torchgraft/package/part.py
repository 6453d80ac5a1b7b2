"""What a package holds, as it is read: weights, programs with their kernels, and gears."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgraft._torch import aot
from torchgraft.errors import (
    BadPackage,
)
from torchgraft.link import Branch
from torchgraft.package import codec
from torchgraft.package.codec import field, index, text
from torchgraft.package.library import with_ints
from torchgraft.package.view import Links
from torchgraft.plan import Plan
from torchgraft.program import Program, link
from torchgraft.run import host

if TYPE_CHECKING:
    from torchgraft.package.load import Loaded


def place(device: torch.device, name: str) -> torch.device:
    try:
        named = torch.device(name)
    except RuntimeError:
        raise BadPackage(f"there is no device {name!r}") from None
    return device if named.type == device.type != "cpu" else named


class Weight:
    """An entry of `weights`."""

    def __init__(self, data: Any) -> None:
        self.name, self.kind = field(data, "name", str), field(data, "kind", str)
        self.tensor, self.device = field(data, "tensor", str), field(data, "device", str)
        self.dtype = codec.named("dtype", field(data, "dtype", str))
        self.shape = [index(size, 2**63) for size in field(data, "shape", list)]
        self.stride = [index(step, 2**63) for step in field(data, "stride", list)]
        self.saved, self.made = field(data, "saved", bool), field(data, "made", bool)
        self.sha256 = data.get("sha256")
        if len(self.shape) != len(self.stride):
            raise BadPackage(f"weight {self.name!r} has other strides than sizes")

    @property
    def type(self) -> Tensor:
        """A tensor like this one that has no values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def of(self, stored: Mapping[str, Tensor]) -> Tensor:
        """The tensor of the file."""
        found = stored.get(self.tensor)
        if found is None or found.dtype != self.dtype or list(found.shape) != self.shape:
            raise BadPackage(f"weight {self.name!r} is not among the tensors, or another one")
        return found

    def like(self, tensor: Tensor, place: Any) -> Tensor:
        """A tensor laid out as this weight, on its device; itself where it is so already."""
        moved = tensor.detach().to(place(self.device))
        if list(moved.stride()) == self.stride:
            return moved
        reach = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True) if n)
        try:
            if reach <= max(1, tensor.numel()):  # no gaps
                laid = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
                return laid.to(moved.device).copy_(moved)
        except RuntimeError:  # elements that overlap
            pass
        raise BadPackage(f"weight {self.name!r} has strides that do not fit its size")


class Part:
    """An entry of `programs`: a plan, and what its names mean."""

    def __init__(self, package: Loaded, data: Any, number: int, values: int) -> None:
        self.data, self.device = data, package.kind
        self.plan: Plan = codec.to_plan(field(data, "plan", dict), package.place)
        self.kernels = {
            name: Kernel(package, kernel, values)
            for name, kernel in field(data, "kernels", dict).items()
        }
        self.constants = {
            name: _constant(constant, values, number)
            for name, constant in field(data, "constants", dict).items()
        }
        for launch in self.plan.launches:
            if launch.kernel not in self.kernels:
                raise BadPackage(f"nothing says what {launch.kernel!r} is")
        for _, name in self.plan.constants:
            if name not in self.constants:
                raise BadPackage(f"nothing says what constant {name!r} is")

    def bound(self, values: Sequence[Tensor], branches: Sequence[Branch]) -> Links:
        """What its names mean with these weights."""
        kernels = {name: kernel.bind(values) for name, kernel in self.kernels.items()}
        held = iter(branches)
        constants = {
            name: values[what] if kind == "value" else next(held) if kind == "program" else what
            for name, (kind, what, _) in self.constants.items()
        }
        return Links(kernels, constants)

    def link(self, values: Sequence[Tensor], branches: Sequence[Branch]) -> Any:
        links = self.bound(values, branches)
        return link(self.plan, links.kernels, links.constants, self.device)

    def program(
        self, parts: Sequence[Part], values: Sequence[Tensor], made: dict[int, Program]
    ) -> Program:
        branches = []
        for kind, what, how in self.constants.values():
            if kind == "program":
                if what not in made:
                    made[what] = parts[what].program(parts, values, made)
                branches.append(Branch(made[what], *how))
        none: Any = None  # there is no graph behind it
        links: Any = self.bound(values, branches)
        run = link(self.plan, links.kernels, links.constants, self.device)
        return Program(none, self.plan, run, none, links)


def _constant(data: Any, values: int, number: int) -> tuple[str, Any, Any]:
    kind = field(data, "kind", str)
    if kind == "value":
        return kind, index(data.get("value"), values), None
    if kind == "program":  # branches come before what calls them
        how = (field(data, "single", bool), field(data, "dense", list))
        return kind, index(data.get("program"), number), how
    return "target", _found(data), None


def _found(data: Any) -> Any:
    if (found := codec.to_target(data)) is None:
        raise BadPackage(f"it calls {text(data.get('name'))}, which this torch has not")
    return found


class Kernel:
    """An entry of `kernels`."""

    def __init__(self, package: Loaded, data: Any, values: int) -> None:
        self.path: str | None = None
        if field(data, "kind", str) != "library":
            self.target = _found(data)
            return
        self.path = package.library(field(data, "member", str))
        self.device = package.place(field(data, "device", str))
        self.ints, self.int_outputs = field(data, "ints", list), field(data, "int_outputs", list)
        self.constants = {
            name: index(at, values) for name, at in field(data, "constants", dict).items()
        }

    def bind(self, values: Sequence[Tensor]) -> host.Kernel:
        if self.path is None:
            return host.Kernel(self.target)
        bound = {name: values[at] for name, at in self.constants.items()}
        run = aot.load(self.path, self.device, bound)
        return host.Kernel(with_ints(run, self.ints, self.int_outputs), boxed=True)


class Gear:
    """An entry of `gears`."""

    def __init__(self, package: Loaded, data: Any) -> None:
        self.signature = codec.to_signature(data, package.place)
        self.program = index(data.get("program"), len(package._parts))
        self.states = [text(name) for name in field(data, "states", list)]
        self.static = frozenset(index(i) for i in field(data, "static", list))
        self.written = frozenset(index(i) for i in field(data, "written", list))
        self.views = [
            (index(out), index(at), index(number, len(package._parts)))
            for out, at, number in codec.rows(data, "views", 3)
        ]
        if unknown := [name for name in self.states if name not in package._states]:
            raise BadPackage(f"there is no state {unknown[0]!r}")
        plan = package._parts[self.program].plan
        given = sum(hasattr(spec, "dtype") for spec in self.signature.specs) + len(self.states)
        if len(plan.inputs) != given or len(plan.outputs) != self.signature.out_tree.num_leaves:
            raise BadPackage("a plan takes or gives another number of values than its signature")
        inputs, outputs = given - len(self.states), len(plan.outputs)
        for out, at, number in self.views:
            made = package._parts[number].plan
            fits = out < outputs and at < inputs
            if not fits or len(made.inputs) != inputs or len(made.outputs) != 1:
                raise BadPackage("a view is of an input, or is an output, that there is not")
