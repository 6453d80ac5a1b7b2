"""The ranks of a group compare their plans before the first collective, and account for failures.

Everything goes through the group's key-value store, which waits with a timeout, so that ranks
that disagree find out instead of hanging. Rank 0 of a group reads what the others say and tells
all of them what it found: the work of a rank does not grow with their number.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from torchgraft._torch import groups
from torchgraft.comm import fit, wait
from torchgraft.comm.group import find
from torchgraft.errors import CollectiveFailed, NoGroup, RanksDiffer, first_line
from torchgraft.plan import Collective, Plan, buffers, literal

_GRACE = 5.0
"""Seconds that rank 0 has to say what it found when its own wait is over."""
_ROLL_CALL = 5.0
"""Seconds that a failed rank waits for word from the others."""
_FIX = (
    "Every rank must run the same collectives of a group in the same order: look for a branch on "
    "the rank, or for other shapes, dtypes or versions of the code there."
)


def said(step: Collective) -> str:
    """A collective for people: what it does to what."""
    return f"{step.kind} of {step.type}" if step.type else step.kind


Frame = tuple[str, bool]
"""A function of torch.compile, and whether it is compiled once more: for one rank, maybe, which met
another shape. The others know nothing of that, and need not if the collectives are as before."""


class Guard:
    """What the ranks have agreed on for one linked plan."""

    def __init__(self, plan: Plan, frame: Frame | None = None) -> None:
        self._plan, self._frame = plan, frame
        self._lock = threading.Lock()
        self._talks: dict[str, _Talk] = {}
        self._agreed = False

    def enter(self) -> None:
        """Agree, the first time; `RanksDiffer` or `CollectiveFailed` on every rank otherwise."""
        if self._has_agreed():
            return
        with self._lock:
            if not self._has_agreed():
                self._meet()
                # In one order on every rank, whatever its plan does first: no waiting in a circle.
                for name, talk in sorted(self._talks.items()):
                    talk.agree(name, _entries(self._plan, name), self._frame)
                self._agreed = True

    def _has_agreed(self) -> bool:
        """Whether the ranks have, in the groups that there are now."""
        alive = groups.is_group_alive
        return self._agreed and all(alive(talk.group) for talk in self._talks.values())

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that the plan is not run here, and why."""
        with contextlib.suppress(Exception):  # the error itself is what counts
            self._meet()
            for talk in self._talks.values():
                talk.refuse(error)

    def _meet(self) -> None:
        """Open a conversation in each group of the plan. Where there is no such group here, the
        ranks of the others hear of it: they would wait."""
        firsts: dict[str, tuple[Any, Collective, int]] = {}
        unknown: NoGroup | None = None
        for number, step in enumerate(self._plan.steps):
            if isinstance(step, Collective) and step.group not in firsts:
                try:
                    firsts[step.group] = (find(step.group, said(step), step.line), step, number)
                except NoGroup as error:
                    unknown = unknown or error
        self._talks = {name: _Talk(*first) for name, first in firsts.items()}
        if unknown is not None:
            for talk in self._talks.values():
                talk.refuse(unknown)
            raise unknown

    def same_sizes(self, number: int, args: Sequence[Any]) -> None:
        """Compare the sizes of a collective that were not known before it runs."""
        step = self._plan.steps[number]
        assert isinstance(step, Collective)
        self._talks[step.group].exchange(number, step, args)

    def failed(self, number: int, group: Any, error: Exception) -> CollectiveFailed:
        """What to raise where torch gave up on a collective: who is to blame, as far as known."""
        step = self._plan.steps[number]
        assert isinstance(step, Collective)
        talk = self._talks.get(step.group)
        guilty, why = talk.roll_call(number) if talk is not None else ((), "")
        why = f"{why} ({first_line(error)})" if why else first_line(error)
        rank = group.rank()
        return CollectiveFailed(said(step), step.group, number, step.line, rank, guilty, why)


