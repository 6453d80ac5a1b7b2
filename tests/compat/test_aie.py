"""Torch-AIE and MindIE-Torch: the shapes of script that their model zoos hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchgraft as graft
from torchgraft import _torch
from torchgraft.compile import Compiled
from torchgraft.errors import InputMismatch, NotOnThisDevice, NotSavable

Script = Callable[[str], dict[str, Any]]
HALF = {"rtol": 1e-2, "atol": 1e-2}
FULL = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.feature("torch_aie", "compile a traced module, Input by position")
@pytest.mark.parametrize("name", ["aie_converter", "aie_quantize"])
def test_a_tutorial_runs_as_it_is(script: Script, name: str) -> None:
    ran = script(f"{name}.py")
    torch.testing.assert_close(ran["result"], ran["expected"], **HALF)
    assert isinstance(ran["compiled"], torch.jit.ScriptModule)


@pytest.mark.feature("torch_aie", "gears, ranges, save and torch.jit.load, export_engine")
@pytest.mark.feature("mindietorch", "compile, Stream, stream, synchronize, finalize")
@pytest.mark.parametrize(
    ("name", "close"),
    [("swin", HALF), ("espnet", FULL), ("resnext", FULL), ("bert", FULL), ("whisper", HALF)],
)
def test_a_model_zoo_script_runs_as_it_is(script: Script, name: str, close: Any) -> None:
    ran = script(f"zoo_{name}.py")
    torch.testing.assert_close(ran["result"], ran["expected"], **close)


@pytest.mark.feature("torch_aie", "a saved module runs elsewhere, and nothing is compiled again")
def test_a_saved_module_holds_its_program(ascend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_aie

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + y, x - y

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    traced = torch.jit.trace(Net(), (x, y))
    torch_aie.compile(traced, inputs=[torch_aie.Input((2, 3))] * 2).save("net.ts")
    torch_aie.finalize()  # forgets its programs, as a new process has none
    monkeypatch.setattr(Compiled, "build", None)  # so that nothing can be compiled
    sums, differences = torch.jit.load("net.ts")(x, y)
    assert torch.equal(sums, x + y)
    assert torch.equal(differences, x - y)
    broken = torch.jit.load("net.ts")
    broken.engine.zero_()
    with pytest.raises(Exception, match="not a package that can be loaded"):
        broken(x, y)


@pytest.mark.feature("torch_aie", "results in tuples, lists and dicts")
def test_results_keep_their_structure(ascend: Path) -> None:
    import torch_aie

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"twice": x * 2, "less": x - 1}

    x = torch.randn(3)
    traced = torch.jit.trace(Net(), x, strict=False)
    for script in (traced, torch.jit.script(Net())):
        torch_aie.compile(script, inputs=[torch_aie.Input((3,))]).save("net.ts")
        torch.testing.assert_close(torch.jit.load("net.ts")(x), Net()(x))


@pytest.mark.feature("torch_aie", "export_engine: a package for graft.load and for C++")
def test_an_engine_is_a_package(ascend: Path) -> None:
    import torch_aie

    x = torch.randn(2, 3)
    traced = torch.jit.trace(torch.nn.Tanh(), x)
    exported = torch.export.export(torch.nn.Tanh(), (x,))
    for model in (traced, torch.nn.Tanh(), exported):
        data = torch_aie.export_engine(model, inputs=[torch_aie.Input((2, 3))], path="tanh.om")
        assert Path("tanh.om").read_bytes() == data
        torch.testing.assert_close(graft.load("tanh.om")(x), x.tanh())
    with pytest.raises(ValueError, match="compiles when it is called"):
        torch_aie.export_engine(torch.nn.Tanh(), ir="torch_compile")


@pytest.mark.feature("torch_aie", "scripted modules, with branches and lists")
def test_a_scripted_module_keeps_its_branches(ascend: Path) -> None:
    import torch_aie

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            if bool(x.sum() > 0):
                x = x * 2
            return [x, x + 1]

    compiled = torch_aie.compile(torch.jit.script(Net()), inputs=[torch_aie.Input((2,))])
    compiled.save("net.ts")
    torch_aie.finalize()
    for module in (compiled, torch.jit.load("net.ts")):
        for x in (torch.ones(2), -torch.ones(2)):
            for one, two in zip(module(x), Net()(x), strict=True):
                assert torch.equal(one, two)
    broken = torch.jit.load("net.ts")
    broken.engine.zero_()
    with pytest.raises(Exception, match="its engine cannot be read"):
        broken(torch.ones(2))
    with pytest.raises(NotSavable, match="branches that stay in Python"):
        torch_aie.export_engine(torch.jit.script(Net()), inputs=[torch_aie.Input((2,))])


@pytest.mark.feature("torch_aie", "PrecisionPolicy FP16, PREF_FP16, FP32, PREF_FP32")
def test_a_precision_is_really_computed_in(ascend: Path) -> None:
    import torch_aie

    class Third(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 2048.0) - 2048.0

    x = torch.full((4,), 1 / 3)
    traced = torch.jit.trace(Third(), x)
    policy = torch_aie.PrecisionPolicy

    def run(chosen: Any, **more: Any) -> torch.Tensor:
        spec = {"inputs": [torch_aie.Input((4,))], "precision_policy": chosen, **more}
        result: torch.Tensor = torch_aie.compile(traced, **spec)(x)
        return result

    half = ((x.half() + 2048) - 2048).float()
    for chosen in (policy.FP16, policy.PREF_FP16):
        assert torch.equal(run(chosen), half)
        assert run(chosen).dtype == torch.float32
    for chosen in (policy.FP32, policy.PREF_FP32):
        assert torch.equal(run(chosen), traced(x))


@pytest.mark.slow
def test_generated_code_computes_in_half_precision(
    ascend: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator that fuses calls keeps halves in float32 between them, unless told not to."""
    import torch_aie

    monkeypatch.setenv("TORCHGRAFT_MODE", "default")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.nn.functional.gelu(self.norm(self.linear(x)) * 1000.3 + 2048.0)
            return (y - 2048.0).softmax(-1)

    net, x = Net().eval(), torch.randn(8, 16)
    half = copy.deepcopy(net).half()
    given = [torch_aie.Input(min_shape=(1, 16), max_shape=(9, 16))]
    for inputs in ([torch_aie.Input((8, 16))], given):
        compiled = torch_aie.compile(
            torch.jit.trace(net, x), inputs=inputs, precision_policy=torch_aie.PrecisionPolicy.FP16
        )
        torch.testing.assert_close(compiled(x), half(x.half()).float(), rtol=1e-3, atol=0)


