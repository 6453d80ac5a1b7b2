"""When each launch of a plan runs: predicted from durations, or put together from measurements."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from torchgraft.plan import Buffer, Collective, Free, Launch, Plan, PlanStep, Record, Wait


@dataclasses.dataclass(frozen=True)
class Span:
    """One launch on the time axis. Times are seconds from the start of the call."""

    index: int  # among the plan's launches
    kernel: str
    stream: str
    start: float
    end: float
    critical: bool = False
    collective: bool = False


@dataclasses.dataclass(frozen=True)
class Arrow:
    """A wait: the stream of `after` held until the launch `before` was over (indices of spans)."""

    event: str
    before: int
    after: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Spans in launch order, waits as arrows, and memory of the plan's own buffers over time."""

    spans: tuple[Span, ...]
    arrows: tuple[Arrow, ...]
    memory: tuple[tuple[float, int], ...]

    @property
    def seconds(self) -> float:
        """From the first launch to the end of the last."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def hidden(self) -> float | None:
        """The share of the time of collectives in which something else ran; None without any."""
        talks = [span for span in self.spans if span.collective]
        works = [span for span in self.spans if not span.collective]
        total = sum(talk.end - talk.start for talk in talks)
        if not total:
            return None
        cuts = sorted({time for span in self.spans for time in (span.start, span.end)})
        hidden = 0.0
        for start, end in itertools.pairwise(cuts):
            if any(w.start <= start and end <= w.end for w in works):
                hidden += (end - start) * sum(t.start <= start and end <= t.end for t in talks)
        return min(hidden / total, 1.0)  # sums of rounded times

    @property
    def streams(self) -> list[str]:
        return list(dict.fromkeys(span.stream for span in self.spans))


def predict(plan: Plan, durations: Sequence[float], sizes: Mapping[Buffer, int]) -> Timeline:
    """The timeline of a plan whose launches take so long, when every stream only waits for what
    the plan tells it to. The longest chain of launches is marked critical."""
    [line] = predict_together(plan, [durations], sizes)
    return line


def predict_together(
    plan: Plan, durations: Sequence[Sequence[float]], sizes: Mapping[Buffer, int]
) -> list[Timeline]:
    """The timelines of ranks that all run a plan, each with durations of its own: a collective
    begins for all when the last one has come to it, and lasts from there. The others wait in it."""
    walks = [_Walk() for _ in durations]
    index = 0
    for step in plan.steps:
        if not isinstance(step, Launch):
            for walk in walks:
                walk.follow(step)
            continue
        talks = isinstance(step, Collective)
        begin = max(walk.now(step.stream) for walk in walks) if talks else 0.0
        for walk, own in zip(walks, durations, strict=True):
            walk.launch(step, (begin if talks else walk.now(step.stream)) + own[index])
        index += 1
    return [_timeline(plan, _marked(walk.spans, walk.cause), sizes) for walk in walks]


class _Walk:
    """One rank on its way through a plan."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}  # the time that each stream has reached
        self._last: dict[str, int] = {}  # the launch that it reached it with
        self._events: dict[str, tuple[float, int | None]] = {}
        self.cause: dict[int, int | None] = {}
        self.spans: list[Span] = []

    def now(self, stream: str) -> float:
        return self._at.get(stream, 0.0)

    def launch(self, step: Launch, end: float) -> None:
        index, stream = len(self.spans), step.stream
        talks = isinstance(step, Collective)
        self.spans.append(Span(index, step.kernel, stream, self.now(stream), end, collective=talks))
        self.cause[index] = self._last.get(stream)
        self._at[stream], self._last[stream] = end, index

    def follow(self, step: PlanStep) -> None:
        """A record or a wait."""
        if isinstance(step, Record):
            self._events[step.event] = (self.now(step.stream), self._last.get(step.stream))
        elif isinstance(step, Wait):
            reached, by = self._events[step.event]
            if reached > self.now(step.stream):
                self._at[step.stream] = reached
                if by is not None:
                    self._last[step.stream] = by


def measured(
    plan: Plan, times: Sequence[tuple[float, float]], sizes: Mapping[Buffer, int]
) -> Timeline:
    """The timeline of launches with known starts and ends; critical is the chain of launches,
    each behind the latest one that it had to wait for."""
    launches = plan.launches
    spans = [
        Span(i, step.kernel, step.stream, *times[i], collective=isinstance(step, Collective))
        for i, step in enumerate(launches)
    ]
    before: dict[int, list[int]] = {}
    last: dict[str, int] = {}
    for i, span in enumerate(spans):
        if span.stream in last:
            before.setdefault(i, []).append(last[span.stream])
        last[span.stream] = i
    for arrow in _arrows(plan):
        before.setdefault(arrow.after, []).append(arrow.before)
    cause: dict[int, int | None] = {
        i: max(before.get(i, ()), key=lambda j: spans[j].end, default=None)
        for i in range(len(spans))
    }
    return _timeline(plan, _marked(spans, cause), sizes)


def _marked(spans: Sequence[Span], cause: Mapping[int, int | None]) -> list[Span]:
    """The spans with the chain that ends last marked critical."""
    index = max(range(len(spans)), key=lambda i: spans[i].end, default=None)
    chain: set[int] = set()
    while index is not None:
        chain.add(index)
        index = cause[index]
    return [dataclasses.replace(span, critical=span.index in chain) for span in spans]


def _arrows(plan: Plan) -> list[Arrow]:
    """Each wait between the launch before its record and the launch after it."""
    last: dict[str, int] = {}
    recorded: dict[str, int] = {}
    waiting: dict[str, list[str]] = {}
    arrows: list[Arrow] = []
    count = 0
    for step in plan.steps:
        if isinstance(step, Launch):
            for event in waiting.pop(step.stream, ()):
                if event in recorded:
                    arrows.append(Arrow(event, recorded[event], count))
            last[step.stream] = count
            count += 1
        elif isinstance(step, Record) and step.stream in last:
            recorded[step.event] = last[step.stream]
        elif isinstance(step, Wait):
            waiting.setdefault(step.stream, []).append(step.event)
    return arrows


def _timeline(plan: Plan, spans: list[Span], sizes: Mapping[Buffer, int]) -> Timeline:
    shared = dict(plan.shared)
    changes: list[tuple[float, int]] = []
    own: set[Buffer] = set()
    now: dict[str, float] = {}
    launched = iter(spans)
    for step in plan.steps:
        if isinstance(step, Launch):
            span = next(launched)
            now[step.stream] = span.end
            for out in step.outputs:
                if out is not None and out not in shared:
                    own.add(out)
                    changes.append((span.start, sizes.get(out, 0)))
        elif isinstance(step, Free) and step.buffer in own:
            changes.append((now.get(step.stream, 0.0), -sizes.get(step.buffer, 0)))
    level, memory = 0, [(0.0, 0)]
    for time, change in sorted(changes, key=lambda one: one[0]):
        level += change
        if memory[-1][0] == time:
            memory[-1] = (time, level)
        else:
            memory.append((time, level))
    return Timeline(tuple(spans), tuple(_arrows(plan)), tuple(memory))