def _entries(plan: Plan, group: str) -> list[fit.Entry]:
    """What this rank does in a group, step by step: all that the others must match."""
    return [
        fit.Entry(
            number,
            step.kind,
            step.type,
            [literal(arg) for arg in step.args[:-1] if not any(buffers(arg))],
        )
        for number, step in enumerate(plan.steps)
        if isinstance(step, Collective) and step.group == group
    ]


class _Talk:
    """The conversation of one plan's ranks in one group."""

    def __init__(self, group: Any, step: Collective, number: int) -> None:
        self.group, self._step, self._number = group, step, number
        self.rank, self.size = group.rank(), group.size()
        self._timeout = groups.group_timeout(group).total_seconds()
        self._store = groups.group_store(group)
        self._name = ""

    def _fail(self, guilty: Iterable[int], why: str) -> CollectiveFailed:
        step = self._step
        return CollectiveFailed(
            said(step), step.group, self._number, step.line, self.rank, guilty, why
        )

    def refuse(self, error: Exception) -> None:
        """Tell the others that this rank will not run its plan."""
        self._open()
        refusal = _refusal(self.rank, error)
        self._store.set(f"{self._name}/head/{self.rank}", refusal)
        if self.rank == 0:
            self._store.set(f"{self._name}/verdict", refusal)

    def _open(self) -> None:
        """Begin a conversation. Counted in the store: the n-th of the group for each rank."""
        self._name = f"torchgraft/{self._store.add(f'torchgraft/plans/{self.rank}', 1)}"

    def agree(self, name: str, entries: list[fit.Entry], frame: Frame | None) -> None:
        """Return if every rank's collectives fit together, else raise on every rank."""
        digest = fit.digest(entries)
        known = f"torchgraft/frames/{frame[0]}/{digest}/{self.rank}" if frame else ""
        if frame and frame[1] and self._store.check([known]):
            self._name = self._store.get(known).decode()
            return
        self._open()
        self._compare(name, entries, digest)
        if frame:
            self._store.set(known, self._name)

    def _compare(self, name: str, entries: list[fit.Entry], digest: str) -> None:
        head = {"hash": digest, **_whoami()}
        text = json.dumps([entry.data() for entry in entries])
        self._store.set(f"{self._name}/steps/{self.rank}", text)
        self._store.set(f"{self._name}/head/{self.rank}", json.dumps(head))
        if self.rank == 0:
            try:
                self._store.set(f"{self._name}/verdict", json.dumps(self._verdict(entries)))
            except Exception as error:  # our own mistake must not leave the others waiting
                self._store.set(f"{self._name}/verdict", _refusal(0, error))
                raise
        missing = self._await([f"{self._name}/verdict"], self._timeout + _GRACE)
        if missing:
            raise self._fail([0], f"rank 0 did not compare plans within {self._timeout:.0f} s")
        verdict = self._read(f"{self._name}/verdict")
        if verdict["missing"]:
            raise self._fail(verdict["missing"], _absent(verdict["missing"], self._timeout))
        if verdict["refused"] is not None:
            rank, why = verdict["refused"]
            raise self._fail([rank], why)
        if verdict["differ"] is not None:
            step, rank, has, other = verdict["differ"]
            raise RanksDiffer(name, step, rank, has, other, _FIX)

    def _verdict(self, entries: list[fit.Entry]) -> dict[str, Any]:
        """What rank 0 finds when it compares the ranks."""
        found: dict[str, Any] = {"missing": [], "refused": None, "differ": None}
        keys = [f"{self._name}/head/{rank}" for rank in range(self.size)]
        if missing := self._await(keys, self._timeout):
            return {**found, "missing": [keys.index(key) for key in missing]}
        heads = [self._read(key) for key in keys]
        for head in heads:
            if "refused" in head:
                return {**found, "refused": head["refused"]}
        if len({head["hash"] for head in heads}) > 1 or fit.is_one_sided(entries):
            said = [self._read(f"{self._name}/steps/{rank}") for rank in range(self.size)]
            ranks = [[fit.Entry.of(one) for one in entries] for entries in said]
            return {**found, "differ": fit.difference(ranks)}
        return found

    def exchange(self, number: int, step: Collective, args: Sequence[Any]) -> None:
        """Compare the actual sizes of a collective."""
        plain = [literal(arg) for arg in args[:-1] if not _tensors(arg)]
        entry = fit.Entry(number, step.kind, _actual(args), plain)
        ranks, topic = list(range(self.size)), "sizes"
        if fit.is_letter(entry):  # between two ranks; the others know nothing of it
            ranks = sorted((self.rank, int(plain[0])))
            way = "from" if (entry.kind == "send") is (self.rank == ranks[0]) else "to"
            topic = f"letters/{ranks}/{way}/{plain[1]}"
        turn = self._store.add(f"{self._name}/{topic}/turns/{self.rank}", 1)
        keys = {rank: f"{self._name}/{topic}/{turn}/{rank}" for rank in ranks}
        self._store.set(keys[self.rank], json.dumps(entry.data()))
        if missing := self._await([*keys.values()], self._timeout):
            absent = [rank for rank, key in keys.items() if key in missing]
            why = _absent(absent, self._timeout)
            where = (said(step), step.group, number, step.line, self.rank)
            raise CollectiveFailed(*where, absent, why)
        told: list[list[fit.Entry]] = [[] for _ in range(self.size)]
        for rank, key in keys.items():
            told[rank].append(fit.Entry.of(self._read(key)))
        found = fit.difference(told)
        if found is not None:
            fix = f"{said(step)} has sizes that are known when it runs, and they must fit."
            raise RanksDiffer(step.group, *found, fix)
        if turn > 1:  # who is in this turn has read the one before
            self._store.delete_key(f"{self._name}/{topic}/{turn - 1}/{self.rank}")

    def roll_call(self, number: int) -> tuple[list[int], str]:
        """The ranks that are gone or silent after a failure, and that in words."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            self._store.set(f"{self._name}/failed/{self.rank}", str(number))
            heads = {rank: self._read(f"{self._name}/head/{rank}") for rank in others}
            keys = [f"{self._name}/failed/{rank}" for rank in others]
            for seconds in (0.0, _ROLL_CALL):
                silent = [others[keys.index(key)] for key in self._await(keys, seconds)]
                if dead := [rank for rank in silent if _is_gone(heads[rank])]:
                    return dead, f"the process of {_ranks(dead)} is gone"
        except Exception as error:  # whatever a store raises when its host is gone
            return [], f"and the store does not answer, either: {first_line(error)}"
        if silent:
            return silent, f"there is no word from {_ranks(silent)}"
        steps = {rank: self._read(key) for rank, key in zip(others, keys, strict=True)}
        return [], "it failed on " + ", ".join(f"rank {r} (step {s})" for r, s in steps.items())

    def _await(self, keys: Sequence[str], seconds: float) -> list[str]:
        return wait.missing(self._store, keys, seconds)

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key))


def _refusal(rank: int, error: Exception) -> str:
    why = f"rank {rank} refused its plan: {first_line(error)}"
    return json.dumps({"missing": [], "refused": [rank, why], "differ": None})


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def _absent(ranks: Sequence[int], seconds: float) -> str:
    return f"{_ranks(ranks)} did not come to it within {seconds:.0f} s"


def _tensors(arg: Any) -> bool:
    return isinstance(arg, Tensor) or (
        isinstance(arg, (list, tuple)) and any(isinstance(one, Tensor) for one in arg)
    )


def _actual(args: Sequence[Any]) -> str:
    from torchgraft.fx.meta import describe

    return ", ".join(describe(arg) for arg in args if _tensors(arg))


def _whoami() -> dict[str, Any]:
    """This process, so that others on its machine can see whether it lives."""
    return {"host": _host(), "pid": os.getpid(), "born": _born(os.getpid())}


def _host() -> str:
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_gone(head: Any) -> bool:
    """Whether a process of this machine has ended; False where that cannot be seen."""
    return bool(head["host"]) and head["host"] == _host() and _born(head["pid"]) != head["born"]


def _born(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty for one that is over."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
