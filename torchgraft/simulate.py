"""`graft.simulate`: how long a plan takes on many ranks, on paper.

Kernels take what was measured. A message takes `alpha + bytes * beta` seconds, and a collective is
so many messages one after another. Streams and waits are the plan's, as in a timeline.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchgraft.errors import BadValue, UnknownName
from torchgraft.inspect.timeline import Timeline, predict_together
from torchgraft.plan import Collective, Plan

if TYPE_CHECKING:
    from torchgraft.inspect.profile import Profile

ALGORITHMS = ("best", "ring", "tree")
KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "send",
}
"""Collectives of a plan, and the pattern of messages that each one is."""


@dataclasses.dataclass(frozen=True)
class Link:
    """What a message costs: `alpha` seconds, and `beta` more for each byte.

    >>> Link(alpha=0.5, beta=0.25).seconds(1, 8)
    2.5
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        _number("Link.alpha", self.alpha)
        _number("Link.beta", self.beta)

    def seconds(self, messages: float, nbytes: float) -> float:
        """So many messages one after another, which carry so many bytes together."""
        return self.alpha * messages + self.beta * nbytes

    @staticmethod
    def fit(samples: Iterable[tuple[str, int, int, float]], algorithm: str = "ring") -> Link:
        """The link that explains measured collectives best: (kind, bytes given, ranks, seconds).

        Least squares of the relative errors, so that small messages count as much as large ones.
        """
        rows = []
        for kind, nbytes, ranks, seconds in samples:
            _number("seconds", seconds, least=1e-12)
            messages, moved = moves(kind, nbytes, ranks, algorithm)
            rows.append((messages / seconds, moved / seconds))
        aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
        a, b = (sum(r[i] for r in rows) for i in (0, 1))
        if aa * bb - ab * ab <= 1e-12 * aa * bb:
            raise BadValue("samples", rows, "collectives of two sizes at least, on 2 ranks or more")
        alpha, beta = ((a * bb - b * ab), (b * aa - a * ab))
        if alpha < 0 or beta < 0:  # the nearest that a link can have
            return Link(0.0, b / bb) if alpha < 0 else Link(a / aa, 0.0)
        return Link(alpha / (aa * bb - ab * ab), beta / (aa * bb - ab * ab))


@dataclasses.dataclass(frozen=True)
class Cluster:
    """So many ranks, and what connects them.

    Ranks of one node talk over `link`, nodes over `between` (each rank has its own way out, as
    with a network card for each GPU). A collective over several nodes is done in the node first.
    `groups` has the sizes of those that are not all ranks: a number, whose ranks fill one node
    after another, or (ranks, ranks of them in a node).
    """

    ranks: int
    link: Link
    node: int | None = None
    between: Link | None = None
    groups: Mapping[str, int | tuple[int, int]] = dataclasses.field(default_factory=dict)
    algorithm: str = "best"

    def __post_init__(self) -> None:
        _count("Cluster.ranks", self.ranks)
        for name in ("link", "between"):
            link = getattr(self, name)
            if not isinstance(link, Link) and (link is not None or name == "link"):
                raise BadValue(f"Cluster.{name}", link, "a graft.Link")
        if (self.node is None) != (self.between is None):
            raise BadValue("Cluster.node", self.node, "node and between, or neither")
        if self.node is not None:
            _count("Cluster.node", self.node)
        if self.algorithm not in ALGORITHMS:
            raise UnknownName("algorithm", self.algorithm, ALGORITHMS, "Cluster")
        for name in ("world", *self.groups):
            self.shape(name)

    def shape(self, group: str) -> tuple[int, int]:
        """Of a group: its ranks in a node, and the nodes that it is on."""
        given = self.groups.get(group, self.ranks)
        pair = given if isinstance(given, tuple) else (given, None)
        if len(pair) != 2:
            raise BadValue(f"Cluster.groups[{group!r}]", given, "ranks, or (ranks, in a node)")
        _count(f"Cluster.groups[{group!r}]", pair[0], most=self.ranks)
        near = min(pair[0], self.node or pair[0]) if pair[1] is None else pair[1]
        _count(f"Cluster.groups[{group!r}]", near, most=self.node or pair[0])
        if pair[0] % near:
            raise BadValue(f"Cluster.groups[{group!r}]", given, f"a multiple of {near}, a node's")
        return near, pair[0] // near

    def seconds(self, kind: str, nbytes: int, group: str = "world") -> float:
        """The time of a collective that each rank gives so many bytes to."""
        near, nodes = self.shape(group)
        pattern = pattern_of(kind)
        if self.between is None or nodes == 1:
            return self._flat(self.link, pattern, nbytes, near)
        inside, outside, flat = self.link, self.between, self._flat
        if pattern == "send":
            return outside.seconds(1, nbytes)
        if pattern == "all_to_all":
            part, own, others = nbytes / (near * nodes), near - 1, near * (nodes - 1)
            return inside.seconds(own, own * part) + outside.seconds(others, others * part)
        if pattern == "broadcast":
            return flat(outside, pattern, nbytes, nodes) + flat(inside, pattern, nbytes, near)
        if pattern == "all_gather":
            whole = nbytes * nodes
            return flat(outside, pattern, nbytes, nodes) + flat(inside, pattern, whole, near)
        seconds = flat(inside, "reduce_scatter", nbytes, near)
        seconds += flat(outside, pattern, nbytes / near, nodes)
        if pattern == "all_reduce":
            seconds += flat(inside, "all_gather", nbytes / near, near)
        return seconds

    def _flat(self, link: Link, pattern: str, nbytes: float, ranks: int) -> float:
        ways = ALGORITHMS[1:] if self.algorithm == "best" else [self.algorithm]
        return min(link.seconds(*moves(pattern, nbytes, ranks, way)) for way in ways)


