"""One class per mistake. Each message says where, what (with values), and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GraftError(Exception):
    """The base of every error that torchgraft raises on purpose."""


def first_line(error: BaseException) -> str:
    """An exception in one line: its type and the first line of what it says."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def _list(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


_LISTED, _NEAREST = 40, 5  # so many names are shown; of more, so many that look alike


class UnknownName(GraftError):
    """A name in a config, a stage, an option or a pass order that nothing answers to."""

    def __init__(self, kind: str, name: object, known: Iterable[str], where: str = "") -> None:
        self.kind, self.name, self.known = kind, name, tuple(sorted(known))
        near = difflib.get_close_matches(str(name), self.known, n=_NEAREST)
        prefix = f"{where}: " if where else ""
        hint = f"Did you mean {near[0]!r}? " if near else ""
        many = f"{len(self.known)} names, the nearest are {_list(near)}"
        listed = _list(self.known) if len(self.known) <= _LISTED else many
        super().__init__(f"{prefix}unknown {kind} {name!r}. {hint}Known: {listed}.")


class BadValue(GraftError):
    """A config field or an argument holds a value that it cannot take."""

    def __init__(self, field: str, value: object, want: str) -> None:
        self.field, self.value, self.want = field, value, want
        super().__init__(f"{field}: expected {want}, got {value!r} ({type(value).__name__}).")


class InputMismatch(GraftError):
    """A call does not fit the inputs that the program was compiled for."""

    def __init__(
        self, name: str, declared: str, got: str, fix: str, *, is_size: bool = False
    ) -> None:
        self.name, self.declared, self.got, self.fix = name, declared, got, fix
        self.is_size = is_size  # another size would fit: another gear might
        super().__init__(f"input {name!r}: declared {declared}, got {got}.\n{fix}")


class CannotCapture(GraftError):
    """The program could not be turned into a graph."""

    def __init__(self, program: str, why: str, line: str | None, fix: str) -> None:
        self.program, self.why, self.line, self.fix = program, why, line, fix
        at = f"\n  at {line}" if line else ""
        super().__init__(f"cannot capture {program}: {why}{at}\n{fix}")


class Specialised(GraftError):
    """A dimension declared dynamic turned out to be fixed by the program."""

    def __init__(self, name: str, dim: int, declared: str, size: str) -> None:
        self.name, self.dim, self.declared, self.size = name, dim, declared, size
        super().__init__(
            f"input {name!r}, dim {dim}: declared {declared}, but the program as it was traced "
            f"only works for {size} (it branches on that size, or needs it to fit another one).\n"
            f"Declare that size, use gears=[...] (one program per shape), or change the program."
        )


class ExportedOtherwise(GraftError):
    """Inputs that an exported program was not exported for."""

    def __init__(self, name: str, exported: str, declared: str) -> None:
        self.name, self.exported, self.declared = name, exported, declared
        super().__init__(
            f"input {name!r}: the program was exported for {exported}; declared is {declared}.\n"
            f"Export it again for these inputs, or declare none: an exported program has its own."
        )


class UnsupportedFile(GraftError):
    """A path that is not a program torchgraft can load."""

    def __init__(self, path: object, why: str, fix: str) -> None:
        self.path, self.why, self.fix = path, why, fix
        super().__init__(f"cannot load {path}: {why}\n{fix}")


class BadPass(GraftError):
    """A pass that cannot be registered."""

    def __init__(self, name: str, why: str, fix: str) -> None:
        self.name, self.why, self.fix = name, why, fix
        super().__init__(f"pass {name!r}: {why}\n{fix}")


class PassOrder(GraftError):
    """The before/after wishes of the passes contradict each other."""

    def __init__(self, cycle: Iterable[str]) -> None:
        self.cycle = tuple(cycle)
        super().__init__(
            f"passes cannot be ordered: {' -> '.join(self.cycle)}.\n"
            f"Remove one of these before=/after= (every 'pre' pass runs before the built-in ones, "
            f"every 'post' pass after them)."
        )


