"""`torch.npu.NPUGraph`: operators are recorded once and run again on the same memory.

Off the NPU nothing captures a stream, so each operator is kept as a call. Capturing has no effect,
as on the device: what it writes is put back, random numbers too, and its results are NaN
until a replay. A replay runs the calls in their order on the current stream.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgraft import _torch
from torchgraft._torch import calls, groups
from torchgraft.compat.notes import without_effect
from torchgraft.errors import CannotCapture, UnknownName
from torchgraft.op import schema as schemas

__all__ = [
    "NPUGraph",
    "graph",
    "graph_pool_handle",
    "graph_task_group_begin",
    "graph_task_group_end",
    "graph_task_update_begin",
    "graph_task_update_end",
    "is_current_stream_capturing",
]
MODES = ("global", "thread_local", "relaxed")
LENGTHS = frozenset(
    ["actual_seq_lengths", "actual_seq_lengths_kv", "actual_seq_qlen", "actual_seq_kvlen"]
)
"""Arguments that `update` may change: they are numbers, not memory."""
_COMM = ("c10d", "_c10d_functional")
_HANDLES = itertools.count(1)


@dataclasses.dataclass
class Step:
    """One call, with the memory that its new results have for good."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: list[tuple[int, Tensor]]

    def run(self) -> None:
        args, kwargs = _torch.map_leaves(groups.boxed_group, (self.args, self.kwargs))
        result = _torch.flatten(self.func(*args, **kwargs))[0]
        for place, held in self.fresh:
            held.copy_(result[place])
        if self.func.namespace == "c10d":
            for one in result:
                if isinstance(one, torch.ScriptObject):
                    one.wait()  # type: ignore[attr-defined]

    def change(self, new: Mapping[str, Any]) -> None:
        """Let some arguments be others from now on."""
        schema = self.func._schema
        known = [argument.name for argument in schema.arguments]
        for name in new:
            if name not in known:
                raise UnknownName("argument", name, known, where=str(self.func))
        values = schemas.bind(schema, self.args, self.kwargs)
        for name, value in new.items():
            values[known.index(name)] = value
        self.args, self.kwargs = schemas.call(schema, lambda *a, **k: (a, k), values)


class Recorder:
    """What is called between `begin` and `end`."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._own: set[int] = set()  # memory that was made inside
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._inside = contextlib.ExitStack()

    def begin(self) -> None:
        """Record what this thread calls from now on."""
        global _recording
        if _recording is not None:
            raise RuntimeError("torch.npu.NPUGraph: a graph is being captured already")
        _recording = self
        self._random = _random_states()
        self._inside.enter_context(calls.through(self._call))

    def end(self) -> None:
        """Stop, and put back all that was written."""
        global _recording
        self._inside.close()
        _recording = None
        _begun.clear()
        _synchronize()
        with torch.inference_mode():
            for now, before in self._before.values():
                now.copy_(before)
            for held in (held for step in self.steps for _, held in step.fresh):
                if held.dtype.is_floating_point:
                    _bytes_of(held).view(held.dtype).fill_(float("nan"))
        _set_random_states(self._random)
        self._before.clear()
        _synchronize()  # nobody waits for a stream that has done nothing

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _check(func, args, kwargs)
        given = [x for x in _torch.flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        writes = schemas.written(func._schema)
        values = zip(func._schema.arguments, schemas.bind(func._schema, args, kwargs), strict=True)
        written = [value for argument, value in values if argument.name in writes]
        comm = func.namespace in _COMM
        self._keep(given if comm else _torch.flatten(written)[0])
        result = func(*args, **kwargs)
        known = {_place(x) for x in given}
        fresh = [
            (i, x.detach())
            for i, x in enumerate(_torch.flatten(result)[0])
            if isinstance(x, Tensor) and x.untyped_storage().nbytes() and _place(x) not in known
        ]
        self._own.update(_place(x) for _, x in fresh)
        if fresh or writes or comm:  # a view needs no second call
            args, kwargs = _torch.map_leaves(_held, (args, kwargs))
            self.steps.append(step := Step(func, args, kwargs, fresh))
            if any(argument.name == "async_op" for argument in func._schema.arguments):
                step.change({"async_op": True})  # or NCCL gives no work to wait for, but a null one
        return result

    def _keep(self, written: Iterable[Any]) -> None:
        for x in written:
            if not isinstance(x, Tensor) or (place := _place(x)) in self._own:
                continue
            if place not in self._before:
                now = _bytes_of(x)
                self._before[place] = (now, now.clone())


_recording: Recorder | None = None


def _held(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else groups.held_group(x)


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _bytes_of(x: Tensor) -> Tensor:
    """All of a tensor's memory, also that which it does not show."""
    storage = x.untyped_storage()
    with torch.inference_mode(x.is_inference()):
        found = torch.empty(0, dtype=torch.uint8, device=x.device)
        return found.set_(storage, 0, (storage.nbytes(),), (1,))


