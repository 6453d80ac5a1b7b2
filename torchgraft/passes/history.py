"""What each step did to a graph: kept with the program, so that a report can go back in time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch.fx import GraphModule, Node

from torchgraft.fx.meta import Snapshot
from torchgraft.plan import Plan


@dataclasses.dataclass(frozen=True)
class Change:
    """What one step added, and what it removed or changed, as that was: enough to undo it."""

    step: str
    added: frozenset[Node] = frozenset()
    removed: Snapshot = dataclasses.field(default_factory=dict)
    changed: Snapshot = dataclasses.field(default_factory=dict)

    @staticmethod
    def since(before: Snapshot, gm: GraphModule, step: str) -> Change:
        """What is other in the graph now than it was before."""
        now = set(gm.graph.nodes)
        return Change(
            step,
            frozenset(now - before.keys()),
            {node: call for node, call in before.items() if node not in now},
            {
                node: call
                for node, call in before.items()
                if node in now and call != (node.target, node.args, node.kwargs)
            },
        )

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


@dataclasses.dataclass
class History:
    """Every change of a graph, in order. It keeps nodes, not copies of graphs: it costs nothing
    that the pipeline does not do anyway. `on_step` sees the graph after each step, `on_plan` what
    runs in the end."""

    changes: list[Change] = dataclasses.field(default_factory=list)
    on_step: Callable[[str, GraphModule, Change], object] | None = None
    on_plan: Callable[[Plan], object] | None = None

    def add(self, change: Change, gm: GraphModule) -> None:
        self.changes.append(change)
        if self.on_step is not None:
            self.on_step(change.step, gm, change)