class PassFailed(GraftError):
    """A pass raised; the original exception is chained."""

    def __init__(self, name: str, stage: str, where: str, cause: BaseException) -> None:
        self.name, self.stage, self.where = name, stage, where
        super().__init__(
            f"pass {name!r} (stage {stage!r}, {where}) raised {type(cause).__name__}: {cause}"
        )


class BrokenGraph(GraftError):
    """A pass left a graph that cannot run."""

    def __init__(self, name: str, node: str, why: str) -> None:
        self.name, self.node, self.why = name, node, why
        super().__init__(
            f"pass {name!r} left a broken graph: node {node!r}: {why}\n"
            f"The graph must be valid again when the pass returns; see `compiled.report` of a run "
            f"without this pass for the graph that it is given."
        )


class NotFound(GraftError):
    """A pass asked for a node that the graph does not hold (or holds several times)."""

    def __init__(self, target: str, count: int, present: Iterable[str]) -> None:
        self.target, self.count, self.present = target, count, tuple(present)
        super().__init__(
            f"expected exactly one {target} in the graph, found {count}. "
            f"The graph has: {', '.join(self.present) or 'no calls'}.\n"
            f"Use graph.all({target}) to handle any number."
        )


class BadPlan(GraftError):
    """A plan that cannot run, or text that is not a plan."""

    def __init__(self, where: str, why: str) -> None:
        self.where, self.why = where, why
        super().__init__(f"plan, {where}: {why}")


class UnorderedUse(GraftError):
    """Two steps of a plan touch one memory on different streams and nothing orders them."""

    def __init__(self, buffer: str, kind: str, first: str, second: str) -> None:
        self.buffer, self.kind, self.first, self.second = buffer, kind, first, second
        super().__init__(
            f"{kind} of {buffer}: nothing orders\n  {second}\nafter\n  {first}\n"
            f"Record an event after the first and wait for it before the second, or leave events "
            f"out: with `graft.stream` and `graph.place`, torchgraft places every wait."
        )


class BadMarker(GraftError):
    """A stream scope, a record, a wait or an event that has no meaning where it stands."""

    def __init__(self, marker: str, why: str) -> None:
        self.marker, self.why = marker, why
        super().__init__(f"{marker}: {why}.")


class OrderCycle(GraftError):
    """Nodes were told to wait for each other in a circle."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self.nodes = tuple(nodes)
        steps = "\n".join(f"  {node}" for node in (*self.nodes, self.nodes[0]))
        super().__init__(
            f"each of these must come before the next:\n{steps}\n"
            f"Take back one graph.order, or one wait."
        )


class NotYet(GraftError):
    """A program that is compiled piece by piece has not run, so there is nothing to show."""

    def __init__(self, program: str, branches: Iterable[str]) -> None:
        self.program, self.branches = program, tuple(branches)
        super().__init__(
            f"{program} has branches that stay in Python ({'; '.join(self.branches)}), so its "
            f"pieces are compiled as they are first run.\nCall it once, then ask again."
        )


class NotCopied(GraftError):
    """A compiled program was to be copied or pickled."""

    def __init__(self, program: str) -> None:
        self.program = program
        super().__init__(
            f"{program} is compiled: its code cannot be copied or pickled.\n"
            f"Copy or save the model (torch.export.save), and compile that."
        )


class WeightMismatch(GraftError):
    """New weights do not fit the compiled program."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        lines = "\n  ".join(self.problems)
        super().__init__(
            f"load_state_dict: the weights do not fit the compiled program:\n  {lines}\n"
            f"Nothing was changed."
        )


class UnsupportedScript(GraftError):
    """A TorchScript program holds a node that has no Python spelling here."""

    def __init__(self, kind: str, line: str, why: str) -> None:
        self.kind, self.line, self.why = kind, line, why
        super().__init__(
            f"{line or 'TorchScript'}: cannot translate {kind}: {why}.\n"
            f"Keep this module in torch, or rewrite that line and script it again."
        )


class BadConverter(GraftError):
    """A converter that cannot be registered."""

    def __init__(self, name: str, why: str, fix: str) -> None:
        self.name, self.why, self.fix = name, why, fix
        super().__init__(f"converter {name!r}: {why}.\n{fix}")


