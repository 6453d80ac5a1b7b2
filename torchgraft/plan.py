"""`Plan`: what runs. Steps over named streams and numbered buffers; prints as text, parses back.

A plan names its kernels and constants, it does not hold them, so its text is all of it. The text
is a Python function of a few verbs (`launch`, `record`, `wait`, `free`, and `collective` for a
launch that other ranks take part in) and reads as one.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.errors import BadPlan

if TYPE_CHECKING:
    from torchgraft.stream.prove import Hazard

MAIN = "main"
"""The stream of the caller."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A value of the plan, by number: a tensor, or a size."""

    index: int

    def __repr__(self) -> str:
        return f"b{self.index}"


@dataclasses.dataclass(frozen=True)
class Launch:
    """Run a kernel. With `unpack` its result is a sequence, of which each output is a part; an
    output of None is not used. Arguments in `writes` are written in place."""

    kernel: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[Buffer | None, ...]
    unpack: bool = False
    stream: str = MAIN
    writes: tuple[Buffer, ...] = ()

    @property
    def reads(self) -> set[Buffer]:
        """Every buffer among the arguments."""
        return set(buffers((self.args, dict(self.kwargs))))

    def __str__(self) -> str:
        names = ["_" if out is None else repr(out) for out in self.outputs]
        left = f"{', '.join(names)}{',' * (self.unpack and len(names) == 1)} = " if names else ""
        parts = [repr(self.stream), repr(self.kernel)]
        parts += [literal(arg, self.writes) for arg in self.args]
        parts += [f"{key}={literal(arg, self.writes)}" for key, arg in self.kwargs]
        return f"{left}launch({', '.join(parts)})"


@dataclasses.dataclass(frozen=True)
class Collective(Launch):
    """A launch that other ranks take part in: started, and over when its result is there.

    The group is its last argument, by a name that is the same on every rank."""

    kind: str = ""  # all_reduce, all_gather_into_tensor, ...
    type: str = ""  # of what it is given, such as f32[4, 8]
    nbytes: int | None = None  # of what it is given; None: known when it runs
    line: str | None = None  # of the model's code

    @property
    def group(self) -> str:
        return str(self.args[-1])

    def __str__(self) -> str:
        more = [f"kind={self.kind!r}", f"type={self.type!r}", f"nbytes={self.nbytes}"]
        more += [f"line={self.line!r}"] if self.line is not None else []
        return super().__str__().replace("launch(", "collective(", 1)[:-1] + f", {', '.join(more)})"


@dataclasses.dataclass(frozen=True)
class Record:
    """Mark the point that a stream has reached."""

    event: str
    stream: str = MAIN

    def __str__(self) -> str:
        return f"record({self.stream!r}, {self.event!r})"


@dataclasses.dataclass(frozen=True)
class Wait:
    """Hold a stream until a recorded point is reached."""

    event: str
    stream: str = MAIN

    def __str__(self) -> str:
        return f"wait({self.stream!r}, {self.event!r})"


@dataclasses.dataclass(frozen=True)
class Free:
    """The last use of a buffer on a stream is over."""

    buffer: Buffer
    stream: str = MAIN

    def __str__(self) -> str:
        return f"free({self.stream!r}, {self.buffer!r})"


PlanStep = Launch | Record | Wait | Free


