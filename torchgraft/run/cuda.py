"""One CUDA graph for a whole program: captured at the first call of a shape, then replayed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgraft._torch import Flat
from torchgraft._torch import cuda as private
from torchgraft._torch.cuda import is_capturing, raw_stream
from torchgraft.errors import first_line
from torchgraft.report import Report
from torchgraft.run import ports

is_inference = torch.is_inference_mode_enabled
MOST_SHAPES = 16
"""How many captured shapes one program keeps; the least recently used one goes."""
AHEAD = 1 << 24
"""Bytes of outputs up to which those of the next call are made while this one runs."""

IN_CPP = "its CUDA graphs are replayed in C++"


class Captured:
    """Runs a program as one CUDA graph per input shape, one launch a call.

    Inputs are copied into the graph's own memory and outputs into fresh tensors by nodes of the
    graph, which are told the addresses before each launch; written inputs are copied back alike.
    Inputs of `static` keep their address: a moved one is captured again. A program that cannot be
    captured runs as it is, and the report says why. With `alias_outputs` the outputs are the
    graph's own, good until the next call. `fixed` says that the caller compares sizes and strides
    with what was declared, so there is one shape. `refusal` says why the program cannot be
    captured, or None; `collective`: other ranks take part. `native` does the same in C++, where it
    is built: what captures is Python's then, and what replays is not.
    """

    def __init__(
        self,
        run: Flat,
        *,
        report: Report,
        static: frozenset[int] = frozenset(),
        written: frozenset[int] = frozenset(),
        alias_outputs: bool = False,
        fixed: bool = False,
        refusal: Callable[[], str | None] = lambda: None,
        collective: bool = False,
        native: Callable[..., Flat] | None = None,
    ) -> None:
        self._run, self._static, self._written, self._report = run, static, written, report
        self._alias_outputs, self._fixed = alias_outputs, fixed
        self._refusal, self._collective = refusal, collective
        self._native = None if collective else native
        self._replay: Flat | None = None  # all of it in C++
        self._graphs: dict[Any, _Graph] = {}
        self._only: _Graph | None = None  # of a program with one shape
        self._lock = threading.Lock()
        self._refused = self._warm = False

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if self._replay is not None:
            return self._replay(args)
        if self._refused or is_capturing():
            return self._run(args)
        with self._lock:
            graph = self._only or self._in_cpp(args) or self._graph_for(args)
            return self._run(args) if graph is None else graph(args)

    def _in_cpp(self, args: Sequence[Any]) -> Flat | None:
        if self._native is None or not all(type(arg) is int or _is_dense(arg) for arg in args):
            return None
        places = [str(arg.device) for arg in args if isinstance(arg, Tensor)]
        if self._replay is None and places and not self._why_not(args):
            edge = (self._static, self._written, self._alias_outputs)
            self._replay = self._native(self._run, places[0], *edge, self._refuse)
            self._report.notes.append(IN_CPP)
        return self._replay

    def _why_not(self, args: Sequence[Any]) -> str | None:
        return ports.unavailable() or _uncapturable(args) or self._refusal()

    def _graph_for(self, args: list[Any]) -> _Graph | None:
        """The graph of these inputs' shapes; None where there can be none."""
        key = self._key(args)
        graph = self._graphs.pop(key, None) or self._capture(args)
        if graph is not None:
            self._graphs[key] = graph  # the last one, so the last to go
            if len(self._graphs) > MOST_SHAPES:
                torch.cuda.synchronize()  # the memory of a graph that runs must stay
                del self._graphs[next(iter(self._graphs))]
            if self._fixed and graph.is_free:
                self._only = graph
        return graph

    def _key(self, args: Sequence[Any]) -> Any:
        key: list[Any] = []
        for i, arg in enumerate(args):
            if not isinstance(arg, Tensor):
                key.append(arg)
                continue
            key += (arg.shape, arg.stride())
            if self._stays(i, arg):
                key.append(arg.data_ptr())
        return tuple(key)

    def _stays(self, index: int, arg: Tensor) -> bool:
        """Whether the graph works on an input itself: what is between the elements of one that is
        written is somebody else's, and must not be copied back."""
        return index in self._static or (index in self._written and _span(arg) != arg.numel())

    def _capture(self, args: list[Any]) -> _Graph | None:
        if why := self._why_not(args):
            self._refuse(why)
            return None
        device = next((arg.device for arg in args if isinstance(arg, Tensor)), None)
        with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
            return self._captured(args)

    def _captured(self, args: list[Any]) -> _Graph | None:
        inputs = [
            _twin(arg) if isinstance(arg, Tensor) and not self._stays(i, arg) else arg
            for i, arg in enumerate(args)
        ]
        kept = {i: inputs[i].clone() for i in self._written if inputs[i] is args[i]}
        states = torch.cuda.get_rng_state()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                # Lazy loading and tuning must not meet the capture. A warm-up talks to the other
                # ranks, which may not be capturing: one for all shapes, at the start.
                if not (self._collective and self._warm):
                    self._run(list(inputs))
                    self._warm = True
                torch.cuda.synchronize()
                graph = _Graph(self._run, args, inputs, self._written, self._alias_outputs)
        except Exception as error:
            self._refuse(first_line(error))
            return None
        finally:
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.set_rng_state(states)
            for i, value in kept.items():
                inputs[i].copy_(value)
        if self._collective and not self._graphs:
            self._report.notes.append("the captured CUDA graph holds its collectives")
        return graph

    def _refuse(self, why: str) -> None:
        self._refused = True
        self._report.notes.append(f"not captured as a CUDA graph: {why}")