class BadConversion(GraftError):
    """A converter gave something of another type than the call it converts."""

    def __init__(self, converter: str, node: str, want: str, got: str) -> None:
        self.converter, self.node, self.want, self.got = converter, node, want, got
        super().__init__(
            f"converter {converter} gave another type:\n  wanted {want} for {node}\n"
            f"  got {got}\n"
            f"Give a value of that type, or raise graft.Declined(reason) to leave it to torch."
        )


class ConverterFailed(GraftError):
    """A converter raised; the original exception is chained."""

    def __init__(self, converter: str, node: str, cause: BaseException) -> None:
        self.converter, self.node = converter, node
        super().__init__(
            f"converter {converter} raised {type(cause).__name__}: {cause}\n  on {node}\n"
            f"Mend it, or raise graft.Declined(reason) to leave the call to torch."
        )


class Declined(GraftError):
    """What a converter raises to leave a call to the next one, with its reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class NotCompiled(GraftError):
    """`require_full_compilation` is on, and some nodes run on ATen."""

    def __init__(self, program: str, culprits: Iterable[str]) -> None:
        self.program, self.culprits = program, tuple(culprits)
        lines = "\n  ".join(self.culprits)
        super().__init__(
            f"{program}: {len(self.culprits)} nodes were not compiled:\n  {lines}\n"
            f"Change the model there, write a converter, or leave require_full_compilation off."
        )


class ResultChanged(GraftError):
    """A rewrite changed what a program computes."""

    def __init__(
        self, by: str, what: str, node: str, line: str | None, error: str, script: str | None
    ) -> None:
        self.by, self.what, self.node, self.line = by, what, node, line
        self.error, self.script = error, script
        at = f"\n  at {line}" if line else ""
        run = f"\nReproduce it with: python {script}" if script else ""
        super().__init__(
            f"{by} changed the result: {what}{at}\n  {error}{run}\n"
            f"Mend it, or go on without it: verify='pin' does."
        )


class BadPrototype(GraftError):
    """An operator prototype (a REG_OP header or a JSON file) that cannot be read."""

    def __init__(self, where: str, found: str, expected: str) -> None:
        self.where, self.found, self.expected = where, found, expected
        super().__init__(f"{where}: found {found}, expected {expected}.")


class WrongDtype(GraftError):
    """An input of an op has a dtype that its prototype does not allow."""

    def __init__(
        self, op: str, name: str, dtype: str, allowed: Iterable[str], why: str = ""
    ) -> None:
        self.op, self.name, self.dtype, self.why = op, name, dtype, why
        self.allowed = tuple(allowed)
        because = f" ({why})" if why else ""
        super().__init__(
            f"{op}: input {name!r} is {dtype}; allowed: {', '.join(self.allowed)}{because}.\n"
            f"Convert the input with .to(...), or widen the prototype."
        )


class NotRegistered(GraftError):
    """An op was called by name and nothing has declared it."""

    def __init__(self, op: str, known: Iterable[str]) -> None:
        self.op = op
        space, _, name = op.rpartition("::")
        near = difflib.get_close_matches(name, [k for k in known if not k.startswith("_")], n=1)
        hint = f" Did you mean '{space}::{near[0]}'?" if near else ""
        super().__init__(
            f"{op} is not registered.{hint}\n"
            f"Load its prototype first, or declare it with @graft.op({op!r})."
        )


class BadFile(GraftError):
    """A file that declares operators holds entries that cannot be read."""

    def __init__(self, path: str, problems: Iterable[str], anyway: str) -> None:
        self.path, self.problems = path, tuple(problems)
        shown = [f"  {problem}" for problem in self.problems[:20]]
        if len(self.problems) > len(shown):
            shown.append(f"  and {len(self.problems) - len(shown)} more")
        entries = "1 entry" if len(self.problems) == 1 else f"{len(self.problems)} entries"
        lines = "\n".join(shown)
        super().__init__(
            f"{path}: {entries} cannot be read, so nothing was registered.\n{lines}\n"
            f"Mend them, or register the others with {anyway}."
        )


class Clash(GraftError):
    """One op is declared twice, differently."""

    def __init__(self, op: str, first: tuple[str, str], second: tuple[str, str]) -> None:
        self.op, self.first, self.second = op, first, second
        said = [
            "\n".join([f"  {where}:", *(f"    {line}" for line in text.splitlines())])
            for where, text in (first, second)
        ]
        super().__init__(
            f"{op} is declared twice, and differently:\n{said[0]}\n{said[1]}\n"
            f"Nothing was registered from the second. Make them equal, or rename one."
        )


class NoKernel(GraftError):
    """An op was run on a device that it has no kernel for."""

    def __init__(
        self, schema: str, where: str, device: str, has: Iterable[str], arguments: str
    ) -> None:
        self.op = op = schema.partition("(")[0]
        self.where, self.device, self.has = where, device, tuple(has)
        others = f"; it has one for {', '.join(self.has)}" if self.has else ""
        space, _, name = op.partition("::")
        key = device.upper() if device in ("cpu", "cuda") else "PrivateUse1"
        super().__init__(
            f"{op} ({where}) has no kernel for {device}{others}.\n"
            f"Write one in Python:\n  @graft.op({schema!r})\n"
            f"  def {name}({arguments}): ...\n"
            f"or in C++: TORCH_LIBRARY_IMPL({space}, {key}, m) "
            f'{{ m.impl("{name}", &kernel); }}'
        )


class NoShapes(GraftError):
    """An op was traced and nothing says which shapes it returns."""

    def __init__(self, op: str, where: str, arguments: str) -> None:
        self.op, self.where = op, where
        super().__init__(
            f"{op} ({where}) cannot be traced: nothing says which shapes it returns.\n"
            f"Declare it with @graft.op({op!r}) and a body, or give the shapes alone:\n"
            f"  @torch.library.register_fake({op!r})\n"
            f"  def _({arguments}): return torch.empty_like(...)"
        )


class BadCall(GraftError):
    """A kernel was called with a wrong number of arguments."""

    def __init__(self, op: str, where: str, count: int, names: Iterable[str]) -> None:
        self.op, self.where, self.count, self.names = op, where, count, tuple(names)
        super().__init__(
            f"{op} ({where}) was called with {count} arguments.\n"
            f"Pass {', '.join(self.names)}, in this order; the outputs may be left out."
        )


class MissingPackage(GraftError):
    """A feature needs a package that is not installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        self.feature, self.package, self.extra = feature, package, extra
        super().__init__(
            f"{feature} needs {package}.\nInstall it with: pip install 'torchgraft[{extra}]'"
        )