@dataclasses.dataclass(frozen=True)
class Plan:
    """Steps in launch order. `inputs` are given by the caller, `constants` by the program."""

    inputs: tuple[Buffer, ...]
    constants: tuple[tuple[Buffer, str], ...]
    steps: tuple[PlanStep, ...]
    outputs: tuple[Any, ...]
    shared: tuple[tuple[Buffer, Buffer], ...] = ()  # a buffer, and an earlier one it may view

    def __post_init__(self) -> None:
        self.verify()

    @property
    def launches(self) -> list[Launch]:
        return [step for step in self.steps if isinstance(step, Launch)]

    @property
    def streams(self) -> list[str]:
        """The streams of the plan, the caller's first."""
        return [MAIN, *sorted({step.stream for step in self.steps} - {MAIN})]

    @property
    def collectives(self) -> list[Collective]:
        """What the ranks do together, in launch order."""
        return [step for step in self.steps if isinstance(step, Collective)]

    def hazards(self) -> list[Hazard]:
        """Pairs of steps that may race: none in a plan that a compiled program runs."""
        from torchgraft.stream.prove import hazards

        return hazards(self)

    def timeline(self) -> str:
        """The plan as a picture in text: a column a stream, a line a step, in launch order.

        What stands in different columns may run at the same time, unless a wait says otherwise.
        """
        columns = self.streams
        rows = [
            [_cell(step) if step.stream == stream else "" for stream in columns]
            for step in self.steps
            if not isinstance(step, Free)
        ]
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        lines = [columns, ["-" * width for width in widths], *rows]
        padded = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join(padded)

    def verify(self) -> None:
        """Raise `BadPlan` unless every buffer is written once, before its uses, freed at most once
        and after them, and every event is recorded before it is waited for."""
        live = set(self.inputs) | {buffer for buffer, _ in self.constants}
        made, events = set(live), set[str]()
        for number, step in enumerate(self.steps):
            if isinstance(step, Launch):
                for used in step.reads:
                    if used not in live:
                        what = "freed before" if used in made else "never written"
                        raise self._bad(number, f"{used} is used but was {what}")
                for out in step.outputs:
                    if out is not None and out in made:
                        raise self._bad(number, f"{out} is written twice")
                fresh = {out for out in step.outputs if out is not None}
                live |= fresh
                made |= fresh
            elif isinstance(step, Free):
                if step.buffer not in live:
                    raise self._bad(number, f"{step.buffer} is freed but is not alive")
                live.discard(step.buffer)
            elif isinstance(step, Record):
                events.add(step.event)
            elif step.event not in events:
                raise self._bad(number, f"event {step.event!r} is waited for before it is recorded")
        for used in buffers(self.outputs):
            if used not in live:
                raise BadPlan("return", f"{used} is returned but is not alive")

    def _bad(self, number: int, what: str) -> BadPlan:
        return BadPlan(f"step {number} ({self.steps[number]})", what)

    def __str__(self) -> str:
        lines = [f"def plan({', '.join(map(repr, self.inputs))}):"]
        lines += [f"    {buffer} = constant({name!r})" for buffer, name in self.constants]
        shared = dict(self.shared)
        for step in self.steps:
            lines.append(f"    {step}")
            made = step.outputs if isinstance(step, Launch) else ()
            lines += [f"    shares({out}, {shared[out]})" for out in made if out in shared]
        return "\n".join([*lines, f"    return {literal(self.outputs)}"])

    @staticmethod
    def parse(text: str) -> Plan:
        """The plan of a text that `str(plan)` gave. Nothing in the text is run."""
        try:
            [function] = ast.parse(text).body
        except (SyntaxError, ValueError) as error:
            raise BadPlan("text", f"not a plan: {error}") from None
        if not isinstance(function, ast.FunctionDef):
            raise BadPlan("line 1", "expected `def plan(...):`")
        inputs = tuple(_buffer(arg, arg.arg) for arg in function.args.args)
        constants: list[tuple[Buffer, str]] = []
        steps: list[PlanStep] = []
        shared: list[tuple[Buffer, Buffer]] = []
        outputs: tuple[Any, ...] | None = None
        for line in function.body:
            if isinstance(line, ast.Return):
                outputs = tuple(_value(line.value))
                continue
            step = _step(line)
            if isinstance(step, tuple) and isinstance(step[1], Buffer):
                shared.append((step[0], step[1]))
            elif isinstance(step, tuple):
                constants.append((step[0], str(step[1])))
            else:
                steps.append(step)
        if outputs is None:
            raise BadPlan("text", "there is no return")
        return Plan(inputs, tuple(constants), tuple(steps), outputs, tuple(shared))


def _cell(step: PlanStep) -> str:
    if isinstance(step, Launch):
        return step.kernel
    verb = "record" if isinstance(step, Record) else "wait"
    return f"{verb} {step.event}" if isinstance(step, (Record, Wait)) else ""


def buffers(tree: Any) -> Iterator[Buffer]:
    """Every buffer in nested lists, tuples and dicts."""
    if isinstance(tree, Buffer):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from buffers(item)
    elif isinstance(tree, dict):
        yield from buffers(list(tree.values()))


# --- Text ---

_OBJECTS = (torch.dtype, torch.layout, torch.memory_format)


