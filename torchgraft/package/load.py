"""`graft.load`: a package becomes a compiled program again. No pickle, nothing is compiled."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgraft import _torch
from torchgraft._torch import groups
from torchgraft.compile import Compiled
from torchgraft.config import MODES, Config
from torchgraft.errors import (
    BadPackage,
    BadPlan,
    BadValue,
    NotSavable,
    WeightMismatch,
    first_line,
)
from torchgraft.fx import edit, meta
from torchgraft.fx.capture import Capture
from torchgraft.fx.returned import View
from torchgraft.fx.weights import check_weights
from torchgraft.native import executor
from torchgraft.package import codec, machine, tensors
from torchgraft.package.archive import KEY, MANIFEST, WEIGHTS, Archive, write
from torchgraft.package.codec import field
from torchgraft.package.part import Gear, Part, Weight, place
from torchgraft.package.view import attach, report
from torchgraft.program import Program, captured
from torchgraft.run.pages import Pages
from torchgraft.signature import Signature

PathLike = str | os.PathLike[str]


def load(
    path: PathLike,
    device: torch.device | str | None = None,
    *,
    weights: Mapping[str, Tensor] | PathLike | None = None,
    sha256: str | None = None,
) -> Compiled:
    """The program that `compiled.save` wrote. Nothing is compiled; weights stay in the file.

    `device` chooses among devices of the kind it was compiled for. `weights` are used instead of
    the file's: a state dict, or the path of a `.safetensors` file. With `sha256`, the file must
    have that hash. Without it, a damaged file is found, but not one that somebody forged: a package
    holds machine code, so load those that you trust.
    """
    if not isinstance(sha256, str | None):
        raise BadValue("sha256", sha256, "a hash as text, as sha256sum prints it")
    loaded = opened(path, _device(device), sha256)
    if weights is not None:
        loaded.load_state_dict(_state_dict(weights))
    else:
        loaded.start()
    return loaded


def opened(path: PathLike, device: torch.device | None = None, sha256: str | None = None) -> Loaded:
    """A package that was read and checked, of which nothing has been run yet."""
    try:
        archive = Archive(path)
    except OSError as error:
        raise BadPackage(f"it cannot be read ({error.strerror})", path) from None
    return checked(archive, device, sha256)


def checked(
    archive: Archive,
    device: torch.device | None = None,
    sha256: str | None = None,
    states: Mapping[str, Tensor] | None = None,
) -> Loaded:
    """`opened`, of an archive. With `states`, which are the program's instead of the file's, the
    weights in the file are neither read nor hashed before somebody asks for them: for those who
    have them already (`Loaded.start`)."""
    path = archive.path if archive.path is not None else "the package"
    try:
        place = machine.check(path, archive.manifest, device)
        archive.verify(sha256, but=() if states is None else (WEIGHTS,))
        machine.check_libraries(path, archive.manifest, _exists)
        return Loaded(archive, place, states)
    except (BadPackage, BadPlan) as error:
        raise BadPackage(getattr(error, "why", str(error)), path) from None


def _device(device: torch.device | str | None) -> torch.device | None:
    try:
        return torch.device(device) if device is not None else None
    except (RuntimeError, TypeError):
        raise BadValue("device", device, "a device such as 'cpu' or 'cuda:1'") from None


def _exists(name: str) -> bool:
    name, _, overload = name.partition(".")
    return codec.to_target({"kind": "op", "name": name, "overload": overload}) is not None


def _state_dict(weights: Any) -> Mapping[str, Tensor]:
    if isinstance(weights, Mapping):
        return weights
    if not isinstance(weights, (str, os.PathLike)):
        raise BadValue("weights", weights, "a state dict, or the path of a .safetensors file")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(weights)
    except (SafetensorError, OSError) as error:
        raise BadValue("weights", str(weights), f"a .safetensors file ({error})") from None


class Loaded(Compiled):
    """A program from a package."""

    def __init__(
        self,
        archive: Archive,
        device: torch.device,
        own_states: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._archive, self._device = archive, device
        body = archive.json("program.json")
        mode = field(body, "mode", str)
        if mode not in MODES:
            raise BadPackage(f"its mode is {mode!r}")
        self.name = field(body, "name", str)
        self.config = Config(mode=mode, alias_outputs=field(body, "alias_outputs", bool))
        self.front_end = field(body, "front_end", str)
        self._weights = [Weight(entry) for entry in field(body, "weights", list)]
        self._new: dict[str, Tensor] = {}  # weights since `load_state_dict`
        states = [weight for weight in self._weights if weight.kind == "state"]
        if own_states is None:  # all of a file is checked before any of it is used
            stored = self._stored
            self._states = {w.name: w.like(stored[w.name], self.place) for w in states}
        else:
            self._states = {w.name: own_states[w.name] for w in states}
        self._folder = tempfile.TemporaryDirectory(prefix="torchgraft-")
        self._libraries = self._unpack()
        self._prepare = Part(self, field(body, "prepare", dict), 0, 0)
        if len(self._prepare.plan.inputs) != len(self._weights):
            raise BadPackage("the plan of the weights takes another number of them")
        entries = field(body, "programs", list)
        count = len(self._prepare.plan.outputs)
        self._parts = [Part(self, part, i, count) for i, part in enumerate(entries)]
        self._gears = [Gear(self, gear) for gear in field(body, "gears", list)]
        if not self._gears:
            raise BadPackage("it has no program")
        self._reports = archive.json("report.json")

    @property
    def kind(self) -> str:
        """The kind of device that it runs on."""
        return self._device.type

    def place(self, name: str) -> torch.device:
        """The device here that a device of the package stands for."""
        return place(self._device, name)

    def library(self, member: str) -> str:
        """Where the library of a member was unpacked."""
        if member not in self._libraries:
            raise BadPackage(f"there is no library {member!r}")
        return self._libraries[member]

    @functools.cached_property
    def _stored(self) -> dict[str, Tensor]:
        """The tensors of the file, as they lie there; `_placed` makes weights of them."""
        self._archive.check(WEIGHTS)
        stored = tensors.read(self._archive.members.get(WEIGHTS, memoryview(b"")))
        return {weight.name: weight.of(stored) for weight in self._weights}

    def _placed(self, new: Mapping[str, Tensor]) -> list[Tensor]:
        """Every weight on its device, two names of one tensor once."""
        held: dict[Any, Tensor] = {**new, **self._states}
        given = []
        for w in self._weights:
            key = w.name if w.name in held else (w.tensor, w.device, *w.stride)
            if key not in held:
                held[key] = w.like(self._stored[w.name], self.place)
            given.append(held[key])
        return given

    def _unpack(self) -> dict[str, str]:
        """Write the libraries where the dynamic linker can find them; each in a folder of its own,
        for what must lie beside it."""
        found: dict[str, str] = {}
        for member, data in self._archive.members.items():
            folder, _, name = member.partition("/")
            if folder != "lib":
                continue
            stem, _, kind = name.rpartition(".")
            if kind not in ("so", "json") or "/" in name:
                raise BadPackage(f"{member!r} is neither a library nor what belongs to one")
            place = os.path.join(self._folder.name, stem)
            os.makedirs(place, exist_ok=True)
            found[member] = os.path.join(place, f"region.{kind}")
            with open(found[member], "wb") as file:
                file.write(data)
        return found

    def start(
        self, new: Mapping[str, Tensor] | None = None, borrowed: Mapping[str, Tensor] | None = None
    ) -> None:
        """Link everything with these weights, or those of the file, and use that from now on.

        `borrowed` are the weights of the file, too, but somebody's own: what the program keeps of
        them it keeps as a copy."""
        try:
            programs = self._linked(new or {}, borrowed or {})
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of operators and libraries, which say what they like
            why = getattr(error, "why", f"it cannot be started ({first_line(error)})")
            raise BadPackage(why, self._archive.path) from error
        self._link(programs)

    def _linked(self, new: Mapping[str, Tensor], borrowed: Mapping[str, Tensor]) -> list[Program]:
        theirs = {
            w.name: w.like(w.of({w.tensor: borrowed[w.name].resolve_conj()}), self.place)
            for w in self._weights
            if w.name in borrowed
        }
        given = self._placed({**theirs, **self._rest(borrowed), **new})
        kept, pages = meta.addresses(given), Pages()
        with torch.no_grad(), _torch.no_autocast():
            values = list(self._prepare.link([], [])(list(given)))
        if not all(isinstance(value, Tensor) for value in values):
            raise BadPackage("what is prepared of its weights is not tensors only")
        lent = self._lent(values, meta.addresses(theirs.values()))
        values = [v if meta.addresses([v]) <= kept else pages.settle(v) for v in values]
        for i, copy in zip(lent, pages.copies([values[i] for i in lent]), strict=True):
            values[i] = copy
        runs = self._natively(values)
        made: dict[int, Program] = {}
        programs = []
        for i, gear in enumerate(self._gears):
            part = self._parts[gear.program]
            about = report(self._reports, i, self.name, self.front_end, self.config.mode)
            if runs is not None:
                about.notes.append(executor.NOTE)
                run = runs[gear.program]
                links: Any = None
            else:
                inner = part.program(self._parts, values, made)
                run, links = inner.run, inner.linker
            none: Any = None  # its graph is read when somebody asks for it
            bound = functools.partial(part.program, self._parts, values, {})
            here = functools.partial(place, self._device)
            view = functools.partial(attach, self._archive, i, here, bound)
            program = Program(none, part.plan, run, about, links, view=view)
            program.run = captured(
                program, self.config, static=gear.static, written=gear.written, fixed=False
            )
            programs.append(program)
        if self._device.type != "cpu":  # calls may come on other streams than this one
            torch.get_device_module(self._device).synchronize(self._device)
        return programs

    def _rest(self, borrowed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Where most weights are borrowed: tensors of the file that have hashes of their own, so
        that the others need not be read for them."""
        wanted = [w for w in self._weights if borrowed and w.name not in borrowed and w.sha256]
        if not wanted:
            return {}
        stored = tensors.read(self._archive.members.get(WEIGHTS, memoryview(b"")))
        found = {}
        for weight in wanted:
            tensor = weight.of(stored)
            if tensors.digest(tensor) != weight.sha256:
                raise BadPackage(f"{weight.name!r} was altered after it was written")
            found[weight.name] = weight.like(tensor, self.place)
        return found

    def _lent(self, values: Sequence[Tensor], outside: frozenset[int]) -> list[int]:
        """The places of values that lie in memory outside; states are meant to."""
        plan = self._prepare.plan
        inputs = zip(plan.inputs, self._weights, strict=True)
        states = {buffer for buffer, weight in inputs if weight.kind == "state"}
        return [
            i
            for i, (value, buffer) in enumerate(zip(values, plan.outputs, strict=True))
            if buffer not in states and meta.addresses([value]) & outside
        ]

    def _natively(self, values: Sequence[Tensor]) -> list[_torch.Flat] | None:
        """Every entry of `programs`, walked in C++; None where that is not built, or not for it."""
        for part in self._parts:
            if not executor.can_walk(part.plan, part.data["kernels"].values()):
                return None
        if (found := executor.module()) is None:
            return None
        runs: list[_torch.Flat] = []
        for i, part in enumerate(self._parts):
            text = json.dumps(part.data)
            runs.append(found.link(text, i, values, runs, self._libraries, str(self._device)))
        return runs

    @property
    def captures(self) -> list[Capture]:
        """What each gear takes and gives; there is no graph from before the passes."""
        saved = frozenset(weight.name for weight in self._weights if weight.saved)
        none: Any = None
        return [
            Capture(none, g.signature, {n: self._states[n] for n in g.states}, {}, {}, saved)
            for g in self._gears
        ]

    @property
    def graph(self) -> edit.Graph:
        """The graph that runs, without its weights (of the first gear where there are several)."""
        self._view()
        return super().graph

    def program_for(
        self, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> tuple[Program, list[Any]]:
        """The program that a call takes, and the values of its graph's inputs."""
        self._view()
        return super().program_for(inputs, kwargs)

    def explain(self) -> str:
        """Everything about this program as one text: inputs, report, graph, plan."""
        self._view()
        return super().explain()

    def _view(self) -> None:
        """Read the graphs, which no call needs."""
        for program in self._programs:
            program.view(program)

    def use_states(self, states: Mapping[str, Tensor]) -> None:
        """Read these tensors at each call, as a program does that was not frozen."""
        self._states = {name: states[name] for name in self._states}

    def signature(self, gear: int) -> Signature:
        """What a gear takes and gives."""
        return self._gears[gear].signature

    def views(self, gear: int, program: Program) -> Mapping[int, tuple[int, View]]:
        """The outputs that are an input or a view of one."""

        def view(number: int) -> View:
            run = self._parts[number].link([], [])
            return lambda *inputs: run(list(inputs))[0]

        return {out: (at, view(number)) for out, at, number in self._gears[gear].views}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Use new weights from the next call on; all of them, or nothing changes.

        Nothing is compiled: what was folded or packed of the weights is computed again.
        """
        state_dict = groups.shards(state_dict)
        held = {w.name: w.type for w in self._weights if w.saved}
        check_weights(held, state_dict)
        self._use(state_dict)

    def use_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Run with these weights; the states are somebody's own and stay as they are."""
        held = {w.name: w.type for w in self._weights if w.kind == "weight"}
        check_weights(held, weights)
        self._use({**self._states, **weights})

    def _own(self, weight: Weight, given: Tensor) -> Tensor:
        """A tensor for a weight that its owner's later changes do not reach: some of what is made
        of it is made now, and a program with a half of them would be nobody's."""
        laid = weight.like(given, self.place)
        if laid.layout != torch.strided or laid.data_ptr() != given.data_ptr():
            return laid
        copy = laid.clone()
        return copy if copy.stride() == laid.stride() else laid  # elements that overlap

    def _use(self, state_dict: Mapping[str, Tensor]) -> None:
        if made := [weight.name for weight in self._weights if weight.made]:
            raise WeightMismatch(
                [
                    f"{len(made)} constants were made of the weights by a pass, in a way that "
                    f"cannot be repeated; compile the model with the new weights and save that"
                ]
            )
        saved = [weight for weight in self._weights if weight.saved]
        first: dict[str, str] = {}
        for weight in saved:
            other = first.setdefault(weight.tensor, weight.name)
            if not torch.equal(state_dict[other], state_dict[weight.name]):
                raise WeightMismatch([f"{other} and {weight.name} are one tensor in this program"])
        moved = {w.name: self._own(w, state_dict[w.name]) for w in saved}
        with torch.no_grad():
            for name in self._states.keys() & moved.keys():
                self._states[name].copy_(moved.pop(name))
        self.start(moved)
        self._new = moved

    def save(self, path: PathLike, *, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the package again, with the weights that it has now."""
        if weights is not None:
            raise NotSavable(
                "it was loaded, and is written with its own weights", "Use load_state_dict first."
            )
        now = {**self._stored, **self._new, **self._states}
        held = self._archive.members.items()
        parts: dict[str, Any] = {n: d for n, d in held if n not in (MANIFEST, KEY)}
        parts[WEIGHTS] = tensors.write({w.tensor: now[w.name] for w in self._weights})
        head = {k: v for k, v in self._archive.manifest.items() if k != "members"}
        write(path, head, parts)