class BadOp(GraftError):
    """An operator that cannot be declared as it is written."""

    def __init__(self, op: str, where: str, why: str, fix: str) -> None:
        self.op, self.where, self.why, self.fix = op, where, why, fix
        super().__init__(f"{where}: operator {op!r}: {why}\n{fix}")


class SignatureMismatch(GraftError):
    """A kernel, a fake or a backward that does not take what the reference takes."""

    def __init__(
        self, op: str, part: str, where: str, against: str, differences: Iterable[str]
    ) -> None:
        self.op, self.part, self.where, self.against = op, part, where, against
        self.differences = tuple(differences)
        lines = "\n  ".join(self.differences)
        super().__init__(
            f"{where}: {part} of operator {op!r} does not fit {against}:\n"
            f"  {lines}\nGive both the same parameters, in the same order, with the same defaults."
        )


class AmbiguousKernel(GraftError):
    """Two kernels of one operator for one device, and nothing says which comes first."""

    def __init__(self, op: str, device: str, first: str, second: str, priority: int) -> None:
        self.op, self.device, self.first, self.second = op, device, first, second
        self.priority = priority
        super().__init__(
            f"operator {op!r} has two kernels for {device!r} with priority {priority}:\n"
            f"  {first}\n  {second}\n"
            f"Give one of them a higher priority=; the highest whose when= accepts a call is used."
        )


class KernelBuild(GraftError):
    """The C++ or CUDA source of a kernel does not compile, link or register."""

    def __init__(self, op: str, source: str, said: str, log: str = "") -> None:
        self.op, self.source, self.said, self.log = op, source, said, log
        more = f"\nAll of what the compiler said: {log}" if log else ""
        super().__init__(f"kernel of operator {op!r} ({source}) does not build:\n  {said}{more}")


