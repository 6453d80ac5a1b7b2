"""Process groups by names that mean the same on every rank.

torch numbers groups in the order in which a process makes them, so that the group of a mesh's `tp`
is "1" on one rank and "2" on another. A plan says `tp`: the mesh's dim, or the `group_desc` that
`new_group` was given, and `world` for all ranks.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from torchgraft._torch import groups
from torchgraft.errors import NoGroup

WORLD = "world"


def name_of(group: Any) -> str:
    """The name of a group that a graph mentions: torch's own name of it, or the group itself."""
    for name, alike in _named().items():
        if any(group is known or group == groups.group_name(known) for known in alike):
            return name
    return str(group)


def find(name: str, call: str, line: str | None) -> Any:
    """The group of this name in this process; `call` is who asks."""
    known = _named()
    if name in known:
        return known[name][0]
    for alike in known.values():
        for group in alike:
            if groups.group_name(group) == name:
                return group
    raise NoGroup(call, line, name, known)


def _named() -> dict[str, list[Any]]:
    """Every group that this process is in. Groups of one name with the same ranks are as good as
    each other; those of other ranks are `name#2`, and so on."""
    found: dict[str, list[Any]] = {}
    for group in groups.process_groups():
        told = groups.group_description(group)
        name = WORLD if told == "default_pg" else told.removeprefix("mesh_")
        if name == "undefined":
            name = groups.group_name(group)
        first, count = name, 1
        while name in found and not _same_ranks(found[name][0], group):
            count += 1
            name = f"{first}#{count}"
        found.setdefault(name, []).append(group)
    return found


def _same_ranks(one: Any, two: Any) -> bool:
    ranks = dist.get_process_group_ranks
    return ranks(one) == ranks(two)
