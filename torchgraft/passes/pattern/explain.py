"""`graft.explain_match`: why a pattern fires on a program, or how far it gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from torchgraft.compile import compile
from torchgraft.config import Config
from torchgraft.errors import BadValue
from torchgraft.fx.edit import Graph
from torchgraft.passes.pattern.define import STAGE, Pattern
from torchgraft.passes.pattern.match import Finder
from torchgraft.passes.pattern.rewrite import trial
from torchgraft.passes.pattern.search import Index, Miss
from torchgraft.passes.registry import Registry, current
from torchgraft.passes.spec import Pass


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a pattern found in one program. `str(explanation)` is the text for people."""

    pattern: str
    hits: tuple[str, ...]  # lines (or names) of what matched
    misses: tuple[Miss, ...]  # the places that came nearest, nearest first

    @property
    def matched(self) -> bool:
        return bool(self.hits)

    def __str__(self) -> str:
        count = len(self.hits)
        lines = [f"pattern {self.pattern}: {count} match{'es' * (count != 1)}"]
        lines += [f"  matched at {line}" for line in self.hits]
        lines += [f"  missed: {miss}" for miss in self.misses]
        return "\n".join(lines)


def explain_match(
    pattern: Pattern,
    model: Any,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    config: Config | None = None,
) -> Explanation:
    """What a pattern matches in a program, and where it nearly does; nothing is replaced.

    The program goes through the passes of `config` (by default only the built-in ones) up to
    where patterns run. A place where a replacement refuses is a miss with its reason.

    >>> import torch, torchgraft as graft
    >>> @graft.pattern(register=False)
    ... def scaled(x: torch.Tensor, n: float) -> torch.Tensor:
    ...     return torch.relu(x * n)
    >>> print(graft.explain_match(scaled, lambda x: (x + 1).relu(), (torch.ones(2),)))
    pattern scaled: 0 matches
      missed: 1 of 2 ops; `add` at ... stands where the pattern has `mul` (aten.mul.Tensor)
    """
    if not isinstance(pattern, Pattern):
        raise BadValue("explain_match", pattern, "a pattern, as graft.pattern makes them")
    found: list[Explanation] = []

    def look(gm: GraphModule, example_inputs: Sequence[Any], config: Config) -> None:
        found.append(explain(pattern, gm, config))

    config = config or Config(registry=Registry())
    others = [entry for entry in config.registry or current() if entry.name != pattern.name]
    registry = Registry()
    for entry in [Pass(f"explain {pattern.name}", STAGE, look), *others]:
        registry.register(entry)
    given = tuple(one for one in config.patterns if one.name != pattern.name)
    compile(
        model,
        inputs,
        kwargs,
        config=config.replace(mode="eager", registry=registry, patterns=given),
    )
    hits = tuple(hit for one in found for hit in one.hits)
    misses = sorted((m for one in found for m in one.misses), key=lambda m: -m.matched)
    return Explanation(pattern.name, hits, tuple(misses))


def explain(pattern: Pattern, gm: GraphModule, config: Config, most: int = 5) -> Explanation:
    """The same for a graph at hand. Every call of the pattern is tried as the one to start from,
    so that a part of it is found wherever it is."""
    index = Index(gm)
    finder = Finder(pattern, index)
    hits: dict[Node, str] = {}
    misses: dict[Node | None, Miss] = {}
    for search in finder.searches:
        search.anchor(index)  # notes an operator that the graph does not have
        for part in search.template.parts:
            for node in index.of(part):
                for found in finder.at(search, part, node):
                    refused = trial(pattern, found, Graph(gm, (), config))
                    if refused is None:
                        hits[found.last] = found.line
                        break
                    finder.note(refused)
                _keep(misses, finder.forget())
        _keep(misses, finder.forget())
    near = [m for m in misses.values() if m.node not in hits]
    ranked = sorted(near, key=lambda m: -m.matched)[:most]
    return Explanation(pattern.name, tuple(hits.values()), tuple(ranked))


def _keep(misses: dict[Node | None, Miss], miss: Miss | None) -> None:
    """The best miss for each node to blame."""
    if miss is None or (miss.matched == 0 and misses):
        return
    known = misses.get(miss.node)
    if known is None or known.matched < miss.matched:
        misses[miss.node] = miss
