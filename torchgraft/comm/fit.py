"""Whether what the ranks of a group are about to do fits together. Pure; no process group."""

from __future__ import annotations

import ast
import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

from torchgraft.comm.ops import ONE_SIDED

NOTHING = "nothing more"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A collective as the others see it: its step in the plan, its kind, what it is given."""

    step: int
    kind: str
    type: str
    args: Sequence[str]  # everything but tensors and the group, as text

    def data(self) -> list[Any]:
        return [self.step, self.kind, self.type, list(self.args)]

    @staticmethod
    def of(data: Any) -> Entry:
        step, kind, kind_type, args = data
        return Entry(int(step), str(kind), str(kind_type), [str(arg) for arg in args])

    def __str__(self) -> str:
        return f"{self.kind}({', '.join([self.type, *self.args])})"


def digest(entries: Sequence[Entry]) -> str:
    """Equal for ranks that do the same together, at whatever steps of their plans."""
    said = "\n".join(map(str, entries))
    return hashlib.sha256(said.encode()).hexdigest()


def is_one_sided(entries: Sequence[Entry]) -> bool:
    """Whether ranks that fit together do not say the same."""
    return any(entry.kind in (*ONE_SIDED, "all_to_all_single") for entry in entries)


def is_letter(entry: Entry) -> bool:
    """Whether it is between two ranks alone."""
    return entry.kind in ONE_SIDED


Difference = tuple[int, int, str, str]
"""The step, the rank, what that rank has, and what another one has instead."""


def difference(ranks: Sequence[Sequence[Entry]]) -> Difference | None:
    """The first thing that does not fit, if there is one."""
    together = [[e for e in entries if e.kind not in ONE_SIDED] for entries in ranks]
    found: list[Difference] = []
    for rank, entries in enumerate(together):
        for ours, theirs in itertools.zip_longest(together[0], entries):
            if not _alike(ours, theirs):
                step = ours.step if ours is not None else theirs.step
                found.append((step, rank, str(theirs or NOTHING), f"rank 0: {ours or NOTHING}"))
                break
    if not found:
        found += [*_splits(together), *_letters(ranks)]
    return min(found, default=None) or _circle(ranks)


def _alike(one: Entry | None, two: Entry | None) -> bool:
    if one is None or two is None or one.kind != two.kind:
        return False
    if one.kind == "all_to_all_single":  # each rank has sizes of its own
        return _cut(one.type) == _cut(two.type)
    return (one.type, one.args) == (two.type, two.args)


def _cut(kind: str) -> tuple[str, str]:
    """A tensor's type without its first size."""
    dtype, _, sizes = kind.partition("[")
    return dtype, sizes.partition(",")[2]


def _splits(ranks: Sequence[Sequence[Entry]]) -> list[Difference]:
    """What a rank takes from another must be what that one gives it."""
    found: list[Difference] = []
    for at, entry in enumerate(ranks[0]):
        if entry.kind != "all_to_all_single" or any(len(es[at].args) < 2 for es in ranks):
            continue  # sizes that are known when it runs are compared there
        takes, gives = ([ast.literal_eval(es[at].args[i]) for es in ranks] for i in (0, 1))
        for one, two in itertools.product(range(len(ranks)), repeat=2):
            if not takes[one] or not gives[two] or len(takes[one]) <= two:
                continue
            if takes[one][two] != gives[two][one]:
                theirs = f"{ranks[one][at]}, which takes {takes[one][two]} from rank {two}"
                ours = f"rank {two}: {ranks[two][at]}, which gives it {gives[two][one]}"
                found.append((ranks[one][at].step, one, theirs, ours))
    return found


def _circle(ranks: Sequence[Sequence[Entry]]) -> Difference | None:
    """The first rank that waits for ever although all that it waits for is there: a send is over
    when its receive has begun, and a group's collectives run one after the other."""
    left = [list(reversed(entries)) for entries in ranks]
    while any(left):
        heads = [entries[-1] if entries else None for entries in left]
        ready = [rank for rank, head in enumerate(heads) if head and _meets(rank, head, heads)]
        if not ready:
            break
        for rank in ready:
            left[rank].pop()
    stuck = [(entries[-1].step, rank) for rank, entries in enumerate(left) if entries]
    if not stuck:
        return None
    step, rank = min(stuck)
    mine = left[rank][-1]
    if mine.kind in ONE_SIDED:
        other = int(mine.args[0])
    else:
        other = next(r for r, entries in enumerate(left) if entries[-1].kind in ONE_SIDED)
    return step, rank, f"{mine} first", f"rank {other}: {left[other][-1]} first"


def _meets(rank: int, mine: Entry, heads: Sequence[Entry | None]) -> bool:
    """Whether what a rank does next can happen, when the others are at these."""
    if mine.kind not in ONE_SIDED:
        return all(head is not None and head.kind not in ONE_SIDED for head in heads)
    peer = int(mine.args[0])
    theirs = heads[peer] if 0 <= peer < len(heads) else None
    return (
        theirs is not None
        and theirs.kind == ONE_SIDED[1 - ONE_SIDED.index(mine.kind)]
        and [int(theirs.args[0]), theirs.args[1]] == [rank, mine.args[1]]
    )


def _letters(ranks: Sequence[Sequence[Entry]]) -> list[Difference]:
    """Each send must meet a receive of the same type and tag, in order, for each pair of ranks."""
    sent: dict[tuple[int, int, str], list[Entry]] = collections.defaultdict(list)
    taken: dict[tuple[int, int, str], list[Entry]] = collections.defaultdict(list)
    for rank, entries in enumerate(ranks):
        for entry in entries:
            if entry.kind in ONE_SIDED:
                peer, tag = int(entry.args[0]), entry.args[1]
                if entry.kind == "send":
                    sent[rank, peer, tag].append(entry)
                else:
                    taken[peer, rank, tag].append(entry)
    found: list[Difference] = []
    for key in {*sent, *taken}:
        source, target, _ = key
        for out, into in itertools.zip_longest(sent[key], taken[key]):
            if out is None:
                found.append((into.step, target, str(into), f"rank {source}: no send of it"))
            elif into is None:
                found.append((out.step, source, str(out), f"rank {target}: no receive of it"))
            elif out.type != into.type:
                found.append((into.step, target, str(into), f"rank {source}: {out}"))
    return found