class _Graph:
    """The capture of one shape, on a stream that is not the default one. A free one does not care
    where its inputs lie."""

    def __init__(
        self,
        run: Flat,
        args: Sequence[Any],
        inputs: Sequence[Any],
        written: frozenset[int],
        alias_outputs: bool,
    ) -> None:
        moved = [i for i, arg in enumerate(args) if inputs[i] is not arg and arg.numel()]
        back = [i for i in moved if i in written]
        own = {i: (inputs[i].data_ptr(), _bytes(inputs[i])) for i in moved}
        self._at = {i: args[i].data_ptr() for i in moved}
        self.is_free = all(own is not arg for own, arg in zip(inputs, args, strict=True))
        self._inputs = inputs  # alive as long as the graph
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        with private.capturing(self._graph):
            nodes = ports.add([(own[i][0], self._at[i], own[i][1]) for i in moved])
            self._outputs = list(run(list(inputs)))
            self._views = _views(inputs, self._outputs)
            self._parts = [] if alias_outputs else _parts(self._outputs, self._views)
            backs = ports.add([(self._at[i], *own[i]) for i in back])
            # Each launch is told where to.
            made = ports.add([(part.origin, part.origin, part.size) for part in self._parts])
        self._graph.instantiate()
        self._launch = private.launch_of(self._graph)
        redirect = functools.partial(ports.redirect_of, self._graph)
        homeward = {
            i: redirect(node, self._at[i], *own[i], inward=False)
            for i, node in zip(back, backs, strict=True)
        }
        self._moved = []
        for i, node in zip(moved, nodes, strict=True):
            to, size = own[i]
            inward = redirect(node, to, self._at[i], size, inward=True)
            self._moved.append((i, inward, homeward.get(i)))
        for part, node in zip(self._parts, made, strict=True):
            part.redirect = redirect(node, part.origin, part.origin, part.size, inward=False)
        self._device = torch.cuda.current_device()
        self._ahead = sum(part.size for part in self._parts) <= AHEAD
        self._ready: list[Any] | None = None
        self._stream, self._inference = 0, False  # that those were made under

    def __call__(self, args: list[Any]) -> list[Any]:
        stream, inference = raw_stream(self._device), is_inference()
        results = self._ready
        if results is None or stream != self._stream or inference != self._inference:
            results = self._make()
        for part in self._parts:
            part.redirect(part.at)
        told = self._at
        for i, inward, outward in self._moved:
            at = args[i].data_ptr()
            if at != told[i]:
                inward(at)
                if outward is not None:
                    outward(at)
                told[i] = at
        self._launch()
        for i, source in self._views.items():
            results[i] = _same_view(self._outputs[i], self._inputs[source], args[source])
        args.clear()
        # Beside the device's work; to redirect copies would wait for its end.
        self._ready = self._make() if self._ahead else None
        self._stream, self._inference = stream, inference
        return results

    def _make(self) -> list[Any]:
        """Outputs of the next launch."""
        results = list(self._outputs)
        for part in self._parts:
            part.make(results)
        return results