class NativeBuild(GraftError):
    """The C++ part of torchgraft cannot be built on this machine."""

    def __init__(self, target: str, said: str, log: str = "") -> None:
        self.target, self.said, self.log = target, said, log
        more = f"\nAll of what was said: {log}" if log else ""
        super().__init__(f"native target {target!r} does not build:\n  {said}{more}")


class BadGradient(GraftError):
    """A backward returned gradients that do not fit the inputs."""

    def __init__(self, op: str, where: str, why: str) -> None:
        self.op, self.where, self.why = op, where, why
        super().__init__(
            f"{where}: backward of operator {op!r}: {why}\n"
            f"Return one gradient for each tensor parameter, in their order, each of the shape of "
            f"its parameter; None where there is none."
        )


class CheckFailed(GraftError):
    """`graft.check` found that an operator is not right somewhere."""

    def __init__(self, table: str, misses: Iterable[str]) -> None:
        self.misses = tuple(misses)
        super().__init__(table)


class BadPattern(GraftError):
    """A pattern that could never match, or whose text cannot be read."""

    def __init__(self, name: str, why: str, fix: str, line: int = 0, column: int = 0) -> None:
        self.name, self.why, self.fix = name, why, fix
        self.line, self.column = line, column
        at = f", line {line}, column {column}" if line else ""
        super().__init__(f"pattern {name!r}{at}: {why}\n{fix}")


class BadReplacement(GraftError):
    """A pattern's replacement gives other values than the ones it replaces, by count or type."""

    def __init__(self, name: str, which: str, want: str, got: str, where: str, fix: str) -> None:
        self.name, self.which, self.want, self.got, self.where = name, which, want, got, where
        super().__init__(f"pattern {name!r} at {where}: {which} must be {want}, got {got}.\n{fix}")


class NoMatch(GraftError):
    """Raised by a replacement to refuse a match; the report has the reason.

    `node` is the graph's node to blame, if there is one: `m.node("clamp")`.
    """

    def __init__(self, reason: str, node: object = None) -> None:
        self.reason, self.node = reason, node
        super().__init__(reason)


class PatternChanged(GraftError):
    """`pattern.check()`: the replacement gives another result than the pattern."""

    def __init__(
        self, name: str, why: str, inputs: dict[str, object], shown: Iterable[str]
    ) -> None:
        self.name, self.why, self.inputs = name, why, inputs
        lines = "\n".join(f"  {line}" for line in shown)
        super().__init__(
            f"pattern {name!r}: the replacement gives another result than the pattern: {why}\n"
            f"{lines}\n"
            f"`error.inputs` holds these values; mend the replacement, or refuse such inputs with "
            f"graft.NoMatch."
        )


class NeverFired(GraftError):
    """`pattern.check()` drew inputs and the replacement refused all of them."""

    def __init__(self, name: str, reasons: Iterable[str]) -> None:
        self.name, self.reasons = name, tuple(reasons)
        lines = "\n  ".join(self.reasons[:4]) or "no inputs could be drawn"
        super().__init__(
            f"pattern {name!r}: nothing was checked, every drawn input was refused:\n  {lines}\n"
            f"Say which values to use: pattern.check(lo=-128, hi=127, x=torch.randn(2, 3))."
        )


class WouldShadow(GraftError):
    """An Ascend package is really installed, and a stand-in would hide it."""

    def __init__(self, found: dict[str, str]) -> None:
        self.found = dict(found)
        where = "".join(f"\n  {name}: {place}" for name, place in self.found.items())
        super().__init__(
            f"installed here, and would be hidden:{where}\n"
            f"Run the script with plain python, or say install(force=True) (--force) to hide them."
        )


class NotOnThisDevice(GraftError, NotImplementedError):
    """Something of an Ascend package that needs the real device."""

    def __init__(self, feature: str, nearest: str) -> None:
        self.feature, self.nearest = feature, nearest
        super().__init__(f"{feature} needs an NPU. {nearest}")


