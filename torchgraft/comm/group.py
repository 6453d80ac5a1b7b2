"""Process groups by names that mean the same on every rank.

torch numbers groups in the order in which a process makes them, so that the group of a mesh's `tp`
is "1" on one rank and "2" on another. A plan says `tp`: the mesh's dim, or the `group_desc` that
`new_group` was given, and `world` for all ranks.
"""

from __future__ import annotations

from typing import Any

from torchgraft import _torch
from torchgraft.errors import NoGroup

WORLD = "world"


def name_of(group: Any) -> str:
    """The name of a group that a graph mentions: torch's own name of it, or the group itself."""
    for name, known in _named().items():
        if group is known or group == _torch.group_name(known):
            return name
    return str(group)


def find(name: str, call: str, line: str | None) -> Any:
    """The group of this name in this process; `call` is who asks."""
    known = _named()
    if name in known:
        return known[name]
    for group in known.values():
        if _torch.group_name(group) == name:
            return group
    raise NoGroup(call, line, name, known)


def _named() -> dict[str, Any]:
    """Every group that this process is in; a second one of a name is `name#2`."""
    found: dict[str, Any] = {}
    for group in _torch.process_groups():
        told = _torch.group_description(group)
        name = WORLD if told == "default_pg" else told.removeprefix("mesh_")
        if name == "undefined":
            name = _torch.group_name(group)
        first, count = name, 1
        while name in found:
            count += 1
            name = f"{first}#{count}"
        found[name] = group
    return found