@pytest.mark.feature("torch_aie", "truncate_long_and_double")
def test_doubles_are_floats_where_that_is_allowed(ascend: Path) -> None:
    import torch_aie

    def double(x: torch.Tensor) -> torch.Tensor:
        return (x.double() + 1e-9).float() - x

    traced = torch.jit.trace(double, torch.ones(2))

    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.double() + 1e-9) - 1.0

    traced = torch.jit.trace(Double(), torch.ones(2))
    given = [torch_aie.Input((2,))]
    assert (torch_aie.compile(traced, inputs=given)(torch.ones(2)) == 0).all()
    exact = torch_aie.compile(traced, inputs=given, truncate_long_and_double=False)
    assert (exact(torch.ones(2)) > 0).all()


@pytest.mark.feature("torch_aie", "unbounded dims (-1)")
def test_a_dim_without_bounds(ascend: Path) -> None:
    import mindietorch

    traced = torch.jit.trace(torch.nn.Linear(3, 2), torch.ones(4, 3))
    given = [mindietorch.Input(min_shape=(-1, 3), max_shape=(-1, 3))]
    compiled = mindietorch.compile(traced, inputs=given)
    for rows in (1, 5, 700):
        torch.testing.assert_close(compiled(torch.ones(rows, 3)), traced(torch.ones(rows, 3)))


