"""What plans over several streams keep: at most 1.1 times what one stream does, by default."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule import random_launches
from torch import Tensor

import torchgraft as graft
from bench.models import MODELS
from torchgraft.codegen import spread
from torchgraft.fx.cost import NOMINAL
from torchgraft.plan import Buffer, Collective, Free, Launch, Plan
from torchgraft.program import Program
from torchgraft.run.host import Kernel
from torchgraft.stream import memory
from torchgraft.stream.order import schedule
from torchgraft.stream.prove import hazards

INPUTS = (Buffer(0), Buffer(1))


def random_plan(seed: int, count: int, streams: int) -> tuple[Plan, dict[Buffer, int]]:
    """A plan and sizes for its buffers; a fifth of the results are views."""
    rng = random.Random(seed)
    launches, outputs = random_launches(seed, count, streams)
    made = [(step.outputs[0], step.args[0]) for step in launches]
    shared = [(view, base) for view, base in made if rng.random() < 0.2]
    sizes = {out: 1 << rng.randint(0, 12) for out, _ in made if out is not None}
    return schedule(INPUTS, (), launches, outputs, shared=shared), sizes  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 60),
    st.integers(2, 6),
    st.sampled_from([1.0, 1.1, 1.5]),
)
def test_a_plan_keeps_what_was_granted(seed: int, count: int, streams: int, grant: float) -> None:
    plan, sizes = random_plan(seed, count, streams)
    limit = grant * memory.peak(memory.alone(plan), sizes)
    lean, waits = memory.lean(plan, sizes, limit)
    assert memory.peak(lean, sizes) <= limit
    assert hazards(lean) == []
    assert lean.launches == plan.launches
    if memory.peak(plan, sizes) <= limit:
        assert (lean, waits) == (plan, 0)


def test_many_random_plans_would_keep_more() -> None:
    """So the test above can fail, and a larger grant costs fewer waits."""
    over, waits = 0, dict.fromkeys((1.0, 1.1, 1.5), 0)
    for seed in range(50):
        plan, sizes = random_plan(seed, 40, 4)
        alone = memory.peak(memory.alone(plan), sizes)
        over += memory.peak(plan, sizes) > 1.1 * alone
        for grant in waits:
            waits[grant] += memory.lean(plan, sizes, grant * alone)[1]
    assert over > 10
    assert waits[1.0] > waits[1.1] > waits[1.5]


def test_nobody_waits_for_a_collective_to_free_what_it_reads() -> None:
    x, y, z, w, v = map(Buffer, range(5))
    launches = [
        Launch("k", (x,), (), (y,)),
        Collective("sum", (y, "sum", "tp"), (), (z,), stream="comm:tp", kind="all_reduce"),
        Launch("k", (x,), (), (w,)),
        Launch("k", (w,), (), (v,)),
    ]
    plan = schedule((x,), (), launches, (z, v))
    sizes = dict.fromkeys((y, z, w, v), 1)
    assert memory.peak(plan, sizes) > memory.peak(memory.alone(plan), sizes)
    assert memory.lean(plan, sizes, 0) == (plan, 0)


# --- Measured: what a program really takes from torch's allocator ---


def measured(program: Program, args: tuple[Tensor, ...]) -> tuple[int, list[Any]]:
    """The most bytes that a program has at once, what its kernels need for themselves included, and
    its results. Its steps are taken in launch order, as a device's are enqueued."""
    plan, kernels, constants = program.plan, program.linker.kernels, program.linker.constants
    values: dict[Buffer, Any] = dict(zip(plan.inputs, args, strict=True))
    values |= {buffer: constants[name] for buffer, name in plan.constants}

    def filled(tree: Any) -> Any:
        if isinstance(tree, (list, tuple)):
            return type(tree)(map(filled, tree))
        return values[tree] if isinstance(tree, Buffer) else tree

    def launch(step: Launch, kernel: Kernel) -> None:
        given = filled(step.args)
        named = {key: filled(value) for key, value in step.kwargs}
        made = kernel.fn(list(given)) if kernel.boxed else kernel.fn(*given, **named)
        parts = zip(step.outputs, made if step.unpack else [made], strict=False)
        values.update((out, part) for out, part in parts if out is not None)

    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    with torch.no_grad(), profile:
        for step in plan.steps:
            if isinstance(step, Launch):
                launch(step, kernels[step.kernel])
            elif isinstance(step, Free):
                del values[step.buffer]
        results = list(filled(plan.outputs))
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    taken = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(itertools.accumulate(taken)), results


CASES = {"towers": (4096, 256), "moe": (4096, 256), "googlenet": (4, 3, 224, 224)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "eager") for name in CASES), ("towers", "default")]
)
def test_models_on_streams_keep_what_one_stream_does(
    name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler's own placement (with a GPU's costs), against the program on one stream."""
    monkeypatch.setattr(spread, "machine_for", lambda device: NOMINAL["cuda"])
    model, x = MODELS[name]().model, torch.randn(CASES[name])
    kept: dict[str, int] = {}
    for streams in ("off", "auto"):
        config = {"mode": mode, "streams": streams, "merge_branches": False}
        compiled = graft.compile(model, (x,), **config)
        [program] = compiled._programs
        assert (len(program.plan.streams) > 1) is (streams == "auto")
        kept[streams], [result] = measured(program, (x,))
        with torch.no_grad():
            torch.testing.assert_close(result, model(x), rtol=1e-3, atol=1e-3)
    print(f"{name}, {mode}: {kept}")
    assert 1 << 20 < kept["auto"] <= 1.1 * kept["off"]
