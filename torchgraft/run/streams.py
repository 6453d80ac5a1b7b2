"""Executors for plans over several streams: worker threads on the host, a device's own streams.

Both walk the same plan. The caller's thread runs the main stream; a plan is proved before it runs,
so what the streams may do at the same time cannot change the result.
"""

from __future__ import annotations

import functools
import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgraft import _torch
from torchgraft.errors import UnorderedUse
from torchgraft.plan import MAIN, Buffer, Free, Launch, Plan, PlanStep, Record, buffers
from torchgraft.run.host import Kernel
from torchgraft.stream.prove import hazards, memories


def prove(plan: Plan) -> None:
    """Raise `UnorderedUse` unless the plan cannot race."""
    for found in hazards(plan):
        first = str(plan.steps[found.first]) if found.first >= 0 else "the caller"
        last = found.second >= len(plan.steps)
        second = "the return to the caller" if last else str(plan.steps[found.second])
        raise UnorderedUse(str(found.buffer), found.kind, first, second)


class _Call:
    """One invocation: its values and its events."""

    def __init__(self, plan: Plan, args: list[Any], constants: Mapping[str, Any]) -> None:
        self.values: dict[Buffer, Any] = dict(zip(plan.inputs, args, strict=True))
        self.values.update((buffer, constants[name]) for buffer, name in plan.constants)
        args.clear()

    def launch(self, step: Launch, kernel: Kernel) -> None:
        args = _filled(step.args, self.values)
        if kernel.boxed:
            result = kernel.fn(list(args))
        else:
            result = kernel.fn(*args, **{k: _filled(v, self.values) for k, v in step.kwargs})
        parts = result if step.unpack else (result,)
        for out, value in zip(step.outputs, parts, strict=False):
            if out is not None:
                self.values[out] = value

    def outputs(self, plan: Plan) -> list[Any]:
        return list(_filled(plan.outputs, self.values))


def _filled(tree: Any, values: Mapping[Buffer, Any]) -> Any:
    if isinstance(tree, Buffer):
        return values[tree]
    if isinstance(tree, (list, tuple)):
        return type(tree)(_filled(item, values) for item in tree)
    return tree


# --- The host: a stream is a worker thread ---


def link_host(
    plan: Plan,
    kernels: Mapping[str, Kernel],
    constants: Mapping[str, Any],
    adversary: int | None = None,
) -> _torch.Flat:
    """A function that runs the plan with one worker thread a side stream.

    `adversary` seeds delays before the steps of every stream: whatever order the plan leaves open
    will occur, so a race shows without a device.
    """
    prove(plan)
    by_stream: dict[str, list[PlanStep]] = {}
    for step in plan.steps:
        by_stream.setdefault(step.stream, []).append(step)
    events = {step.event for step in plan.steps if isinstance(step, Record)}
    threads = _Threads([name for name in by_stream if name != MAIN])

    def walk(steps: Sequence[PlanStep], call: _HostCall, delay: Callable[[], None]) -> None:
        try:
            for step in steps:
                delay()
                call.step(step, kernels)
        except BaseException as error:  # whatever it is, the caller gets it and nobody hangs
            call.fail(error)

    def side(name: str, call: _HostCall) -> None:
        with torch.inference_mode(call.inference), torch.no_grad():
            walk(by_stream[name], call, _delay(adversary, name))
        call.done.release()

    def run(args: list[Any]) -> list[Any]:
        call = _HostCall(plan, args, constants, events)
        workers = threads.start(lambda name: functools.partial(side, name, call))
        walk(by_stream.get(MAIN, ()), call, _delay(adversary, MAIN))
        for _ in workers:
            call.done.acquire()
        if call.error is not None:
            raise call.error
        return call.outputs(plan)

    return run


class _HostCall(_Call):
    def __init__(
        self, plan: Plan, args: list[Any], constants: Mapping[str, Any], events: set[str]
    ) -> None:
        super().__init__(plan, args, constants)
        self.events = {name: threading.Event() for name in events}
        self.done = threading.Semaphore(0)
        self.inference = torch.is_inference_mode_enabled()
        self.error: BaseException | None = None

    def step(self, step: PlanStep, kernels: Mapping[str, Kernel]) -> None:
        if self.error is not None:
            return
        if isinstance(step, Launch):
            self.launch(step, kernels[step.kernel])
        elif isinstance(step, Free):
            del self.values[step.buffer]
        elif isinstance(step, Record):
            self.events[step.event].set()
        else:
            self.events[step.event].wait()

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        for event in self.events.values():
            event.set()