@pytest.mark.feature("torch_aie", 'ir="ts", "dynamo", "torch_compile"; backend="mindie"')
def test_every_front_end(ascend: Path) -> None:
    import mindietorch

    net, x = torch.nn.Linear(3, 2).eval(), torch.ones(4, 3)
    given = [mindietorch.Input((4, 3))]
    exported = torch.export.export(net, (x,))
    traced = torch.jit.trace(net, x)
    compiled = [
        mindietorch.compile(traced, ir="ts", inputs=given),
        mindietorch.compile(net, ir="dynamo", inputs=given),
        mindietorch.compile(exported, inputs=None),
        mindietorch.compile(net, ir="torch_compile"),
        torch.compile(net, backend="mindie", options={"min_block_size": 1}),
    ]
    for one in compiled:
        torch.testing.assert_close(one(x), net(x))
    torch.testing.assert_close(mindietorch.compile(traced, given)(x), net(x))  # before `ir`
    with pytest.raises(TypeError, match="takes a ScriptModule, got Linear"):
        mindietorch.compile(net, ir="ts", inputs=given)
    with pytest.raises(ValueError, match=r"gears .* are for TorchScript"):
        mindietorch.compile(net, ir="dynamo", inputs=[given, given])


@pytest.mark.feature("torch_aie", "require_full_compilation, torch_executed_ops, min_block_size")
def test_fallback_is_asked_for_and_refused(ascend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_aie

    monkeypatch.setenv("TORCHGRAFT_MODE", "default")
    traced = torch.jit.trace(torch.nn.Tanh(), torch.ones(2))
    arguments = {"inputs": [torch_aie.Input((2,))], "torch_executed_ops": ["aten::tanh"]}
    with pytest.warns(UserWarning, match="nothing was compiled"):
        torch_aie.compile(traced, **arguments)
    with pytest.raises(graft.GraftError, match="tanh"):
        torch_aie.compile(traced, require_full_compilation=True, **arguments)


@pytest.mark.feature("torch_aie", "soc_version, allow_tensor_replace_int", "idle")
def test_what_has_no_meaning_here_is_said_once(ascend: Path) -> None:
    import torch_aie

    traced = torch.jit.trace(torch.nn.ReLU(), torch.ones(2))
    arguments = {"inputs": [torch_aie.Input((2,))], "soc_version": "Ascend910B4"}
    with pytest.warns(UserWarning, match="soc_version: the program is compiled for the machine"):
        torch_aie.compile(traced, **arguments)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch_aie.compile(traced, **arguments)
    with pytest.raises(ValueError, match="soc_version: expected one of Ascend310P1"):
        torch_aie.compile(traced, inputs=arguments["inputs"], soc_version="Ascend1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"optimization_level": 3}, "from 0 to 2"),
        ({"min_block_size": 1025}, "from 0 to 1024"),
        ({"precision_policy": "FP16"}, "expected a PrecisionPolicy"),
        ({"default_buffer_size_vec": [0]}, "from 1 to 36864"),
        ({"require_full_compilation": 1}, "expected True or False"),
        ({"torch_executed_ops": "aten::relu"}, "expected a list"),
        ({"default_buffer_size_vec": 500}, "expected a list"),
    ],
)
def test_arguments_are_checked(ascend: Path, arguments: Any, said: str) -> None:
    import torch_aie

    traced = torch.jit.trace(torch.nn.ReLU(), torch.ones(2))
    with pytest.raises(ValueError, match=said):
        torch_aie.compile(traced, inputs=[torch_aie.Input((2,))], **arguments)
    with pytest.raises(TypeError, match="unexpected argument 'soc'"):
        torch_aie.compile(traced, inputs=[torch_aie.Input((2,))], soc="Ascend310P3")