def _check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise where a captured stream could not take the call: it would wait for the device."""
    why = None
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
        why = "its result depends on values, which nobody has while a graph is captured."
    elif func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
        tensors = [x for x in _torch.flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        made = kwargs.get("device") or tensors[0].device  # by `_to_copy`, in plain memory
        if len({made.type, *(x.device.type for x in tensors)}) > 1:
            host = [x for x in tensors if x.device.type == "cpu"]
            if not host or not all(x.is_pinned() for x in host):
                why = "it copies between the host and the device, and waits for that."
    if why is not None:
        fix = "Do it before the capture or after a replay."
        raise CannotCapture(f"{func} in torch.npu.graph", why, None, fix)


def _npu() -> Any:
    return torch.npu  # type: ignore[attr-defined]


def _synchronize() -> None:
    _npu().synchronize()


def _random_states() -> tuple[Tensor, list[Tensor]]:
    return torch.get_rng_state(), _npu().get_rng_state_all()


def _set_random_states(states: tuple[Tensor, list[Tensor]]) -> None:
    torch.set_rng_state(states[0])
    _npu().set_rng_state_all(states[1])


class NPUGraph:
    """Calls that were recorded by `torch.npu.graph`, to be run again by `replay`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._steps: list[Step] | None = None
        self._recorder: Recorder | None = None
        self._updates = False  # whether each replay waits for an update
        self._new: Sequence[Mapping[str, Any]] | None = None
        self._waiting = 0
        self._pool = graph_pool_handle()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Record what this thread calls, until `capture_end`."""
        if capture_error_mode not in MODES:
            raise UnknownName("capture_error_mode", capture_error_mode, MODES)
        if self._steps is not None:
            raise RuntimeError("torch.npu.NPUGraph holds a capture; reset() it first")
        self._pool = pool or self._pool
        self._recorder = Recorder()
        self._recorder.begin()

    def capture_end(self) -> None:
        """Keep what was recorded."""
        recorder = self._recorder
        if recorder is None:
            raise RuntimeError("torch.npu.NPUGraph.capture_end: nothing is being captured")
        self._recorder = None
        recorder.end()
        self._steps = recorder.steps

    def replay(self) -> None:
        """Run the calls, on the current stream. Where the capture asked for updates
        (`auto_dispatch_capture`), the calls run when there is one: `update` may come later."""
        steps = self._captured("replay")
        if self._updates and any(map(_updatable, steps)) and self._new is None:
            self._waiting += 1
            return
        for step, new in self._changes(self._new or [{}]):
            step.change(new)
        self._new = None
        with torch.inference_mode():
            for step in steps:
                step.run()

    def update(self, cpu_update_input: Sequence[Mapping[str, Any]]) -> None:
        """Give attention other lengths for the next replay: one dict for all, or one for each."""
        if not self._updates:
            raise RuntimeError(
                "torch.npu.NPUGraph.update: capture with auto_dispatch_capture=True for that"
            )
        self._captured("update")
        list(self._changes(cpu_update_input))
        self._new = cpu_update_input
        if self._waiting:
            self._waiting -= 1
            self.replay()

    def _changes(
        self, new: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[Step, Mapping[str, Any]]]:
        steps = [step for step in self._steps or () if _updatable(step)]
        if len(new) not in (1, len(steps)):
            raise RuntimeError(
                f"torch.npu.NPUGraph.update: {len(new)} updates for {len(steps)} calls of attention"
            )
        return zip(steps, list(new) * (len(steps) if len(new) == 1 else 1), strict=True)

    def _captured(self, what: str) -> list[Step]:
        if self._steps is None:
            raise RuntimeError(f"torch.npu.NPUGraph.{what}: nothing was captured")
        return self._steps

    def reset(self) -> None:
        """Forget the capture, and give its memory back."""
        self._steps = self._new = None
        self._waiting = 0

    def pool(self) -> Any:
        """A token that other captures may name; memory belongs to each capture here."""
        return self._pool

    def enable_debug_mode(self) -> None:
        """`debug_dump` works without it."""

    def debug_dump(self, debug_path: str) -> None:
        """Write the calls, a line for each."""
        lines = [str(step.func) for step in self._captured("debug_dump")]
        with open(debug_path, "w", encoding="utf-8") as file:
            file.write("\n".join([*lines, ""]))


def _updatable(step: Step) -> bool:
    names = {argument.name for argument in step.func._schema.arguments}
    return step.func.namespace == "npu" and bool(names & LENGTHS)


class graph:
    """Inside, calls are captured into a graph, on a stream of their own."""

    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        auto_dispatch_capture: bool = False,
        **kwargs: Any,
    ) -> None:
        self.graph, self.pool, self.mode = npu_graph, pool, capture_error_mode
        self.graph._updates = auto_dispatch_capture
        self.stream = _npu().stream(stream if stream is not None else _npu().Stream())
        if kwargs:
            without_effect("torch.npu.graph: ", dict.fromkeys(kwargs, "for the real device"))

    def __enter__(self) -> None:
        _synchronize()
        with contextlib.ExitStack() as inside:
            inside.enter_context(self.stream)
            self.graph.capture_begin(self.pool, self.mode)
            self._inside = inside.pop_all()

    def __exit__(self, *error: Any) -> None:
        with self._inside:
            self.graph.capture_end()
            if error[0] is not None:
                self.graph.reset()


def graph_pool_handle() -> tuple[int, int]:
    """A token for `pool=`."""
    return 0, next(_HANDLES)


def is_current_stream_capturing() -> bool:
    """Whether a graph is being captured."""
    return _recording is not None


@dataclasses.dataclass(frozen=True)
class TaskGroup:
    """Some calls of a capture, to be given other arguments later."""

    steps: list[Step]
    first: int
    last: int


_begun: list[tuple[Recorder, int]] = []
_update: list[tuple[Recorder, TaskGroup]] = []


def graph_task_group_begin(stream: Any) -> None:
    """What is captured from here is a group."""
    if _recording is None or _begun:
        raise RuntimeError("torch.npu.graph_task_group_begin: not in a capture, or in a group")
    _begun.append((_recording, len(_recording.steps)))


def graph_task_group_end(stream: Any) -> TaskGroup:
    """The group, for `graph_task_update_begin`."""
    if not _begun or _begun[-1][0] is not _recording:
        raise RuntimeError("torch.npu.graph_task_group_end: no group was begun in this capture")
    recorder, first = _begun.pop()
    return TaskGroup(recorder.steps, first, len(recorder.steps))


def graph_task_update_begin(stream: Any, handle: TaskGroup) -> None:
    """The calls from here are the group's from the next replay on. They have no effect now."""
    recorder = Recorder()
    recorder.begin()
    _update.append((recorder, handle))


def graph_task_update_end(stream: Any) -> None:
    """Let the group be what was called since `graph_task_update_begin`: the same operators."""
    if not _update:
        raise RuntimeError("torch.npu.graph_task_update_end: no update was begun")
    recorder, group = _update.pop()
    recorder.end()
    old, new = group.steps[group.first : group.last], recorder.steps
    if [step.func for step in old] != [step.func for step in new]:
        names = ", ".join(str(step.func) for step in old)
        raise RuntimeError(f"torch.npu.graph_task_update_end: the group is of {names}")
    memory: dict[int, Tensor] = {}

    def moved(x: Any) -> Any:
        """A result of the new calls is that of the old ones."""
        if not isinstance(x, Tensor) or _place(x) not in memory:
            return x
        return memory[_place(x)].as_strided(x.size(), x.stride(), x.storage_offset())

    for step, other in zip(old, new, strict=True):
        step.args, step.kwargs = _torch.map_leaves(moved, (other.args, other.kwargs))
        pairs = zip(step.fresh, other.fresh, strict=True)
        memory |= {_place(theirs): mine for (_, mine), (_, theirs) in pairs}