def moves(kind: str, nbytes: float, ranks: int, algorithm: str) -> tuple[float, float]:
    """A collective as messages one after another, and the bytes that pass one link meanwhile.

    `nbytes` is what each rank gives. A ring takes turns with its neighbours; a tree halves the
    ranks, and is pipelined where a tensor goes up or down it as a whole.
    """
    pattern = pattern_of(kind)
    _count("ranks", ranks)
    if algorithm not in ALGORITHMS[1:]:
        raise UnknownName("algorithm", algorithm, ALGORITHMS[1:])
    if ranks == 1:
        return 0, 0
    turns = math.ceil(math.log2(ranks)) if algorithm == "tree" else ranks - 1
    part = nbytes * (ranks - 1) / ranks
    if pattern == "all_reduce":
        return 2 * turns, 2 * (nbytes if algorithm == "tree" else part)
    if pattern == "all_gather":
        return turns, nbytes * (ranks - 1)
    if pattern == "reduce_scatter":
        return turns, part
    if pattern == "broadcast":
        return turns, nbytes
    return (ranks - 1, part) if pattern == "all_to_all" else (1, nbytes)


def pattern_of(kind: str) -> str:
    """`all_reduce`, `all_gather`, …: what a collective of a plan comes down to."""
    name = kind.removesuffix("_coalesced")
    if name in KINDS:
        return KINDS[name]
    if name in KINDS.values():
        return name
    raise UnknownName("collective", kind, {*KINDS, *KINDS.values()})


