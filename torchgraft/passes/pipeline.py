"""The pipeline: named passes in order, each checked before the next one sees the graph."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from torchgraft.config import Config
from torchgraft.errors import BadPass, GraftError, PassFailed, PassOrder, UnknownName
from torchgraft.fx import meta
from torchgraft.passes.builtin import BUILTIN, dead_code
from torchgraft.passes.registry import current
from torchgraft.passes.spec import STAGES, Pass, as_pass
from torchgraft.report import Step

if TYPE_CHECKING:
    from torchgraft.verify.watch import Watch


def passes_for(config: Config) -> list[Pass]:
    """Every pass that a compile with this config runs, in order."""
    registry = config.registry if config.registry is not None else current()
    passes = [
        *BUILTIN,
        *(as_pass(fn, "pre") for fn in config.pre_passes),
        *registry,
        *(as_pass(fn, "post") for fn in config.post_passes),
    ]
    return ordered(_distinct(passes))


def _distinct(passes: Iterable[Pass]) -> list[Pass]:
    """One pass a name: the same function given twice runs twice, as `fn` and `fn#2`."""
    counts: dict[str, int] = {}
    result = []
    for spec in passes:
        counts[spec.name] = count = counts.get(spec.name, 0) + 1
        if count > 1 and spec.takes_graph:
            raise BadPass(spec.name, "the name is used twice", "Give one of them another name=.")
        name = spec.name if count == 1 else f"{spec.name}#{count}"
        result.append(dataclasses.replace(spec, name=name))
    return result


def ordered(passes: Sequence[Pass]) -> list[Pass]:
    """By stage, then by before/after names, then as given."""
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
            if STAGES.index(earlier.stage) < STAGES.index(spec.stage):
                edges[spec.name].add(earlier.name)
    for one, two in itertools.pairwise(BUILTIN):
        if one.name in by_name and two.name in by_name:
            edges[two.name].add(one.name)
    return [by_name[name] for name in _sorted(list(by_name), edges)]


def _sorted(names: list[str], edges: dict[str, set[str]]) -> list[str]:
    """Topological, and as given where the order is free."""
    sorter = TopologicalSorter(edges)
    try:
        sorter.prepare()
    except CycleError as error:
        raise PassOrder(reversed(error.args[1])) from None
    result: list[str] = []
    ready: list[str] = []
    while sorter.is_active():
        ready.extend(sorter.get_ready())
        ready.sort(key=names.index)
        name = ready.pop(0)
        result.append(name)
        sorter.done(name)
    return result


def run(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, watch: Watch | None = None
) -> list[Step]:
    """Run every pass on the graph, in place. After each one the graph is checked, its values are
    brought up to date and dead nodes are gone; what a pass did is in its `Step`. With a `watch`
    its results are compared, too."""
    return [_run_one(spec, gm, example_inputs, config, watch) for spec in passes_for(config)]


def _run_one(
    spec: Pass,
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    watch: Watch | None,
) -> Step:
    if watch is not None:
        watch.before(gm)
    before = meta.snapshot(gm.graph)
    inputs = sum(node.op == "placeholder" for node in before)
    outputs = len(meta.outputs_of(gm))
    start = time.perf_counter()
    if spec.stage != "built-in":
        gm.recompile()  # so that gm.code and gm(...) show and run the graph as it is
    try:
        spec(gm, example_inputs, config)
    except GraftError:
        raise
    except Exception as error:
        raise PassFailed(spec.name, spec.stage, spec.where, error) from error
    meta.check(gm, spec.name, inputs, outputs)
    meta.refresh(gm, before, spec.name)
    dead_code(gm, example_inputs, config)
    after = set(gm.graph.nodes)
    if watch is not None and watch.after(gm, f"pass {spec.name!r} ({spec.where})") is not None:
        return Step(
            spec.name, spec.stage, time.perf_counter() - start, 0, 0, 0, len(gm.graph.nodes)
        )
    return Step(
        spec.name,
        spec.stage,
        time.perf_counter() - start,
        added=len(after - before.keys()),
        removed=len(before.keys() - after),
        changed=sum(before[n] != (n.target, n.args, n.kwargs) for n in after if n in before),
        nodes=len(after),
    )
