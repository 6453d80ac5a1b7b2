"""What the commands on models share: the model, its inputs as text, the options of a compile."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import torchgraft as graft
from torchgraft import progress
from torchgraft.cli.choice import Choice
from torchgraft.config import MODES
from torchgraft.errors import UnknownName, first_line
from torchgraft.fx import load, script

DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8,
    "u8": torch.uint8, "bool": torch.bool, "c64": torch.complex64, "c128": torch.complex128,
}  # fmt: skip
_SPEC = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<sizes>[\d.x]*)(?::(?P<dtype>\w+))?")


@dataclasses.dataclass(frozen=True)
class Given:
    """One `--input`: a type to make random values of, or the values of a file."""

    name: str | None
    spec: graft.Input | None
    value: Tensor | None = None

    def declared(self) -> graft.Input | Tensor:
        """What to compile for."""
        return self.spec if self.spec is not None else self.example(torch.device("cpu"))

    def example(self, device: torch.device) -> Tensor:
        """A tensor to call with; whole numbers are small, so that they can be indices."""
        if self.value is not None:
            return self.value.to(device)
        assert self.spec is not None
        shape = self.spec.example(device)
        if shape.is_floating_point() or shape.is_complex():
            return torch.randn_like(shape)
        return torch.randint_like(shape, 0, 2)


class InputType(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # click < 8.4
    """`1x3x224x224:f16`, `1..32x64`, `mask=8:bool` or `x.npy`."""

    name = "SHAPE[:DTYPE]"

    def convert(
        self, value: str | Given, param: click.Parameter | None, ctx: click.Context | None
    ) -> Given:
        if isinstance(value, Given):
            return value
        name, _, path = value.rpartition("=")
        if path.endswith(".npy"):
            return Given(name or None, None, _read(path))
        found = _SPEC.fullmatch(value)
        if found is None:
            self.fail(f"{value!r} is no input. Write 1x3x224x224:f16, 1..32x64, or x.npy.")
        lows, highs = [], []
        for size in filter(None, found["sizes"].split("x")):
            low, dots, high = size.partition("..")
            if not low.isdecimal() or (high and not high.isdecimal()):
                self.fail(f"{size!r} in {value!r} is no size. Write 8, 1..32 or 1.. (no limit).")
            lows.append(int(low))
            highs.append(int(high) if high else None if dots else int(low))
        kind = found["dtype"] or "f32"
        if kind not in DTYPES:
            self.fail(str(UnknownName("dtype", kind, DTYPES)), param, ctx)
        spec = graft.Input(min_shape=lows, max_shape=highs, dtype=DTYPES[kind])
        return Given(found["name"], spec)


def _read(path: str) -> Tensor:
    try:
        import numpy
    except ImportError:
        raise click.ClickException(f"{path}: reading it needs numpy. pip install numpy") from None
    try:
        return torch.from_numpy(numpy.load(path, allow_pickle=False))
    except (OSError, ValueError, TypeError) as error:
        raise click.ClickException(f"{path}: {error}") from None


class DeviceType(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # click < 8.4
    """A device of torch that is there."""

    name = "DEVICE"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            torch.empty(0, device=value)
        except (RuntimeError, AssertionError) as error:
            self.fail(f"{value!r}: {first_line(error)}. `torchgraft doctor` says what is there.")
        return value


F = TypeVar("F", bound=Callable[..., Any])


def options(fn: F) -> F:
    """The arguments of every command that compiles a model."""
    for add in (
        click.option(
            "--device",
            type=DeviceType(),
            help="Where to run: cpu, cuda, cuda:1.  [default: the model's own]",
        ),
        click.option("--mode", type=Choice(MODES), default="default", show_default=True),
        click.option(
            "--input",
            "inputs",
            type=InputType(),
            multiple=True,
            help="An input, in order: 1x3x224x224:f16, 1..32x64 (a range), name=8:bool, x.npy.",
        ),
        click.argument("model"),
    ):
        fn = add(fn)
    return fn


@dataclasses.dataclass(frozen=True)
class Job:
    """A model and what it is called with."""

    model: Any
    given: Sequence[Given]
    device: torch.device

    @property
    def args(self) -> tuple[Tensor, ...]:
        return tuple(one.example(self.device) for one in self.given if one.name is None)

    @property
    def kwargs(self) -> dict[str, Tensor]:
        return {one.name: one.example(self.device) for one in self.given if one.name is not None}

    @property
    def eager(self) -> Callable[..., Any]:
        """The model itself, to compare with."""
        exported = isinstance(self.model, ExportedProgram)
        found: Callable[..., Any] = self.model.module() if exported else self.model
        return found

    @property
    def source(self) -> Callable[..., Any]:
        """The model for `torch.compile`, which takes no TorchScript: that as Python."""
        scripted = isinstance(self.model, (torch.jit.ScriptModule, torch.jit.ScriptFunction))
        return script.to_module(self.model).module if scripted else self.eager

    def compile(self, mode: str, **fields: Any) -> graft.Compiled:
        """The model, compiled for its inputs; progress is shown on a terminal."""
        with progress.shown("compiling"):
            if isinstance(self.model, ExportedProgram):
                return graft.compile(self.model, mode=mode, **fields)
            args = tuple(_moved(g, self.device) for g in self.given if g.name is None)
            kwargs = {g.name: _moved(g, self.device) for g in self.given if g.name is not None}
            return graft.compile(self.model, args, kwargs or None, mode=mode, **fields)


def _moved(given: Given, device: torch.device) -> graft.Input | Tensor:
    if given.spec is None:
        return given.example(device)
    lows, highs = zip(*given.spec.ranges, strict=True) if given.spec.ranges else ((), ())
    return graft.Input(min_shape=lows, max_shape=highs, dtype=given.spec.dtype, device=device)


def job(model: str, inputs: Sequence[Given], device: str | None) -> Job:
    """What a command line asks for. `model` is a file, or `package.module:attribute`."""
    loaded = _load(model)
    if isinstance(loaded, ExportedProgram):
        if loaded.example_inputs is None and not inputs:
            raise click.UsageError(f"{model} has no example inputs. Give each one as --input.")
        if not inputs:
            args, kwargs = loaded.example_inputs or ((), {})
            named: Mapping[str, Tensor] = kwargs
            inputs = [Given(None, None, x) for x in args if isinstance(x, Tensor)]
            inputs += [Given(name, None, x) for name, x in named.items() if isinstance(x, Tensor)]
    elif not inputs:
        raise click.UsageError("What is it called with? Give each input, such as --input 1x3:f32.")
    where = torch.device(device) if device else _home(loaded)
    if isinstance(loaded, nn.Module):
        loaded = loaded.to(where)
    return Job(loaded, inputs, where)


def _load(model: str) -> Any:
    module, colon, attribute = model.rpartition(":")
    if not colon or os.path.exists(model):
        return load.load(model)
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise click.ClickException(f"{model}: {error}") from None
    finally:
        sys.path.pop(0)
    if isinstance(found, type) and issubclass(found, nn.Module):
        found = found()
    return found.eval() if isinstance(found, nn.Module) else found


def _home(model: Any) -> torch.device:
    """Where the model's weights are."""
    held: dict[str, Tensor] = {}
    if isinstance(model, ExportedProgram):
        held = model.state_dict
    elif isinstance(model, nn.Module):
        held = model.state_dict()
    return next((tensor.device for tensor in held.values()), torch.device("cpu"))