@dataclasses.dataclass(frozen=True)
class Talk:
    """One collective of the plan: what each rank gives, and how long that takes."""

    kind: str
    group: str
    ranks: int
    nbytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A call on paper, in seconds. `print(it)` is a table."""

    ranks: int
    timeline: Timeline
    """Every stream goes on until the plan lets it wait. Of the rank that is through last."""
    kernels: float
    """All kernels of that rank, one after another."""
    serial: float
    """The call without overlap: each launch begins when the one before it is over."""
    talks: tuple[Talk, ...]

    @property
    def seconds(self) -> float:
        """The call as the plan runs it: collectives beside kernels."""
        return self.timeline.seconds

    @property
    def collectives(self) -> float:
        """All collectives, one after another."""
        return sum(talk.seconds for talk in self.talks)

    @property
    def hidden(self) -> float | None:
        """The share of the time of collectives in which kernels run; None without any."""
        return self.timeline.hidden

    def __str__(self) -> str:
        hidden = "" if self.hidden is None else f", {self.hidden:.0%} hidden"
        lines = [
            f"{self.ranks} ranks: {self.seconds * 1e6:.1f} us a call, "
            f"{self.serial * 1e6:.1f} us without overlap",
            f"kernels {self.kernels * 1e6:.1f} us, "
            f"collectives {self.collectives * 1e6:.1f} us{hidden}",
        ]
        same: dict[tuple[str, str, int, int], list[float]] = {}
        for talk in self.talks:
            key = (talk.kind, talk.group, talk.ranks, talk.nbytes)
            same.setdefault(key, []).append(talk.seconds)
        if same:
            lines.append(f"{'us each':>10} {'MB':>9} {'ranks':>6}  {'group':8} collective")
        for (kind, group, ranks, nbytes), times in same.items():
            lines.append(
                f"{times[0] * 1e6:10.1f} {nbytes / 1e6:9.3f} {ranks:6}  {group:8} "
                f"{len(times)} x {kind}"
            )
        return "\n".join(lines)


def simulate(
    plan: Plan, cluster: Cluster, kernels: Profile | Sequence[float] | Sequence[Any] | None = None
) -> Simulation:
    """The time of a plan on the ranks of a cluster, each of which runs this plan.

    `kernels` are measured: `compiled.profile(...)`, or seconds of every launch in order (those of
    collectives are not used); or a list of such, one for each rank: a collective then begins when
    the slowest rank has come to it. Without them kernels take no time, and what is left is the
    links'.

    >>> import torchgraft as graft
    >>> plan = graft.Plan.parse('''
    ... def plan(b0):
    ...     b1 = launch('main', 'mm', b0)
    ...     b2 = collective('main', 'ar', b1, 'sum', 'tp', kind='all_reduce', nbytes=4000000)
    ...     return (b2,)
    ... ''')
    >>> eight = graft.Cluster(8, graft.Link(alpha=2e-6, beta=1 / 100e9), algorithm="ring")
    >>> print(graft.simulate(plan, eight, [50e-6, 0.0]))
    8 ranks: 148.0 us a call, 148.0 us without overlap
    kernels 50.0 us, collectives 98.0 us, 0% hidden
       us each        MB  ranks  group    collective
          98.0     4.000      8  tp       1 x all_reduce
    """
    if not isinstance(plan, Plan):
        raise BadValue("plan", plan, "a plan, such as compiled.plan")
    if not isinstance(cluster, Cluster):
        raise BadValue("cluster", cluster, "a graft.Cluster")
    rows = _rows(plan, cluster, kernels)
    serial, talks = [0.0] * len(rows), []
    for i, step in enumerate(plan.launches):
        if isinstance(step, Collective):
            talk = _talk(step, cluster)
            talks.append(talk)
            for row in rows:
                row[i] = talk.seconds
            serial = [max(serial) + talk.seconds] * len(rows)
        else:
            serial = [reached + row[i] for reached, row in zip(serial, rows, strict=True)]
    lines = predict_together(plan, rows, {})
    slowest = max(range(len(rows)), key=lambda rank: lines[rank].seconds)
    own = sum(
        seconds
        for seconds, step in zip(rows[slowest], plan.launches, strict=True)
        if not isinstance(step, Collective)
    )
    return Simulation(cluster.ranks, lines[slowest], own, max(serial), tuple(talks))


def _talk(step: Collective, cluster: Cluster) -> Talk:
    if step.nbytes is None:
        raise BadValue(f"{step.kind} of {step.type}", None, "sizes that are known before a call")
    near, nodes = cluster.shape(step.group)
    seconds = cluster.seconds(step.kind, step.nbytes, step.group)
    return Talk(step.kind, step.group, near * nodes, step.nbytes, seconds)


def _rows(plan: Plan, cluster: Cluster, kernels: Any) -> list[list[float]]:
    """The times of every launch: once, or for each rank."""
    if not isinstance(kernels, (list, tuple)) or all(isinstance(k, (int, float)) for k in kernels):
        return [_seconds(plan, kernels)]
    if len(kernels) != cluster.ranks:
        raise BadValue("kernels", kernels, f"times of {cluster.ranks} ranks, or of one for all")
    for step in plan.collectives:
        near, nodes = cluster.shape(step.group)
        if near * nodes != cluster.ranks:
            raise BadValue(f"group {step.group!r}", near * nodes, "all ranks, each with its times")
    return [_seconds(plan, one) for one in kernels]


def _seconds(plan: Plan, kernels: Any) -> list[float]:
    from torchgraft.inspect.profile import Profile

    launches = plan.launches
    if kernels is None:
        return [0.0] * len(launches)
    if isinstance(kernels, Profile):
        if [k.name for k in kernels.kernels] != [step.kernel for step in launches]:
            raise BadValue("kernels", kernels.name, "a profile of this plan")
        kernels = [k.seconds for k in kernels.kernels]
    if len(kernels) != len(launches):
        raise BadValue("kernels", kernels, f"{len(launches)} times, one a launch of the plan")
    for seconds in kernels:
        _number("kernels", seconds)
    return [float(seconds) for seconds in kernels]


def _number(field: str, value: Any, least: float = 0.0) -> None:
    if not isinstance(value, (int, float)) or not least <= value < math.inf:
        raise BadValue(
            field, value, f"seconds, {least:g} or more" if least else "seconds, 0 or more"
        )


def _count(field: str, value: Any, most: float = math.inf) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        upper = f" to {most:.0f}" if most < math.inf else " or more"
        raise BadValue(field, value, f"a number of ranks, 1{upper}")