def is_literal(value: Any) -> bool:
    """Whether a single value has a text form."""
    plain = (bool, int, float, complex, str, type(None), torch.device)
    return isinstance(value, _OBJECTS) or type(value) in plain


def literal(value: Any, written: tuple[Buffer, ...] = ()) -> str:
    """A constant or a tree of buffers as the text that `Plan.parse` reads back."""
    if isinstance(value, (tuple, list)):
        inner = ", ".join(literal(item, written) for item in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, torch.device):
        return f"device({str(value)!r})"
    if isinstance(value, float):
        return repr(value) if value - value == 0 else f"float({str(value)!r})"
    if isinstance(value, complex):
        return f"complex({str(value)!r})"
    if isinstance(value, Buffer):
        return f"write({value})" if value in written else repr(value)
    if is_literal(value):
        return repr(value)
    raise BadPlan("text", f"no text form for {value!r} ({type(value).__name__})")


_CALLS = {"device": torch.device, "float": float, "complex": complex}


def _value(node: ast.AST | None, written: list[Buffer] | None = None) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List):
        return [_value(item, written) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_value(item, written) for item in node.elts)
    if isinstance(node, ast.Name):
        return _buffer(node, node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        found = getattr(torch, node.attr, None) if node.value.id == "torch" else None
        if isinstance(found, _OBJECTS):
            return found
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
        argument = _value(node.args[0])
        if node.func.id == "write" and written is not None and isinstance(argument, Buffer):
            written.append(argument)
            return argument
        if node.func.id in _CALLS and isinstance(argument, str):
            try:
                return _CALLS[node.func.id](argument)
            except (ValueError, RuntimeError) as error:
                raise BadPlan(_line(node), str(error)) from None
    raise BadPlan(_line(node), f"not a value: {ast.unparse(node) if node else 'nothing'}")


_ABOUT = ("kind", "type", "nbytes", "line")


def _step(line: ast.stmt) -> PlanStep | tuple[Buffer, str | Buffer]:
    names: list[ast.expr] = []
    unpack = False
    if isinstance(line, ast.Assign) and len(line.targets) == 1:
        [target] = line.targets
        unpack = isinstance(target, ast.Tuple)
        names = target.elts if isinstance(target, ast.Tuple) else [target]
    call = line.value if isinstance(line, (ast.Assign, ast.Expr)) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise BadPlan(_line(line), f"not a step: {ast.unparse(line)}")
    outputs = tuple(
        None if isinstance(name, ast.Name) and name.id == "_" else _value(name) for name in names
    )
    written: list[Buffer] = []
    args = [_value(arg, written) for arg in call.args]
    verb, strings = call.func.id, [a for a in args if isinstance(a, str)]
    if verb == "constant" and len(outputs) == len(args) == len(strings) == 1 and outputs[0]:
        return outputs[0], strings[0]
    if verb in ("launch", "collective") and len(args) >= 2 and args[:2] == strings[:2]:
        named = {str(k.arg): _value(k.value, written) for k in call.keywords}
        about = {key: named.pop(key) for key in _ABOUT if verb == "collective" and key in named}
        parts = (tuple(args[2:]), tuple(named.items()), outputs, unpack, args[0])
        writes = tuple(dict.fromkeys(written))
        if verb == "launch":
            return Launch(args[1], *parts, writes)
        if len(args) == 2 or not isinstance(args[-1], str):
            raise BadPlan(_line(line), "the last argument of a collective names its group")
        return Collective(args[1], *parts, writes, **about)
    if verb == "shares" and len(args) == 2 and all(isinstance(a, Buffer) for a in args):
        return args[0], args[1]
    if verb == "record" and len(args) == len(strings) == 2:
        return Record(args[1], args[0])
    if verb == "wait" and len(args) == len(strings) == 2:
        return Wait(args[1], args[0])
    if verb == "free" and len(args) == 2 and isinstance(args[1], Buffer):
        return Free(args[1], args[0])
    raise BadPlan(_line(line), f"not a step: {ast.unparse(line)}")


def _buffer(node: ast.AST, name: str) -> Buffer:
    if name[:1] == "b" and name[1:].isdecimal():
        return Buffer(int(name[1:]))
    raise BadPlan(_line(node), f"{name!r} is not a buffer (b0, b1, ...)")


def _line(node: ast.AST | None) -> str:
    return f"line {getattr(node, 'lineno', 1)}"
