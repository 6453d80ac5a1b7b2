"""The pipeline: named passes in order, each checked before the next one sees the graph."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft import _torch, progress
from torchgraft.config import Config
from torchgraft.convert.define import candidates
from torchgraft.errors import BadPass, BadValue, GraftError, PassFailed, PassOrder, UnknownName
from torchgraft.fx import alias, dialect, label, meta, returned
from torchgraft.fx.label import Labels
from torchgraft.passes import builtin, fusions
from torchgraft.passes.history import Change, History
from torchgraft.passes.merge import merge_branches
from torchgraft.passes.pattern.define import STAGE, Pattern
from torchgraft.passes.pattern.rewrite import apply
from torchgraft.passes.pattern.search import Index
from torchgraft.passes.precision import PRECISION
from torchgraft.passes.registry import Entry, current, is_default
from torchgraft.passes.spec import STAGES, Pass, as_pass
from torchgraft.report import Step

if TYPE_CHECKING:
    from torchgraft.verify.watch import Watch


_PASSES, _MATCH = logging.getLogger("torchgraft.passes"), logging.getLogger("torchgraft.match")
BUILTIN = tuple(
    Pass(fn.__name__, "built-in", fn)
    for fn in (
        builtin.remove_noops,
        builtin.dead_code,
        builtin.common_subexpressions,
        builtin.fold_constants,
        merge_branches,
        builtin.view_to_reshape,
    )
)


def passes_for(config: Config, present: Collection[Any] = ()) -> list[Entry]:
    """Every pass and pattern that a compile with this config runs, in order.

    `present` are the operators and kinds of devices in the graph: fusions that are on by default
    come in where the graph has what they look for.
    """
    registry = config.registry if config.registry is not None else current()
    for given in config.patterns:
        if not isinstance(given, Pattern):
            raise BadValue("Config.patterns", given, "patterns, as graft.pattern makes them")
    loaded: list[Pattern] = []
    if is_default(registry):
        from torchgraft.native.bridge import patterns

        loaded = patterns()
    passes = [
        *([PRECISION] if config.precision is not None else []),
        *BUILTIN,
        *(as_pass(fn, "pre") for fn in config.pre_passes),
        *loaded,
        *registry,
        *config.patterns,
        *(as_pass(fn, "post") for fn in config.post_passes),
    ]
    return ordered([*_distinct(passes), *_fusions(config, present, {one.name for one in passes})])


def _present(gm: GraphModule) -> set[Any]:
    values = (node.meta.get("val") for node in gm.graph.nodes)
    devices = {value.device.type for value in values if isinstance(value, Tensor)}
    return devices | {node.target for node in gm.graph.nodes}


def _fusions(config: Config, present: Collection[Any], taken: Collection[str]) -> list[Pattern]:
    """The fusions that are on by default and may fire. They leave operators to converters and to
    `torch_executed_ops`, and step back for a user's pattern of the same name."""
    if not config.fusions or config.mode == "eager" or config.torch_executed_ops:
        return []
    wanted = candidates(config)
    return [
        one
        for one, needs in fusions.DEFAULT.items()
        if all(op in present and op not in wanted for op in needs) and one.name not in taken
    ]


def _distinct(passes: Iterable[Entry]) -> list[Entry]:
    """One pass a name: the same function given twice runs twice, as `fn` and `fn#2`."""
    counts: dict[str, int] = {}
    result: list[Entry] = []
    for spec in passes:
        counts[spec.name] = count = counts.get(spec.name, 0) + 1
        if count == 1:
            result.append(spec)
            continue
        if isinstance(spec, Pattern) or spec.takes_graph:
            raise BadPass(
                spec.name,
                "the name is used twice",
                "Leave out of the config what @graft.fx_pass registers, or give it another name=.",
            )
        result.append(dataclasses.replace(spec, name=f"{spec.name}#{count}"))
    return result


_CLEAN = {spec.name for spec in BUILTIN[:3]}
_FOLD = {spec.name for spec in BUILTIN[3:]}
_RANKS = {**{stage: rank for rank, stage in enumerate(STAGES)}, STAGE: STAGES.index("built-in")}


def ordered(passes: Sequence[Entry]) -> list[Entry]:
    """By stage, then by before/after names, then as given.

    Patterns run among the built-in passes: on a clean graph, before weights are folded, so that
    what they make of weights is folded, too.
    """
    by_name = {spec.name: spec for spec in passes}
    edges: dict[str, set[str]] = {name: set() for name in by_name}
    for spec in passes:
        for name in (*spec.before, *spec.after):
            if name not in by_name:
                raise UnknownName("pass", name, by_name, where=f"pass {spec.name!r}")
        edges[spec.name].update(spec.after)
        for later in spec.before:
            edges[later].add(spec.name)
    for earlier in passes:
        for spec in passes:
            if _comes_first(earlier, spec):
                edges[spec.name].add(earlier.name)
    for one, two in itertools.pairwise(BUILTIN):
        if one.name in by_name and two.name in by_name:
            edges[two.name].add(one.name)
    return [by_name[name] for name in _sorted(list(by_name), edges)]


def _comes_first(one: Entry, two: Entry) -> bool:
    """Whether their stages alone order them."""
    if two.stage == STAGE and one.name in _CLEAN:
        return True
    if one.stage == STAGE and two.name in _FOLD:
        return True
    return _RANKS[one.stage] < _RANKS[two.stage]


