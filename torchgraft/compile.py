"""`graft.compile`: any program, ahead of time, as a `Compiled` object."""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from torchgraft import _torch
from torchgraft._torch import groups
from torchgraft.backend import backend
from torchgraft.config import Config
from torchgraft.convert.define import candidates
from torchgraft.errors import (
    BadValue,
    ExportedOtherwise,
    InputMismatch,
    NotCopied,
    NotSavable,
    NotYet,
    Specialised,
)
from torchgraft.fx import edit, meta, returned, script
from torchgraft.fx.capture import Capture, Origin, capture, check_dynamic, from_exported
from torchgraft.fx.load import load
from torchgraft.fx.weights import check_weights
from torchgraft.inputs import Declared, declare
from torchgraft.link import Linker, Role
from torchgraft.native import executor
from torchgraft.plan import Plan
from torchgraft.program import Program, build
from torchgraft.report import Report
from torchgraft.run import call as calls
from torchgraft.signature import Signature, checked
from torchgraft.signature import tensors as spec_tensors

if TYPE_CHECKING:
    from torchgraft.inspect.profile import Profile


def compile(
    model: Any,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    config: Config | None = None,
    **fields: Any,
) -> Compiled:
    """Compile a program for declared inputs, ahead of time.

    `model` is an `nn.Module`, a function, a `ScriptModule`, an `ExportedProgram`, a `GraphModule`,
    or the path of a `.pt` (TorchScript) or `.pt2` file. `inputs` are its positional arguments
    (tensors, `graft.Input`, nested containers), `kwargs` the named ones; an ExportedProgram has
    its own, which they must fit. More keywords are fields of `Config`:
    `graft.compile(m, (x,), mode="eager")`.

    Weights are copied and frozen unless `freeze=False`; `load_state_dict` gives new ones.

    >>> import torch, torchgraft as graft
    >>> compiled = graft.compile(torch.nn.ReLU(), (torch.ones(3),), mode="eager")
    >>> compiled(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([0., 0., 2.])
    >>> compiled(torch.ones(4))
    Traceback (most recent call last):
    ...
    torchgraft.errors.InputMismatch: input 'input': declared size 3 in dim 0, got 4 (shape (4,)).
    ...
    """
    config = Config.given(config).replace(**fields)
    taken = captured_for(model, inputs, kwargs, config)
    return taken if isinstance(taken, Compiled) else _compiled(*taken, config)


def captured_for(
    model: Any, inputs: Any, kwargs: Mapping[str, Any] | None, config: Config
) -> tuple[str, str, list[Capture]] | Partial:
    """A program's name, its front end and its graphs; a `Partial` where it is not one graph."""
    if isinstance(model, (str, os.PathLike)):
        model = load(model)
    name, own = _name(model), config.decompositions
    if isinstance(model, ExportedProgram):
        taken = from_exported(model, freeze=config.freeze, keep=candidates(config), own=own)
        if inputs is not None or kwargs is not None:
            _check_exported(taken, inputs, kwargs)
        if config.verify != "off" and model.example_inputs is not None:
            _samples(taken, _torch.flatten(model.example_inputs)[0])
        return name, "export", [taken]
    if not callable(model):
        raise BadValue("model", model, "a module, a function, an exported program or a path")
    if inputs is None and kwargs is None:
        raise BadValue("inputs", inputs, "the inputs to compile for, such as (x,)")
    front_end, branches = "export", False
    if isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        translated = script.to_module(model)
        front_end, model = "script", translated.module
        branches = any(branch.on != "shape" for branch in translated.branches)
    declared = declare(model, () if inputs is None else inputs, kwargs, _device_of(model))
    if branches:
        return Partial(name, model, declared, config, translated.branches)
    keep = candidates(config)
    captures = [capture(model, one, freeze=config.freeze, keep=keep, own=own) for one in declared]
    if config.verify != "off":
        for taken, one in zip(captures, declared, strict=True):
            leaves = _torch.flatten((one.args, one.kwargs))[0]
            known = zip(leaves, one.ranges, strict=True)
            _samples(taken, [leaf if ranges is None else None for leaf, ranges in known])
    return name, front_end, captures


