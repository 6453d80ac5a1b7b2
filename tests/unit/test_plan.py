"""The plan: what it refuses, its text and back, and the executor over it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import CASES

import torchgraft as graft
from torchgraft.errors import BadPlan
from torchgraft.plan import Buffer, Free, Launch, Plan, Record, Wait, literal
from torchgraft.run.host import Kernel, link

B = [Buffer(i) for i in range(9)]


def launch(kernel: str, *args: Any, out: Any = (), **rest: Any) -> Launch:
    return Launch(kernel, args, (), tuple(out), **rest)


def test_text_reads_as_a_program_and_parses_back() -> None:
    plan = Plan(
        (B[0], B[1]),
        ((B[2], "weight"),),
        (
            launch("region0", B[0], B[2], out=[B[3], None], unpack=True),
            Free(B[0]),
            Record("e0"),
            Wait("e0", "side"),
            Launch(
                "aten.cat.default",
                ([B[3], B[1]], -1),
                (("dtype", torch.float16), ("device", torch.device("cpu"))),
                (B[4],),
                stream="side",
            ),
        ),
        (B[4], None, (1, 2.5), "s"),
    )
    assert str(plan) == (
        "def plan(b0, b1):\n"
        "    b2 = constant('weight')\n"
        "    b3, _ = launch('main', 'region0', b0, b2)\n"
        "    free('main', b0)\n"
        "    record('main', 'e0')\n"
        "    wait('side', 'e0')\n"
        "    b4 = launch('side', 'aten.cat.default', [b3, b1], -1, dtype=torch.float16, "
        "device=device('cpu'))\n"
        "    return (b4, None, (1, 2.5), 's')"
    )
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize("case", CASES)
def test_plans_of_real_models_parse_back(case: str) -> None:
    model, args = CASES[case]()
    plan = graft.compile(model, args, mode="eager").plan
    assert Plan.parse(str(plan)) == plan


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.complex_numbers(allow_nan=False, allow_infinity=False)
    | st.sampled_from([torch.float32, torch.int8, torch.strided, torch.channels_last, B[0]])
    | st.sampled_from([torch.device("cpu"), torch.device("cuda", 1)]),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple),
    max_leaves=8,
)  # fmt: skip


@given(VALUES)
def test_every_argument_survives_its_text(value: Any) -> None:
    plan = Plan((B[0],), (), (launch("k", value, out=[B[1]]),), (B[1],))
    parsed = Plan.parse(str(plan)).launches[0].args[0]
    assert parsed == value
    assert literal(parsed) == literal(value)


@pytest.mark.parametrize(
    ("steps", "outputs", "message"),
    [
        ([launch("k", B[5], out=[B[1]])], (), "b5 is used but was never written"),
        ([Free(B[0]), launch("k", B[0])], (), "b0 is used but was freed before"),
        ([launch("k", out=[B[0]])], (), "b0 is written twice"),
        ([Free(B[0]), Free(B[0])], (), "b0 is freed but is not alive"),
        ([Wait("e")], (), "event 'e' is waited for before it is recorded"),
        ([Free(B[0])], (B[0],), "b0 is returned but is not alive"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(steps: Any, outputs: Any, message: str) -> None:
    with pytest.raises(BadPlan, match=message):
        Plan((B[0],), (), tuple(steps), outputs)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x = 1",
        "def plan(b0):\n    import os\n    return (b0,)",
        "def plan(b0):\n    b1 = launch('main', 'k', __import__('os'))\n    return (b1,)",
        "def plan(b0):\n    b1 = eval('main', 'k', 1)\n    return (b1,)",
        "def plan(b0):\n    b1 = launch('main', 'k', torch.load)\n    return (b1,)",
        "def plan(b0):\n    b1 = launch('main', 'k', device('nowhere'))\n    return (b1,)",
        "def plan(x):\n    return (x,)",
        "def plan(b0):\n    b1 = launch('main', 'k', b0)",
        "def plan(b0):\n    b1 = launch(b0, 'k')\n    return (b1,)",
    ],
)
def test_text_that_is_no_plan_is_refused_and_not_run(text: str) -> None:
    with pytest.raises(BadPlan):
        Plan.parse(text)


def test_the_executor_frees_inputs_before_a_boxed_kernel_runs() -> None:
    held: list[Any] = []

    def first(args: list[Any]) -> list[Any]:
        [x] = args
        return [x + 1]

    def second(args: list[Any]) -> list[Any]:
        value = args[0]
        args.clear()
        held.append(__import__("sys").getrefcount(value))
        return [value * 2]

    plan = Plan(
        (B[0],),
        (),
        (
            launch("first", B[0], out=[B[1]], unpack=True),
            Free(B[0]),
            launch("second", B[1], out=[B[2]], unpack=True),
            Free(B[1]),
        ),
        (B[2],),
    )
    run = link(plan, {"first": Kernel(first, True), "second": Kernel(second, True)}, {})
    args = [torch.ones(2)]
    [out] = run(args)
    torch.testing.assert_close(out, torch.full((2,), 4.0))
    assert args == []
    assert held == [2]  # the local and getrefcount's own argument: nothing else holds it


def test_one_region_is_called_with_nothing_in_between() -> None:
    def kernel(args: list[Any]) -> list[Any]:
        return args

    plan = Plan((B[0],), (), (launch("k", B[0], out=[B[1]], unpack=True), Free(B[0])), (B[1],))
    assert link(plan, {"k": Kernel(kernel, True)}, {}) is kernel


def test_a_stream_that_the_executor_does_not_have_is_refused() -> None:
    plan = Plan((B[0],), (), (launch("k", B[0], out=[B[1]], stream="side"),), (B[1],))
    with pytest.raises(BadPlan, match="no stream 'side'"):
        link(plan, {"k": Kernel(torch.sin)}, {})