class _Part:
    """Outputs that share memory: made as one tensor, of which each is a view."""

    def __init__(self, outputs: Mapping[int, Tensor]) -> None:
        first = next(iter(outputs.values()))
        low = min(out.storage_offset() for out in outputs.values())
        high = max(out.storage_offset() + _span(out) for out in outputs.values())
        alike = all(_layout(out) == _layout(first) for out in outputs.values())
        layout = (first.shape, first.stride()) if alike else ((high - low,), (1,))
        self._new = functools.partial(
            torch.empty_strided, *layout, dtype=first.dtype, device=first.device
        )
        self._views = {
            i: None if alike else (out.shape, out.stride(), out.storage_offset() - low)
            for i, out in outputs.items()
        }
        before = int(first.storage_offset() - low) * first.element_size()
        self.origin = first.data_ptr() - before
        self.size = int(high - low) * first.element_size()
        self.at = 0
        self.redirect: Callable[[int], None]

    def make(self, results: list[Any]) -> None:
        base = self._new()
        self.at = base.data_ptr()
        for i, view in self._views.items():
            results[i] = base if view is None else base.as_strided(*view)


def _parts(outputs: Sequence[Any], views: Mapping[int, int]) -> list[_Part]:
    groups: dict[Any, dict[int, Tensor]] = {}
    for i, out in enumerate(outputs):
        if isinstance(out, Tensor) and out.numel() and i not in views:
            groups.setdefault(_memory(out), {})[i] = out
    return [_Part(group) for group in groups.values()]


def _layout(tensor: Tensor) -> Any:
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def _span(tensor: Tensor) -> int:
    """How many elements lie between the first and the last one."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs) if tensor.numel() else 0


def _bytes(tensor: Tensor) -> int:
    return _span(tensor) * tensor.element_size()


def _twin(arg: Tensor) -> Tensor:
    """The same layout in memory of our own, whatever is between the elements included."""
    memory = arg.as_strided((_span(arg),), (1,)).clone()
    return memory.as_strided(arg.shape, arg.stride(), 0)


def _is_dense(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.layout == torch.strided


def _uncapturable(args: Sequence[Any]) -> str | None:
    places = {arg.device for arg in args if isinstance(arg, Tensor)}
    if any(place.type != "cuda" for place in places):
        return "an input lies on the CPU"
    return "the inputs lie on several devices" if len(places) > 1 else None


def _views(inputs: Sequence[Any], outputs: Sequence[Any]) -> dict[int, int]:
    """Which outputs are views of which inputs."""
    where = {_memory(x): i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.numel()}
    return {
        i: where[_memory(out)]
        for i, out in enumerate(outputs)
        if isinstance(out, Tensor) and out.numel() and _memory(out) in where
    }


def _memory(tensor: Tensor) -> Any:
    return tensor.untyped_storage().data_ptr(), tensor.dtype


def _same_view(output: Tensor, own: Tensor, theirs: Tensor) -> Tensor:
    """The view of the caller's input that `output` is of the graph's own copy of it."""
    if _layout(output) == _layout(own):
        return theirs
    offset = output.storage_offset() - own.storage_offset() + theirs.storage_offset()
    return theirs.as_strided(output.shape, output.stride(), offset)