def _sorted(names: list[str], edges: dict[str, set[str]]) -> list[str]:
    """Topological, and as given where the order is free."""
    sorter = TopologicalSorter(edges)
    try:
        sorter.prepare()
    except CycleError as error:
        raise PassOrder(reversed(error.args[1])) from None
    rank = {name: i for i, name in enumerate(names)}
    result: list[str] = []
    ready: list[int] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, rank[name])
        result.append(names[heapq.heappop(ready)])
        sorter.done(result[-1])
    return result


def run(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    watch: Watch | None = None,
    labels: Labels | None = None,
    history: History | None = None,
) -> list[Step]:
    """Run every pass and pattern on the graph, in place. After each one that changed it the graph
    is checked, its values are brought up to date and dead nodes are gone; what it did is in its
    `Step` and in the `history`. With a `watch` its results are compared, too. What stream markers
    said, in the graph as it comes or put in by a pass, is added to `labels`."""
    steps: list[Step] = []
    history = history or History()
    index: Index | None = None  # of the graph as it is; lives from pattern to pattern
    labels = labels if labels is not None else Labels()
    label.label(gm, labels)
    with _torch.replacements(gm) as replaced:
        found = passes_for(config, _present(gm))
        for spec in progress.each("pass", found, name=lambda one: one.name):
            replaced.clear()
            if watch is not None:
                watch.before(gm)
            if isinstance(spec, Pattern):
                index = index or Index(gm)
                step, change = _run_pattern(spec, index, config, watch, replaced)
                if step.hits or spec not in fusions.DEFAULT:  # nobody asked for those
                    steps.append(step)
                index = None if step.hits and spec.replacement is not None else index
            else:
                step, change = _run_one(spec, gm, example_inputs, config, watch, replaced)
                steps.append(step)
                if spec.stage != "built-in" and label.has_markers(gm.graph):
                    label.label(gm, labels)
                index = None
            history.add(change, gm)
            _tell(step)
    return steps


def _tell(step: Step) -> None:
    """Log what a step did, for whoever listens."""
    counts = (step.added, step.removed, step.changed, step.nodes, step.seconds)
    _PASSES.info(f"{step.stage} %s: +%d -%d ~%d -> %d nodes, %.3f s", step.name, *counts)
    if step.hits is not None:
        for hit in step.hits:
            _MATCH.info("%s: matched at %s", step.name, hit)
        if step.miss:
            _MATCH.info("%s: nearest miss: %s", step.name, step.miss)


def _run_one(
    spec: Pass,
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    watch: Watch | None,
    replaced: dict[Node, str],
) -> tuple[Step, Change]:
    before, start = meta.snapshot(gm.graph), time.perf_counter()
    outputs = meta.output_values(gm)
    if spec.stage != "built-in":
        gm.recompile()  # so that gm.code and gm(...) show and run the graph as it is
    try:
        spec(gm, example_inputs, config)
    except GraftError:
        raise
    except Exception as error:
        raise PassFailed(spec.name, spec.stage, spec.where, error) from error
    return _finish(spec, gm, before, outputs, start, watch, replaced)


def _run_pattern(
    spec: Pattern,
    index: Index,
    config: Config,
    watch: Watch | None,
    replaced: dict[Node, str],
) -> tuple[Step, Change]:
    gm, start = index.gm, time.perf_counter()
    before: meta.Snapshot = {}
    outputs = meta.output_values(gm)
    try:
        outcome = apply(spec, index, config, lambda: before.update(meta.snapshot(gm.graph)))
    except GraftError:
        raise
    except Exception as error:
        raise PassFailed(spec.name, spec.stage, spec.where, error) from error
    hits, miss = tuple(outcome.hits), str(outcome.miss or "")
    change = Change(spec.name)
    if hits and spec.replacement is not None:
        step, change = _finish(spec, gm, before, outputs, start, watch, replaced)
    else:
        took, count = time.perf_counter() - start, len(gm.graph.nodes)
        step = Step(spec.name, spec.stage, took, added=0, removed=0, changed=0, nodes=count)
    return dataclasses.replace(step, hits=hits, miss=miss), change


def _finish(
    spec: Entry,
    gm: GraphModule,
    before: meta.Snapshot,
    outputs: Sequence[Any],
    start: float,
    watch: Watch | None,
    replaced: dict[Node, str],
) -> tuple[Step, Change]:
    """Check the graph that a pass or a pattern left, clean it, and say what changed."""
    inputs = sum(node.op == "placeholder" for node in before)
    dialect.say_overloads(gm)
    meta.check(gm, spec.name, inputs, len(outputs), before)
    alias.check_inputs(gm, spec.name, before)
    label.settle(gm, replaced, before)
    label.sort(gm)
    meta.refresh(gm, before, spec.name)
    returned.keep_strides(gm, outputs)
    if not getattr(spec, "changes_type", False):  # a pattern may say that it is on purpose
        meta.check_outputs(gm, spec.name, outputs)
    builtin.dead_code(gm, (), Config())
    change = Change.since(before, gm, spec.name)
    kind = "pattern" if isinstance(spec, Pattern) else "pass"
    if watch is not None and watch.after(gm, f"{kind} {spec.name!r} ({spec.where})") is not None:
        change = Change(spec.name)  # it was undone
    step = Step(
        spec.name,
        spec.stage,
        time.perf_counter() - start,
        added=len(change.added),
        removed=len(change.removed),
        changed=len(change.changed),
        nodes=len(gm.graph.nodes),
    )
    return step, change