def _check_exported(taken: Capture, inputs: Any, kwargs: Mapping[str, Any] | None) -> None:
    """Raise where inputs were declared that an exported program does not take."""
    signature = taken.signature
    device = next((spec.device for _, spec in spec_tensors(signature.specs)), torch.device("cpu"))
    for one in declare(_anything, () if inputs is None else inputs, kwargs, device):
        _, tree = _torch.flatten((one.args, one.kwargs))
        try:
            calls.fit([signature], one.args, one.kwargs)
            numbered = _torch.unflatten(range(len(one.ranges)), tree)
            order = _torch.flatten_like(signature.tree, numbered)
            assert order is not None  # it fits
            check_dynamic(signature.specs, [one.ranges[i] for i in order], taken.gm)
        except InputMismatch as error:
            raise ExportedOtherwise(error.name, error.declared, error.got) from None
        except Specialised as error:
            size = f"{error.size} in dim {error.dim}"
            raise ExportedOtherwise(error.name, size, error.declared) from None


def _anything(*args: Any, **kwargs: Any) -> None:
    """What an exported program takes is not known by names."""


def _compiled(name: str, front_end: str, captures: Sequence[Capture], config: Config) -> Compiled:
    if config.cache_dir is None:
        return Compiled(name, front_end, captures, config)
    from torchgraft.package.cache import Cache

    return Cache(config.cache_dir, config.cache_bytes).get(name, front_end, captures, config)


def _samples(taken: Capture, leaves: Sequence[Any]) -> None:
    """Let verification use the inputs that the program was given, and its states as they are."""
    given = [leaves[i] for i, _ in spec_tensors(taken.signature.specs)]
    taken.gm.meta["samples"] = [*given, *taken.states.values()]


