"""One CUDA graph for a whole program: captured at the first call of a shape, then replayed."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgraft import _torch
from torchgraft.errors import first_line
from torchgraft.report import Report

MOST_SHAPES = 16
"""How many captured shapes one program keeps; the least recently used one goes."""


@dataclasses.dataclass
class _Entry:
    graph: torch.cuda.CUDAGraph
    inputs: list[Any]
    outputs: Sequence[Any]
    moves: tuple[int, ...]  # inputs to copy in
    aliases: dict[int, int]  # output -> input whose memory it is


class Captured:
    """Runs a program as one CUDA graph per input shape.

    Inputs are copied into the graph's own (those of `static` keep their address: a moved one is
    captured again), outputs are fresh tensors, written inputs are copied back. A program that
    cannot be captured runs as it is, and the report says why. One call at a time: the graph's
    memory is shared between its replays. With `alias_outputs` the outputs are the graph's own,
    good until the next call. `collectives` says why those of the program cannot be captured, or
    None; it is None itself for a program that has none.
    """

    def __init__(
        self,
        run: _torch.Flat,
        *,
        static: frozenset[int],
        written: frozenset[int],
        report: Report,
        alias_outputs: bool = False,
        collectives: Callable[[], str | None] | None = None,
    ) -> None:
        self._run, self._static, self._written, self._report = run, static, written, report
        self._alias_outputs = alias_outputs
        self._collectives = collectives  # says why those of the program cannot be captured
        self._entries: collections.OrderedDict[Any, _Entry] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._refused = self._warm = False
        self._last: torch.cuda.Stream | None = None  # of the call before

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if self._refused or torch.cuda.is_current_stream_capturing():
            return self._run(args)
        with self._lock:
            key = tuple(map(self._key, range(len(args)), args))
            entry = self._entries.get(key)
            if entry is None:
                entry = self._capture(args)
                if entry is None:
                    return self._run(args)
                self._entries[key] = entry
                if len(self._entries) > MOST_SHAPES:
                    self._entries.popitem(last=False)
            else:
                self._entries.move_to_end(key)
            self._take_turn()
            return self._replay(entry, args)

    def _take_turn(self) -> None:
        """Let this call's stream wait for the call before: they share the graph's memory."""
        stream = torch.cuda.current_stream()
        if self._last is not None and stream != self._last:
            stream.wait_stream(self._last)
        self._last = stream

    def _key(self, index: int, arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        if index in self._static:
            return arg.data_ptr()
        return (*arg.shape, *arg.stride())

    def _capture(self, args: list[Any]) -> _Entry | None:
        if why := _uncapturable(args) or (self._collectives and self._collectives()):
            self._refuse(why)
            return None
        with torch.cuda.device(next((a.device for a in args if isinstance(a, Tensor)), None)):
            return self._captured(args)

    def _captured(self, args: list[Any]) -> _Entry | None:
        inputs = [
            arg if i in self._static or not isinstance(arg, Tensor) else _twin(arg)
            for i, arg in enumerate(args)
        ]
        moves = tuple(i for i, (a, b) in enumerate(zip(args, inputs, strict=True)) if a is not b)
        # A warm-up talks to the other ranks, which may not be capturing: one for all, at the start.
        warm = self._collectives is not None and self._warm
        kept = {i: inputs[i].clone() for i in self._written if i in self._static}
        states = torch.cuda.get_rng_state()
        graph = torch.cuda.CUDAGraph()
        try:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # lazy loading and tuning must not meet the capture
                if not warm:
                    self._run(list(inputs))
                    self._warm = True
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                outputs = self._run(list(inputs))
        except Exception as error:
            self._refuse(first_line(error))
            return None
        finally:
            torch.cuda.set_rng_state(states)
            for i, value in kept.items():
                inputs[i].copy_(value)
        if self._collectives is not None and not self._entries:
            self._report.notes.append("the captured CUDA graph holds its collectives")
        return _Entry(graph, inputs, outputs, moves, _aliases(inputs, outputs))

    def _refuse(self, why: str) -> None:
        self._refused = True
        self._report.notes.append(f"not captured as a CUDA graph: {why}")

    def _replay(self, entry: _Entry, args: list[Any]) -> list[Any]:
        for i in entry.moves:
            entry.inputs[i].copy_(args[i])
        entry.graph.replay()
        for i in self._written:
            if args[i] is not entry.inputs[i]:
                args[i].copy_(entry.inputs[i])
        results: list[Any] = []
        for i, output in enumerate(entry.outputs):
            if i in entry.aliases:
                results.append(_same_view(output, entry.inputs, args, entry.aliases[i]))
            elif self._alias_outputs or not isinstance(output, Tensor):
                results.append(output)
            else:
                results.append(output.clone())
        args.clear()
        return results


def _twin(arg: Tensor) -> Tensor:
    twin = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)
    return twin.copy_(arg)


def _uncapturable(args: Sequence[Any]) -> str | None:
    places = {arg.device for arg in args if isinstance(arg, Tensor)}
    if any(place.type != "cuda" for place in places):
        return "an input lies on the CPU"
    return "the inputs lie on several devices" if len(places) > 1 else None


def _aliases(inputs: Sequence[Any], outputs: Sequence[Any]) -> dict[int, int]:
    where = {
        value.untyped_storage().data_ptr(): i
        for i, value in enumerate(inputs)
        if isinstance(value, Tensor) and value.numel()
    }
    return {
        i: where[out.untyped_storage().data_ptr()]
        for i, out in enumerate(outputs)
        if isinstance(out, Tensor) and out.numel() and out.untyped_storage().data_ptr() in where
    }


def _same_view(output: Tensor, inputs: Sequence[Any], args: Sequence[Any], index: int) -> Tensor:
    """The view of the caller's input that `output` is of the graph's own copy of it."""
    own: Tensor = inputs[index]
    theirs: Tensor = args[index]
    if output.dtype != own.dtype:
        return output.clone()
    offset = output.storage_offset() - own.storage_offset() + theirs.storage_offset()
    if output.shape == own.shape and output.stride() == own.stride():
        return theirs if offset == theirs.storage_offset() else output.clone()
    return theirs.as_strided(output.shape, output.stride(), offset)