class NoProgram(GraftError):
    """A page was asked of a report whose program is gone."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"report of {name!r}: its program is gone, and the graphs and the plan were the "
            f"program's.\nUse compiled.report, which keeps its program, or compile with "
            f"Config(report='folder')."
        )


class NotSavable(GraftError):
    """A compiled program cannot be written to a file."""

    def __init__(self, why: str, fix: str) -> None:
        self.why, self.fix = why, fix
        super().__init__(f"the program cannot be saved: {why}.\n{fix}".rstrip())


class BadPackage(GraftError):
    """A file is not a package, or not the one that was written."""

    def __init__(self, why: str, path: object = None) -> None:
        self.why, self.path = why, path
        where = f"{path}: " if path is not None else ""
        super().__init__(
            f"{where}not a package that can be loaded: {why}.\n"
            f"Copy it again from where it was saved, or save it again with compiled.save(path)."
        )


class WrongMachine(GraftError):
    """A package was made for another torch, another device or another processor."""

    def __init__(self, path: object, needs: str, has: str, fix: str) -> None:
        self.path, self.needs, self.has, self.fix = path, needs, has, fix
        super().__init__(f"{path}: it needs {needs}, here is {has}.\n{fix}")


class MissingLibrary(GraftError):
    """A package calls operators that nobody has registered, or that another library registered."""

    def __init__(self, path: object, ops: Iterable[str], library: str | None, why: str) -> None:
        self.path, self.ops, self.library, self.why = path, tuple(ops), library, why
        fix = (
            f"Load it first: torch.ops.load_library(.../{library!r})."
            if library is not None
            else "Import the Python module that declares them first."
        )
        super().__init__(f"{path}: it calls {', '.join(self.ops)}, {why}.\n{fix}")


# --- Several ranks ---


def _at(line: str | None) -> str:
    return f" at {line}" if line else ""


class NoGroup(GraftError):
    """A collective of a program names a process group that this process does not have."""

    def __init__(self, call: str, line: str | None, name: str, known: Iterable[str]) -> None:
        self.call, self.line, self.name, self.known = call, line, name, tuple(known)
        if not self.known:
            why = "torch.distributed is not initialised in this process"
            fix = "Start it with torchrun and call torch.distributed.init_process_group() first."
        else:
            near = difflib.get_close_matches(name, self.known, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            why = f"this process has no group {name!r}. {hint}Known: {_list(self.known)}"
            fix = (
                f"Make it first: init_device_mesh(..., mesh_dim_names=({name!r},)), or "
                f"new_group(ranks, group_desc={name!r})."
            )
        super().__init__(f"{call}{_at(line)}: {why}.\n{fix}")


class WrongGroup(GraftError):
    """A process group has another number of ranks than the program was compiled for."""

    def __init__(self, call: str, line: str | None, name: str, want: int, has: int) -> None:
        self.call, self.line, self.name, self.want, self.has = call, line, name, want, has
        super().__init__(
            f"{call}{_at(line)}: it was compiled for {want} ranks, group {name!r} has {has}.\n"
            f"Start it with groups of that size, or compile it again for these."
        )


class RanksDiffer(GraftError):
    """The ranks of a group would not do the same collectives; found before the first of them."""

    def __init__(self, group: str, step: int, rank: int, has: str, other: str, fix: str) -> None:
        self.group, self.step, self.rank = group, step, rank
        self.has, self.other = has, other
        super().__init__(
            f"the ranks of group {group!r} differ from step {step} of the plan on:\n"
            f"  rank {rank}: {has}\n  {other}\n{fix}"
        )


class CollectiveFailed(GraftError):
    """A collective did not come to its end: a rank died, stalled or never came."""

    def __init__(
        self,
        call: str,
        group: str,
        step: int,
        line: str | None,
        rank: int,
        guilty: Iterable[int],
        why: str,
    ) -> None:
        self.call, self.group, self.step, self.line = call, group, step, line
        self.rank, self.guilty, self.why = rank, tuple(guilty), why
        super().__init__(
            f"{call} in group {group!r} (step {step} of the plan){_at(line)} failed on rank "
            f"{rank}: {why}\n"
            f"Look for the first error of "
            f"{'that rank' if len(self.guilty) == 1 else 'the other ranks'}; then start all of "
            f"them again. init_process_group(timeout=...) says how long to wait."
        )