def test_buffers_are_one_for_all_outputs_or_one_for_each(ascend: Path) -> None:
    import torch_aie

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + 1, x - 1

    traced = torch.jit.trace(Net(), torch.ones(2))
    inputs = [torch_aie.Input((2,))]
    with pytest.warns(UserWarning, match="default_buffer_size_vec: outputs are allocated when"):
        torch_aie.compile(traced, inputs=inputs, default_buffer_size_vec=[10])
    for model in (traced, Net()):
        torch_aie.compile(model, inputs=inputs, default_buffer_size_vec=[10, 20])
    said = r"expected 1 size or 2 \(the outputs\), got 3: \[10, 20, 30\]"
    for model in (traced, Net()):
        for door in (torch_aie.compile, torch_aie.export_engine):
            with pytest.raises(ValueError, match=said):
                door(model, inputs=inputs, default_buffer_size_vec=[10, 20, 30])
    with pytest.raises(ValueError, match="got 0"):
        torch_aie.compile(traced, inputs=inputs, default_buffer_size_vec=[])


@pytest.mark.feature("torch_aie", "Input: shape, min_shape, max_shape, dtype, format, name")
def test_inputs_are_checked(ascend: Path) -> None:
    import torch_aie

    one = torch_aie.Input(
        shape=[1, 3], dtype=torch_aie.dtype.INT32, format=torch_aie.TensorFormat.ND
    )
    assert (one.shape, one.dtype, one.shape_mode.name) == ((1, 3), torch.int32, "STATIC")
    for arguments, said in [
        ({}, "expected shape, or min_shape and max_shape"),
        ({"min_shape": (1,)}, "are needed both"),
        ({"min_shape": (2,), "max_shape": (1,)}, "is more than max_shape"),
        ({"min_shape": (-1,), "max_shape": (5,)}, "-1 must stand in both"),
        ({"shape": (1,) * 9}, "at most 8 sizes"),
        ({"shape": (-1,)}, "from 0 on"),
        ({"shape": (1,), "dtype": torch_aie.dtype.STRING}, "expected a torch.dtype"),
    ]:
        with pytest.raises(ValueError, match=said):
            torch_aie.Input(**arguments)  # type: ignore[arg-type]


def test_a_call_that_was_not_declared_names_the_size(ascend: Path) -> None:
    import torch_aie

    traced = torch.jit.trace(torch.nn.ReLU(), torch.ones(2, 3))
    gears = [[torch_aie.Input((2, 3))], [torch_aie.Input((4, 3))]]
    compiled = torch_aie.compile(traced, inputs=gears)
    assert compiled(torch.ones(4, 3)).shape == (4, 3)
    with pytest.raises((InputMismatch, RuntimeError), match="3"):
        compiled(torch.ones(3, 3))


@pytest.mark.feature("torch_aie", "torch.ops.aie: operators inside Torch-AIE", "refused")
def test_a_stand_in_for_an_operator_of_the_engine_is_not_run(ascend: Path) -> None:
    import torch_aie

    assert not hasattr(torch.ops.aie, "batch_nms")
    with pytest.raises(NotOnThisDevice, match=r"torch\.ops\.aie\.batch_nms needs an NPU"):
        torch.ops.aie.batch_nms(torch.ones(1))
    make: Any = torch.library.Library  # untyped in torch
    library = make("aie", "FRAGMENT")
    try:
        library.define("half_attention(Tensor q) -> Tensor")
        library.impl("half_attention", lambda q: q.clone(), "CPU")  # means nothing
        library.impl("half_attention", torch.empty_like, "Meta")

        class Model(torch.nn.Module):
            def forward(self, q: torch.Tensor) -> torch.Tensor:
                return torch.ops.aie.half_attention(q) + 1

        traced = torch.jit.trace(Model(), torch.ones(3))
        inputs = [torch_aie.Input((3,))]
        for make_it in (torch_aie.compile, torch_aie.export_engine):
            with pytest.raises(NotOnThisDevice, match=r"half_attention \(the one here was only"):
                make_it(traced, inputs=inputs)
        with pytest.raises(NotOnThisDevice, match="half_attention"):
            torch_aie.compile(Model(), ir="dynamo", inputs=inputs)

        @graft.converter("aie::half_attention")
        def halved(net: graft.Net, q: Any) -> Any:
            return net.add("aten::mul", q, 0.5)

        assert torch_aie.compile(traced, inputs=inputs)(torch.ones(3)).tolist() == [1.5] * 3
    finally:
        _torch.drop_library(library)
