"""What a plan keeps alive, and what to wait for where several streams keep too much of it."""

from __future__ import annotations

from collections.abc import Mapping

from torchgraft.plan import MAIN, Buffer, Free, Launch, Plan
from torchgraft.stream.prove import memories, pieces


def peak(plan: Plan, sizes: Mapping[Buffer, int]) -> tuple[int, int]:
    """The most bytes that launches have made and not freed yet, and the step where that is.

    Steps in launch order; inputs and constants are the caller's and are not counted.
    """
    roots = memories(plan)
    alive: dict[Buffer, int] = {}
    members: dict[Buffer, set[Buffer]] = {}
    now, most, where = 0, 0, 0
    for at, step in enumerate(plan.steps):
        if isinstance(step, Launch):
            for out in step.outputs:
                if out is None:
                    continue
                root = roots.get(out, out)
                members.setdefault(root, set()).add(out)
                if root == out:
                    alive[out] = sizes.get(out, 0)
                    now += alive[out]
            if now > most:
                most, where = now, at
        elif isinstance(step, Free):
            root = roots.get(step.buffer, step.buffer)
            held = members.get(root, set())
            held.discard(step.buffer)
            if not held:
                now -= alive.pop(root, 0)
    return most, where


def alone(plan: Plan) -> list[Launch]:
    """The launches as one stream would have them."""
    return [
        Launch(s.kernel, s.args, s.kwargs, s.outputs, s.unpack, MAIN, s.writes)
        for s in plan.launches
    ]


def relief(plan: Plan, sizes: Mapping[Buffer, int], at: int) -> list[tuple[int, int]]:
    """Orders (launch, later launch) that let memory go before step `at`: whatever is alive there
    though its last use has been launched is freed once its owner's stream knows of that use."""
    roots = memories(plan)
    number: dict[int, int] = {}  # step -> launch
    last: dict[Buffer, dict[str, int]] = {}  # memory -> stream -> launch of its last use
    owner: dict[Buffer, str] = {}
    freed: dict[Buffer, int] = {}
    launches: list[Launch] = []
    for step_number, step in enumerate(plan.steps):
        if isinstance(step, Launch):
            number[step_number] = len(launches)
            for memory in pieces(step, roots):
                last.setdefault(memory, {})[step.stream] = len(launches)
                owner.setdefault(memory, step.stream)
            launches.append(step)
        elif isinstance(step, Free):
            freed.setdefault(roots.get(step.buffer, step.buffer), step_number)
    here = number[at]
    idle = [
        memory
        for memory, uses in last.items()
        if sizes.get(memory, 0) and max(uses.values()) < here and freed.get(memory, -1) > at
    ]
    orders: list[tuple[int, int]] = []
    for memory in sorted(idle, key=lambda m: -sizes[m]):
        stream = owner[memory]
        end = max(last[memory].values())
        after = next((i for i in range(end + 1, here + 1) if launches[i].stream == stream), None)
        if after is not None:
            orders += [(use, after) for on, use in last[memory].items() if on != stream]
    return orders
