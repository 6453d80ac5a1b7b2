"""What each launch of a program must move and compute."""

from __future__ import annotations

from torch.fx import Node

from torchgraft.fx.cost import Cost, bytes_of, flops_of
from torchgraft.fx.dialect import is_view
from torchgraft.plan import Buffer, Launch
from torchgraft.program import Program


def costs(program: Program) -> list[Cost]:
    """The cost of each launch of a program's plan, in order."""
    linker = program.linker
    values = {buffer: node.meta.get("val") for node, buffer in linker.numbers.items()}
    regions = {unit.name: unit.nodes for unit in linker.units}
    makers = {buffer: node for node, buffer in linker.numbers.items()}
    found = []
    for launch in program.plan.launches:
        nodes = regions.get(launch.kernel) or _node(launch, makers, program)
        touched = {*launch.reads, *(out for out in launch.outputs if out is not None)}
        moved = sum(bytes_of(values.get(buffer)) for buffer in touched)
        if launch.kernel in regions:  # its code holds the constants
            used = {held for node in nodes for held in node.all_input_nodes}
            moved += sum(bytes_of(n.meta.get("val")) for n in used if n.op == "get_attr")
        if len(nodes) == 1 and is_view(nodes[0]):
            moved = 0
        found.append(Cost(moved, sum(map(flops_of, nodes)), tuple(n.name for n in nodes)))
    return found


def _node(launch: Launch, makers: dict[Buffer, Node], program: Program) -> list[Node]:
    """The node of a single call: the one that made its output, or that takes its arguments."""
    for out in launch.outputs:
        if out is not None and out in makers:
            node = makers[out]
            source = node.args[0] if launch.unpack else node
            return [source if isinstance(source, Node) else node]
    reads = launch.reads
    numbers = program.linker.numbers
    for node in program.gm.graph.nodes:
        used = {numbers.get(n) for n in node.all_input_nodes}
        if node.op == "call_function" and not node.users and used == reads:
            return [node]
    return []