class Compiled:
    """A compiled program: call it as the model. Thread-safe; records no gradients."""

    def __init__(
        self,
        name: str,
        front_end: str,
        captures: Sequence[Capture],
        config: Config,
        *,
        link: bool = True,
    ) -> None:
        self.name, self.config = name, config
        self.front_end = front_end
        # The graphs as captured, without weights: new weights start from here.
        self._sources = [(copy.deepcopy(c.gm.graph), dict(c.gm.meta), c) for c in captures]
        if link:
            self._link([self.build(c.gm, c) for c in captures])
            for source, program in zip(captures, self._programs, strict=True):
                _keep(source, program, {n: w.origin.tensor for n, w in source.weights.items()})
            self.note_excluded(self._programs)
            self.warn_excluded()

    def note_excluded(self, programs: Sequence[Program]) -> None:
        """Let the reports tell of declared sizes that calls will be refused for."""
        for i, program in enumerate(programs):
            program.report.notes += self.signature(i).excluded()

    def warn_excluded(self) -> None:
        """Warn of such sizes, once it is compiled."""
        for i in range(len(self._sources)):
            for said in self.signature(i).excluded():
                warnings.warn(f"torchgraft: {self.name}: {said}", stacklevel=2)

    def build(self, gm: GraphModule, source: Capture, linker: type[Linker] = Linker) -> Program:
        """Compile a graph that was captured."""
        count = len(gm.graph.find_nodes(op="placeholder"))
        static = frozenset(range(count - len(source.states), count))
        config = self.config.replace(**source.choice)
        role = Role(self.front_end, static=static, checked=True)
        program = build(gm, config, role, self.name, linker)
        if linker is Linker:
            source.gm, source.choice = program.gm, {**source.choice, **program.choice}
        if source.weights:
            program.report.notes.append(
                f"{len(source.weights)} weights are frozen: later changes to the module are not "
                f"seen; compiled.load_state_dict takes new ones, freeze=False keeps reading them"
            )
        return program

    def _link(self, programs: list[Program]) -> None:
        self._programs = programs
        bound = [
            calls.Call(
                self.signature(i),
                program.run,
                list(self.captures[i].states.values()),
                self.views(i, program),
            )
            for i, program in enumerate(programs)
        ]
        self._call = calls.make(bound, executor.check())

    @property
    def captures(self) -> list[Capture]:
        """What was captured, one per gear."""
        return [source for _, _, source in self._sources]

    def signature(self, gear: int) -> Signature:
        """What a gear takes and gives, with what compiling assumed of its sizes."""
        _, gm_meta, source = self._sources[gear]
        return _guarded(source, gm_meta)

    def views(self, gear: int, program: Program) -> Mapping[int, tuple[int, returned.View]]:
        """The outputs that are an input or a view of one."""
        return returned.views_of_inputs(program.gm, len(self.captures[gear].states))

    def fresh(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[GraphModule, Capture]]:
        """The graphs as captured, with these weights."""
        for graph, gm_meta, source in self._sources:
            root = torch.nn.Module()
            for attribute, constant in source.constants.items():
                setattr(root, attribute, constant)
            for name, weight in source.weights.items():
                root.register_buffer(weight.attribute, weights[name])
            gm = GraphModule(root, copy.deepcopy(graph))
            gm.meta.update(gm_meta)
            yield gm, source

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    @property
    def forward(self) -> Any:
        """The call itself, for code that says `model.forward(x)`."""
        return self._call

    def _first(self) -> Program:
        return self._programs[0]

    @property
    def graph(self) -> edit.Graph:
        """The graph that runs, after every pass (of the first gear or piece where there are
        several)."""
        program = self._first()
        return edit.Graph(program.gm, meta.inputs_of(program.gm), self.config)

    @property
    def plan(self) -> Plan:
        """What runs, step by step; `print(compiled.plan)`."""
        return self._first().plan

    @property
    def report(self) -> Report:
        """What was done and why (of the first gear or piece); `print(compiled.report)`."""
        return self._first().report.held(self._first())

    @property
    def reports(self) -> list[Report]:
        """One report per gear (or piece)."""
        return [program.report.held(program) for program in self._programs]

    def program_for(
        self, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> tuple[Program, list[Any]]:
        """The program that a call takes, and the values of its graph's inputs."""
        signatures = [source.signature for source in self.captures]
        if not signatures:
            raise BadValue("program", self, "one that is compiled as a whole")
        index, leaves = calls.fit(signatures, tuple(inputs), dict(kwargs or {}))
        source = self.captures[index]
        specs = spec_tensors(signatures[index].specs)
        tensors = [calls.restride(leaves[i].detach(), spec) for i, spec in specs]
        return self._programs[index], [*tensors, *source.states.values()]

    def profile(
        self, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, repeat: int = 10
    ) -> Profile:
        """How long each launch takes on these inputs: `print(it)`, or `it.save("trace.json")`.

        Also what the page of `compiled.report` shows as measured. Inputs are not written.
        """
        from torchgraft.inspect.profile import profile

        program, values = self.program_for(inputs, kwargs)
        args, named = _torch.map_leaves(_copied, (tuple(inputs), dict(kwargs or {})))
        return profile(program, values, lambda: self(*args, **named), repeat)

    def explain(self) -> str:
        """Everything about this program as one text: inputs, report, graph, plan."""
        parts = []
        for source, program in zip(self.captures, self._programs, strict=True):
            parts += ["inputs:", *(f"  {s.name}: {s}" for s in source.signature.specs)]
            parts.append(_explain(program))
        return "\n".join(parts)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Use new weights from the next call on; all of them, or nothing changes.

        Frozen weights are folded into the code, so this compiles again where there are any; the
        generator's cache makes that much cheaper than the first time.
        """
        state_dict = groups.shards(state_dict)
        for source in self.captures:
            held = {name: weight.value for name, weight in source.weights.items()}
            held |= {name: state for name, state in source.states.items() if name in source.saved}
            check_weights(held, state_dict)
        for source in self.captures:
            with torch.no_grad():
                for name in source.states.keys() & source.saved:
                    source.states[name].copy_(state_dict[name])
        if not any(source.weights for source in self.captures):
            return
        programs = []
        for gm, source in self.fresh({name: t.detach() for name, t in state_dict.items()}):
            gm.meta["borrowed"] = meta.addresses(state_dict[name] for name in source.weights)
            programs.append(self.build(gm, source))
        self._link(programs)
        for source, program in zip(self.captures, programs, strict=True):
            _keep(source, program, state_dict)

    def save(
        self, path: str | os.PathLike[str], *, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write the program to a file that `graft.load` reads, on this kind of machine.

        Generated code is compiled once more, into libraries (see docs/package.md). A weight that is
        folded or packed is kept as it was, too, if need be by sharing the model's tensor; `weights`
        is needed only where such a tensor was written to since.

        >>> import tempfile, torch, torchgraft as graft
        >>> compiled = graft.compile(torch.nn.ReLU(), (torch.ones(3),), mode="eager")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     compiled.save(f"{folder}/relu.graft")
        ...     graft.load(f"{folder}/relu.graft")(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([0., 0., 2.])
        """
        from torchgraft.package.save import pack

        pack(self, self.originals(weights)).write(path)

    def script(self) -> torch.jit.ScriptModule:
        """The program as a ScriptModule, for `torch.jit.save`; it holds the package in a buffer.

        `torch.jit.load` gives it back in any process that has imported torchgraft.
        """
        from torchgraft.package.script import to_script

        return to_script(self)

    def originals(self, given: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The weights before anything was folded."""
        wanted = {n: w for source in self.captures for n, w in source.weights.items()}
        if given is not None:
            given = groups.shards(given)
            check_weights({n: w.value for n, w in wanted.items()}, given, extra=True)
            return {name: given[name] for name in wanted}
        if changed := [name for name, weight in wanted.items() if weight.origin.is_changed]:
            raise NotSavable(
                f"{len(changed)} of its weights (such as {changed[0]!r}) are folded into the code, "
                f"and the model's own were changed since",
                "Pass them as they were: compiled.save(path, weights=state_dict).",
            )
        return {name: weight.origin.tensor for name, weight in wanted.items()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotCopied(self.name)

    def __repr__(self) -> str:
        return f"<torchgraft.{type(self).__name__} {self.name}, mode {self.config.mode!r}>"


class Partial(Compiled):
    """A program with branches that stay in Python: what lies between them is compiled.

    A piece is compiled when it is first run, with what it then meets; another branch or another
    shape gets a piece of its own. Nothing is specialised that the call does not check.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        declared: Sequence[Declared],
        config: Config,
        branches: Sequence[script.Branch],
    ) -> None:
        super().__init__(name, "script", [], config)
        self._branches = branches
        self._module = copy.deepcopy(module) if config.freeze else module
        self._signatures = [checked(one) for one in declared]
        self._run = torch.compile(
            self._module, backend=backend(config, on_program=self._programs.append)
        )

    def _link(self, programs: list[Program]) -> None:
        self._programs, self._call = programs, self._checked

    def _checked(self, *args: Any, **kwargs: Any) -> Any:
        calls.fit(self._signatures, args, kwargs)
        with torch.no_grad(), _torch.no_autocast():
            return self._run(*args, **kwargs)

    def _first(self) -> Program:
        if not self._programs:
            raise NotYet(self.name, [f"{b.kind} on {b.on} at {b.line}" for b in self._branches])
        return self._programs[0]

    def explain(self) -> str:
        """The branches left in Python, and every piece compiled so far."""
        kept = [f"in Python: {b.kind} on {b.on} at {b.line}" for b in self._branches]
        return "\n".join([*kept, *map(_explain, self._programs)])

    def save(
        self, path: str | os.PathLike[str], *, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """Raise: the branches are Python, and a package holds none."""
        raise self.why_not_saved()

    def why_not_saved(self) -> NotSavable:
        """What `save` raises."""
        kept = ", ".join(f"{b.kind} on {b.on} at {b.line}" for b in self._branches)
        return NotSavable(
            f"it has branches that stay in Python ({kept})",
            "Write them with torch.cond or torch.where, or compile what lies between them.",
        )

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Use new weights from the next call on; all of them, or nothing changes."""
        check_weights(self._module.state_dict(), state_dict)
        self._module.load_state_dict(dict(state_dict))


def _keep(source: Capture, program: Program, weights: Mapping[str, Tensor]) -> None:
    """Note where the weights of a program are: its own copies, else the tensors it was made from,
    which are shared and not copied."""
    copies = program.linker.copies({name: weights[name] for name in source.weights})
    for name, weight in source.weights.items():
        origin = Origin(copies.get(name, weights[name]))
        source.weights[name] = dataclasses.replace(weight, origin=origin)


def _explain(program: Program) -> str:
    graph, plan = _indent(edit.text(program.gm)), _indent(str(program.plan))
    return f"{program.report}\ngraph:\n{graph}\nplan:\n{plan}"


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _guarded(source: Capture, gm_meta: Mapping[str, Any]) -> Signature:
    """The signature with what compiling assumed of the symbols."""
    ranges = source.signature.ranges
    if not ranges:
        return source.signature
    guards = tuple(
        (expr, line)
        for expr, line in _torch.shape_guards(gm_meta["fake_mode"])
        if {str(s) for s in expr.free_symbols} <= ranges.keys()
    )
    return dataclasses.replace(source.signature, guards=guards)


def _name(model: Any) -> str:
    if isinstance(model, torch.jit.ScriptModule):
        return str(getattr(model, "original_name", "ScriptModule"))
    return getattr(model, "__name__", type(model).__name__)


def _device_of(model: Any) -> torch.device:
    """Where the model's weights are: what a `graft.Input` without a device means."""
    if isinstance(model, torch.nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            return tensor.device
    return torch.device("cpu")


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
