"""What a compile did, as data and as text: every pass, every node, where it runs and why."""

from __future__ import annotations

import collections
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchgraft.program import Program

RECENT = 64
"""How many programs `reports()` remembers at most."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One pass or pattern: what it cost and how many nodes it added, removed and changed.

    A pattern also has its hits (the lines of what it matched) and its nearest miss, as text.
    """

    name: str
    stage: str
    seconds: float
    added: int
    removed: int
    changed: int
    nodes: int
    hits: tuple[str, ...] | None = None
    miss: str = ""


@dataclasses.dataclass(frozen=True)
class Placed:
    """One node of the final graph: where it runs, and why there."""

    node: str
    op: str
    runs: str  # "generated", "kernel" (a custom operator's own) or "aten"
    region: str
    reason: str
    line: str | None
    kind: str = ""  # one of `KINDS`
    stream: str = "main"


KINDS = (
    "generated",  # by the code generator
    "custom operator",  # launched as its own kernel
    "collective",  # done by torch.distributed
    "copy",  # made so that nobody writes what another reads
    "part",  # of an input: an address, and nothing is launched for it
    "control flow",  # its branches are compiled, each as a program of its own
    "mode",  # mode "eager"
    "unsupported",  # the generator does not take it
    "failed",  # the generator raised
    "forced op",  # torch_executed_ops
    "forced module",  # torch_executed_modules
    "forced block",  # with graft.fallback()
    "small block",  # min_block_size
    "non-tensor link",  # tied to a node on ATen by something that is no tensor
    "declined",  # unsupported, and every converter said no
    "pinned",  # verify="pin" found another result
)
"""Why a node runs where it runs: one of these for each."""


@dataclasses.dataclass(frozen=True)
class Conversion:
    """One converter asked about one node; `reason` says why it declined, None: it converted."""

    node: str
    op: str
    converter: str
    where: str
    reason: str | None
    line: str | None


@dataclasses.dataclass(frozen=True)
class Trial:
    """One way that `max-autotune` timed: the median, and the spread of its timings over it."""

    what: str  # "the program", or a region
    name: str
    seconds: float
    spread: float
    kept: bool


@dataclasses.dataclass
class Report:
    """What happened to one graph. `str(report)` is the text for people."""

    name: str
    front_end: str
    mode: str
    device: str = "cpu"
    steps: list[Step] = dataclasses.field(default_factory=list)
    nodes: list[Placed] = dataclasses.field(default_factory=list)
    conversions: list[Conversion] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    trials: list[Trial] = dataclasses.field(default_factory=list)
    program: Callable[[], Program | None] = dataclasses.field(
        default=lambda: None, repr=False, compare=False
    )
    """What this is about. A program's own report does not keep it alive; `compiled.report` does."""

    def held(self, program: Program) -> Report:
        """This report, keeping the program alive; it shares all that is noted later."""
        return dataclasses.replace(self, program=lambda: program)

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write all of it as one page that opens from disk: steps, graphs, matches, plan, kernels.

        The graphs and the plan are the program's, so it must still be alive.
        """
        from torchgraft.inspect.page import write

        write(path, self)

    def data(self) -> dict[str, Any]:
        """The same as plain data, for `json.dumps`."""
        from torchgraft.inspect.page import data

        return data(self)

    @property
    def compiled(self) -> list[Placed]:
        """Nodes that run as generated code or as a custom operator's own kernel."""
        return [node for node in self.nodes if node.runs != "aten"]

    @property
    def fallbacks(self) -> list[Placed]:
        """Nodes that run on ATen, each with its reason."""
        return [node for node in self.nodes if node.runs == "aten"]

    @property
    def regions(self) -> list[str]:
        """The regions handed to the code generator."""
        names = (node.region for node in self.nodes if node.runs == "generated")
        return list(dict.fromkeys(names))

    @property
    def coverage(self) -> float:
        """The share of nodes that were compiled; 0 when nothing was."""
        return len(self.compiled) / len(self.nodes) if self.nodes else 0.0

    @property
    def matches(self) -> dict[str, int]:
        """How often each pattern matched, by name; every pattern that was tried is here."""
        return {step.name: len(step.hits) for step in self.steps if step.hits is not None}

    def __str__(self) -> str:
        lines = [
            f"{self.name} ({self.front_end}, mode {self.mode}, {self.device}): "
            f"{len(self.nodes)} nodes, {len(self.compiled)} compiled in "
            f"{len(self.regions)} region{'s' * (len(self.regions) != 1)}, "
            f"{len(self.fallbacks)} on ATen"
        ]
        lines += [f"  {part}: {took:.3f} s" for part, took in self.seconds.items()]
        for step in self.steps:
            if step.added or step.removed or step.changed:
                lines.append(
                    f"  {step.stage} pass {step.name}: +{step.added} -{step.removed} "
                    f"~{step.changed} -> {step.nodes} nodes"
                )
        lines += [f"  {_found(step)}" for step in self.steps if step.hits is not None]
        reasons = collections.Counter(
            (node.op, node.kind, node.reason) for node in self.nodes if node.runs != "generated"
        )
        for (op, kind, reason), count in reasons.most_common():
            why = reason if reason.startswith(kind) else f"{kind}: {reason}"
            lines.append(f"  {count} x {op}: {why}")
        asked = collections.Counter((c.op, c.converter, c.reason) for c in self.conversions)
        for (op, name, declined), count in asked.most_common():
            said = "converted" if declined is None else f"declined: {declined}"
            lines.append(f"  {count} x {op}: {said} by {name}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _found(step: Step) -> str:
    hits = collections.Counter(step.hits)
    if not hits:
        return f"pattern {step.name}: no match" + (f"; nearest: {step.miss}" if step.miss else "")
    places = [line if count == 1 else f"{count} x {line}" for line, count in hits.items()]
    more = f" and {len(places) - 4} more lines" if len(places) > 4 else ""
    matches = f"{hits.total()} match{'es' * (hits.total() != 1)}"
    nearest = f"; nearest miss: {step.miss}" if step.miss else ""
    return f"pattern {step.name}: {matches} at {', '.join(places[:4])}{more}{nearest}"


_LOCK = threading.Lock()
_RECENT: collections.deque[weakref.ref[Report]] = collections.deque(maxlen=RECENT)


def remember(report: Report, program: Program) -> None:
    """Let `reports()` find this one for as long as its program lives."""
    report.program = weakref.ref(program)
    with _LOCK:
        _RECENT.append(weakref.ref(report))


def reports() -> Sequence[Report]:
    """Reports of the most recent programs that are still alive, oldest first; those compiled
    behind `torch.compile` are here, too.

    >>> import torch, torchgraft as graft
    >>> f = torch.compile(lambda x: x + 1, backend="torchgraft", mode="eager")
    >>> _ = f(torch.ones(2))
    >>> [node.op for node in graft.reports()[-1].nodes]
    ['aten.add.Tensor']
    """
    with _LOCK:
        found = [ref() for ref in _RECENT]
    return [report for report in found if report is not None]