class _Threads:
    """A worker for each side stream. A process that is forked has none of the threads of the first
    one, and begins its own."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._begin()

    def _begin(self) -> None:
        workers = {name: _Worker() for name in self._names}
        self._own = os.getpid(), threading.Lock(), workers

    def start(self, job: Callable[[str], Callable[[], Any]]) -> Mapping[str, _Worker]:
        """Give each stream its job of a call; who waits for the call must hold the workers."""
        if self._own[0] != os.getpid():
            self._begin()
        _, order, workers = self._own
        with order:  # every worker sees concurrent calls in one order, so none waits for another
            for name, worker in workers.items():
                worker.submit(job(name))
        return workers


class _Worker:
    """A thread that runs what it is given, in order."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._loop, args=(self._jobs,), daemon=True)
        thread.start()
        weakref.finalize(self, self._stop, self._jobs, thread)

    def submit(self, job: Callable[[], Any]) -> None:
        self._jobs.put(job)

    @staticmethod
    def _stop(jobs: queue.SimpleQueue[Callable[[], Any] | None], thread: threading.Thread) -> None:
        jobs.put(None)
        if thread is not threading.current_thread():  # at exit, none may be left inside torch
            thread.join()

    @staticmethod
    def _loop(jobs: queue.SimpleQueue[Callable[[], Any] | None]) -> None:
        while (job := jobs.get()) is not None:
            job()
            del job  # with it goes a call's memory, which would wait for the next call


def _delay(seed: int | None, stream: str) -> Callable[[], None]:
    if seed is None:
        return lambda: None
    rng = random.Random(f"{seed} {stream}")
    return lambda: time.sleep(rng.choice((0, 0, 0.0001, 0.001)))


# --- A device: its own streams ---


def link_device(
    plan: Plan, kernels: Mapping[str, Kernel], constants: Mapping[str, Any], device: str
) -> _torch.Flat:
    """A function that enqueues the plan on streams of a device, forked from and joined into the
    caller's. Calls are enqueued one after the other.

    A device's allocator gives freed memory to the stream that it was made on, which others in the
    process may use too. What another stream frees, because that one has nothing left to do, is
    therefore waited for there; a capture keeps it to its end, since nobody in it could take it.
    """
    prove(plan)
    api = torch.get_device_module(device)
    roots, sides = memories(plan), plan.streams[1:]
    made_on = {
        out: step.stream for step in plan.launches for out in step.outputs if out is not None
    }
    foreign = [b for b in set(buffers(plan.outputs)) if made_on.get(b, MAIN) != MAIN]
    homes = {
        step.buffer: home
        for step in plan.steps
        if isinstance(step, Free)
        and (home := made_on.get(roots.get(step.buffer, step.buffer), MAIN))
        not in (MAIN, step.stream)
    }
    order = threading.Lock()
    own: dict[torch.device, dict[str, Any]] = {}

    def run(args: list[Any]) -> list[Any]:
        place = _place(device, (*args, *constants.values()))
        capturing = device == "cuda" and torch.cuda.is_current_stream_capturing()
        with order:
            if place not in own:
                own[place] = {name: api.Stream(place) for name in sides}
            current = api.current_stream(place)
            call = _Call(plan, args, constants)
            try:
                lanes = {MAIN: current, **own[place]}
                _enqueue(plan, call, kernels, lanes, homes, capturing, api)
            except BaseException:  # the caller's stream must not pass what is under way
                for stream in () if capturing else own[place].values():
                    current.wait_stream(stream)
                raise
            finally:
                if not capturing:
                    end = current.record_event()
                    for stream in own[place].values():
                        stream.wait_event(end)
            results = call.outputs(plan)
            if not capturing:
                for buffer in foreign:  # the caller's to free
                    if isinstance(call.values[buffer], Tensor):
                        call.values[buffer].record_stream(current)
        return results

    return run


def _place(device: str, values: Sequence[Any]) -> torch.device:
    """Which of the devices of a kind the values lie on; the current one where none says."""
    for value in values:
        if isinstance(value, Tensor) and value.device.type == device:
            return value.device
    return torch.device(device, torch.get_device_module(device).current_device())


def _enqueue(
    plan: Plan,
    call: _Call,
    kernels: Mapping[str, Kernel],
    streams: Mapping[str, Any],
    homes: Mapping[Buffer, str],
    capturing: bool,
    api: Any,
) -> None:
    """Launch every step; buffers of `homes` are freed by another stream than had made them."""
    events: dict[str, Any] = {}
    for step in plan.steps:
        stream = streams[step.stream]
        if isinstance(step, Launch):
            with api.stream(stream):
                call.launch(step, kernels[step.kernel])
        elif isinstance(step, Free):
            home = homes.get(step.buffer)
            if home is not None and not capturing:
                streams[home].wait_event(stream.record_event())
            if home is None or not capturing:
                del call.values[step.buffer]
        elif isinstance(step, Record):
            events[step.event] = stream.record_event()
        else:
            stream.wait_event(events[step.event])
