"""Golden messages: each says where, what, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Mlp
from torch import Tensor

import torchgraft as graft
from torchgraft import errors
from torchgraft._torch import generator
from torchgraft.config import FIELDS

X = torch.ones(2, 8)


def mlp() -> graft.Compiled:
    return graft.compile(Mlp(), (X,), mode="eager")


def dynamic() -> graft.Compiled:
    rows = graft.Input(min_shape=(1, 8), max_shape=(4, 8))
    return graft.compile(torch.nn.ReLU(), (rows,), mode="eager")


def exported() -> torch.export.ExportedProgram:
    rows = torch.export.Dim("rows", min=2, max=16)
    return torch.export.export(torch.nn.Softmax(-1), (X + 1,), dynamic_shapes=({0: rows},))


def branchy(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x + 1
    return x - 1


def raising(gm: Any, example_inputs: Any, config: graft.Config) -> None:
    raise ValueError("no such layer")


CASES: dict[str, tuple[Any, type[Exception], str]] = {
    "shape": (
        lambda: mlp()(torch.ones(3, 8)),
        errors.InputMismatch,
        "input 'x': declared size 2 in dim 0, got 3 (shape (3, 8)).\n"
        "Declare graft.Input(min_shape=..., max_shape=...) or gears=[...] for other sizes.",
    ),
    "rank": (
        lambda: mlp()(torch.ones(2, 8, 1)),
        errors.InputMismatch,
        "input 'x': declared 2 dims (2, 8), got 3 dims (2, 8, 1).\n"
        "Reshape it, or compile for that rank.",
    ),
    "dtype": (
        lambda: mlp()(X.double()),
        errors.InputMismatch,
        "input 'x': declared dtype torch.float32, got torch.float64.\n"
        "Convert it with .to(torch.float32), or compile for torch.float64.",
    ),
    "device": (
        lambda: mlp()(X.to("meta")),
        errors.InputMismatch,
        "input 'x': declared device cpu, got meta.\nMove it with .to('cpu'), or compile for meta.",
    ),
    "type": (
        lambda: mlp()([1.0]),
        errors.InputMismatch,
        "input 'arguments': declared a call like (*), got ([*]).\n"
        "Call it with the same positional, keyword and nested arguments as declared.",
    ),
    "not a tensor": (
        lambda: mlp()(1.5),
        errors.InputMismatch,
        "input 'x': declared float32[2, 8] on cpu, got float 1.5.\nPass a tensor.",
    ),
    "not a tensor, but large": (
        lambda: mlp()(X.expand(300, 2, 8).numpy()),
        errors.InputMismatch,
        "input 'x': declared float32[2, 8] on cpu, got ndarray of shape (300, 2, 8).\n"
        "Pass a tensor: torch.as_tensor(x).",
    ),
    "arguments": (
        lambda: mlp()(X, X),
        errors.InputMismatch,
        "input 'arguments': declared a call like (*), got (*, *).\n"
        "Call it with the same positional, keyword and nested arguments as declared.",
    ),
    "rank, dynamic": (
        lambda: dynamic()(torch.ones(2)),
        errors.InputMismatch,
        "input 'input': declared 2 dims (1 to 4, 8), got 1 dims (2,).\n"
        "Reshape it, or compile for that rank.",
    ),
    "not a tensor, dynamic": (
        lambda: dynamic()(None),
        errors.InputMismatch,
        "input 'input': declared float32[1 to 4, 8] on cpu, got NoneType None.\nPass a tensor.",
    ),
    "exported for other sizes": (
        lambda: graft.compile(exported(), (graft.Input(min_shape=(2, 8), max_shape=(99, 8)),)),
        errors.ExportedOtherwise,
        "input 'input': the program was exported for 2 to 16 in dim 0; declared is 2 to 99.\n"
        "Export it again for these inputs, or declare none: an exported program has its own.",
    ),
    "exported for another type": (
        lambda: graft.compile(exported(), (X.double(),)),
        errors.ExportedOtherwise,
        "input 'input': the program was exported for dtype torch.float32; declared is "
        "torch.float64.\n"
        "Export it again for these inputs, or declare none: an exported program has its own.",
    ),
    "mode": (
        lambda: graft.Config(mode="reduce_overhead"),
        errors.UnknownName,
        "Config.mode: unknown mode 'reduce_overhead'. Did you mean 'reduce-overhead'? "
        "Known: 'default', 'eager', 'max-autotune', 'reduce-overhead'.",
    ),
    **{
        f"option of {door}": (
            call,
            errors.UnknownName,
            "Config: unknown option 'frezee'. Did you mean 'freeze'? Known: "
            + ", ".join(repr(name) for name in sorted(FIELDS))
            + ".",
        )
        for door, call in {
            "compile": lambda: graft.compile(Mlp(), (X,), frezee=True),
            "Config": lambda: graft.Config(frezee=True),
        }.items()
    },
    "gears": (
        lambda: graft.compile(
            lambda x, y: x + y,
            (graft.Input(gears=[(2, 3), (4, 3)]), graft.Input(gears=[(2, 3)])),
            mode="eager",
        ),
        errors.BadValue,
        "gears: expected as many gears for each input: gear i of all go together, got "
        "{'x': 2, 'y': 1} (dict).",
    ),
    "no such gear": (
        lambda: graft.compile(torch.sin, (graft.Input(gears=[(2,), (4,)]),), mode="eager")(X[0]),
        errors.InputMismatch,
        "input 'args': declared one of the gears (args float32[2] on cpu; args float32[4] on cpu), "
        "got 8 (shape (8,)).\n"
        "Add that shape to gears=[...] of its graft.Input, or pad it to one of them.",
    ),
    "field": (
        lambda: graft.Config(freeze="yes"),
        errors.BadValue,
        "Config.freeze: expected True or False, got 'yes' (str).",
    ),
    "no inputs": (
        lambda: graft.compile(Mlp()),
        errors.BadValue,
        "inputs: expected the inputs to compile for, such as (x,), got None (NoneType).",
    ),
    "input forms": (
        lambda: graft.Input((2, 3), min_shape=(1, 3)),
        errors.BadValue,
        "Input: expected shape, min/max_shape or gears, got ((2, 3), (1, 3), None, None) (tuple).",
    ),
    "input range": (
        lambda: graft.Input(min_shape=(4, 3), max_shape=(2, 3)),
        errors.BadValue,
        "Input.max_shape: expected no less than min_shape (4, 3), got (2, 3) (tuple).",
    ),
    "stage": (
        lambda: graft.fx_pass(lambda graph: None, name="p", stage="middle"),
        errors.UnknownName,
        "fx_pass: unknown stage 'middle'. Known: 'post', 'pre'.",
    ),
    "plan": (
        lambda: graft.Plan.parse("def plan(b0):\n    b1 = run(b0)\n    return (b1,)"),
        errors.BadPlan,
        "plan, line 2: not a step: b1 = run(b0)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_message(case: str) -> None:
    provoke, kind, message = CASES[case]
    with pytest.raises(kind) as caught:
        provoke()
    assert str(caught.value) == message
    assert isinstance(caught.value, graft.GraftError)


def test_of_hundreds_of_names_the_nearest_few_are_listed() -> None:
    with pytest.raises(errors.UnknownName) as caught:
        graft.Config(inductor={"max_autotune_gem": True})
    count = len(generator.known_options())
    assert str(caught.value).startswith(
        "Config.inductor: unknown Inductor option 'max_autotune_gem'. "
        f"Did you mean 'max_autotune_gemm'? Known: {count} names, the nearest are "
        f"'max_autotune_gemm', "
    )
    assert count > 100
    assert len(str(caught.value)) < 300


def test_a_program_that_branches_on_data_names_its_line() -> None:
    with pytest.raises(errors.CannotCapture) as caught:
        graft.compile(branchy, (X,), mode="eager")
    line = branchy.__code__.co_firstlineno + 1
    assert caught.value.line == f"{__file__}:{line}"
    assert "cannot capture branchy: " in str(caught.value)
    assert str(caught.value).endswith(
        "Use torch.compile(model, backend='torchgraft'), which keeps such code in Python, or "
        "write the branch with torch.cond / torch.where."
    )
    assert caught.value.__cause__ is not None


def test_an_operator_that_fails_while_tracing_names_its_line() -> None:
    def bad(x: Tensor) -> Tensor:
        return x @ x

    with pytest.raises(errors.CannotCapture) as caught:
        graft.compile(bad, (torch.ones(2, 3),), mode="eager")
    assert caught.value.line == f"{__file__}:{bad.__code__.co_firstlineno + 1}"


def test_a_class_that_torch_cannot_look_into_says_what_to_do() -> None:
    class Pair:
        def __init__(self, one: Tensor) -> None:
            self.one = one

    with pytest.raises(errors.CannotCapture, match=r"cannot capture <lambda>.*Pair") as caught:
        graft.compile(lambda x: Pair(x + 1), (X,), mode="eager")
    assert str(caught.value).endswith(
        "Tell torch what the class holds: torch.export.register_dataclass. For the cache of a "
        "Hugging Face model, pass use_cache=False, or call "
        "transformers.integrations.executorch.register_dynamic_cache_export_support() first."
    )


def test_a_raising_pass_names_itself_and_its_line() -> None:
    with pytest.raises(errors.PassFailed) as caught:
        graft.compile(Mlp(), (X,), mode="eager", pre_passes=[raising])
    line = raising.__code__.co_firstlineno
    assert str(caught.value) == (
        f"pass 'raising' (stage 'pre', {__file__}:{line}) raised ValueError: no such layer"
    )


def test_nothing_is_half_registered_by_a_refused_pass() -> None:
    with graft.Registry() as registry:
        for bad in ({"stage": "never"}, {"stage": "pre"}):
            with pytest.raises(graft.GraftError):
                graft.fx_pass(lambda: None, name="bad", **bad)  # type: ignore[call-overload]
        assert len(registry) == 0
