"""TorchAir: configs, passes, converters, replacements, scopes, dumps."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchgraft as graft
from torchgraft import _torch
from torchgraft.compat.air.config import CompilerConfig, NpuGraphExConfig
from torchgraft.compat.air.dump import Dumps
from torchgraft.compat.options import Section
from torchgraft.errors import NotOnThisDevice, UnknownName
from torchgraft.op.header import read_header

Script = Callable[[str], dict[str, Any]]
aten = torch.ops.aten
SCRIPTS = Path(__file__).parent / "scripts"


def options(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, kind in section.options.items():
        yield f"{prefix}{name}", kind
    for name in section.sections:
        yield from options(getattr(section, name), f"{prefix}{name}.")


def put(config: Any, name: str, value: Any) -> None:
    *groups, last = name.split(".")
    for group in groups:
        config = getattr(config, group)
    setattr(config, last, value)


@pytest.mark.feature("torchair", "CompilerConfig: the whole tree, checked, per object")
@pytest.mark.parametrize("make", [CompilerConfig, NpuGraphExConfig])
def test_every_option_has_its_default_and_refuses_another_type(make: type[Section]) -> None:
    config = make()
    assert config == make()
    odd = object()
    for name, kind in options(config):
        held: Any = config
        for part in name.split("."):
            held = getattr(held, part)
        assert held == kind.default, name
        assert bool(held) == bool(kind.default), name
        try:
            put(config, name, odd)
        except (ValueError, TypeError, FileNotFoundError):
            assert held == kind.default, name
        else:
            assert kind.check.__name__ == "anything", f"{name} takes anything"
            put(config, name, kind.default)
    assert config == make()


WORDS = "O1 BFS Pass:off 2 0 relaxed stats original txt npy csv product reduce-overhead input"
VALUES: list[Any] = [True, False, 3, *WORDS.split(), [1], {}, len]


@pytest.mark.parametrize("make", [CompilerConfig, NpuGraphExConfig])
def test_every_option_without_effect_says_so(
    make: type[Section], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file.json").write_text("{}")
    for name, kind in options(make()):
        config = make()
        for value in (*VALUES, str(tmp_path), str(tmp_path / "file.json")):
            with contextlib.suppress(ValueError, TypeError, FileNotFoundError):
                put(config, name, value)
            if list(config.changed()):
                break
        else:
            assert kind.check.__qualname__.startswith("one_of"), name  # it has one value only
            continue
        assert bool(config.idle()) == (kind.idle is not None), name


@pytest.mark.feature("torchair", "CompilerConfig: unknown names and values refused")
@pytest.mark.parametrize(
    ("name", "value", "error", "said"),
    [
        ("moed", "x", ValueError, "CompilerConfig has no option moed, all options"),
        ("mode", "foo", ValueError, r"Value 'foo' .* not in optional list"),
        ("debug", 5, ValueError, "debug is a group of options"),
        ("export.export_mode", "banana", ValueError, "not in optional list"),
        ("export.foo", 1, ValueError, "has no option foo"),
        ("post_grad_custom_pre_pass", 3, TypeError, "expected a function or None"),
        ("debug.aclgraph.static_capture_size_limit", 0, ValueError, "out of range"),
        ("debug.aclgraph.static_capture_size_limit", "x", ValueError, "Please set integer type"),
        ("dump_config.dump_path", "/not/there", FileNotFoundError, "is no folder"),
        ("ge_config.optimization_switch", "on", ValueError, "does not fit the form"),
    ],
)
def test_a_bad_option(name: str, value: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        put(CompilerConfig(), name, value)


def test_configs_share_nothing_and_values_read_as_upstream() -> None:
    one, two = CompilerConfig(), CompilerConfig()
    one.debug.run_eagerly = 1
    assert one.debug.run_eagerly.value == "1"
    assert two.debug.run_eagerly.value == "0"
    assert not two.debug.run_eagerly
    assert one != two
    assert not hasattr(one, "foo")


@pytest.mark.feature(
    "torchair", "options of the NPU's own compiler (ge_config, aoe_config, ...)", "idle"
)
def test_an_option_without_effect_is_said_once(ascend: Path) -> None:
    import torchair

    config = torchair.CompilerConfig()
    config.ge_config.oo_level = "O1"
    config.experimental_config.frozen_parameter = True
    with pytest.warns(UserWarning, match="frozen_parameter: behind torch.compile") as said:
        torchair.get_npu_backend(compiler_config=config)
    assert "CompilerConfig.ge_config.oo_level: " in str(said[0].message)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torchair.get_npu_backend(compiler_config=config)


@pytest.mark.feature("torchair", "get_npu_backend; pre and post pass; logger; streams in a pass")
@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_a_pass_with_streams_gives_right_values(
    script: Script,
    mode: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["air_streams.py", mode])
    ran = script("air_streams.py")
    torch.testing.assert_close(ran["result"], ran["expected"])
    said = capsys.readouterr().out
    assert "[forward] before [post_grad_custom_pre_pass] execution, graph is" in said
    assert "torch.ops.air.wait.default" in said
    ran["logger"].setLevel(logging.ERROR)
    report = next(
        r for r in graft.reports()[::-1] if any(n.op == "aten.mm.default" for n in r.nodes)
    )
    assert {n.stream for n in report.nodes} == {"main", "stream_1"}
    if mode == "max-autotune":
        dumps = sorted(p.name for p in Path("graph_dump").iterdir())
        assert [name.split("_")[1] for name in dumps] == ["optimized", "original"]
        assert all(name.endswith(".pbtxt") for name in dumps)


@pytest.mark.feature("torchair", "get_compiler")
def test_a_compiler_takes_a_graph_of_aot(ascend: Path) -> None:
    import torchair
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(3)
    gm = make_fx(lambda x: (x.sin() + 1,), tracing_mode="fake")(x)
    compiled = torchair.get_compiler()(gm, [x])
    torch.testing.assert_close(compiled(x)[0], x.sin() + 1)
    assert "launch('main', 'aten.sin.default'" in compiled.get_code()
    with pytest.raises(NotOnThisDevice, match=r"dump_artifacts needs an NPU\. Use graft\.compile"):
        compiled.dump_artifacts()


@pytest.mark.feature("torchair", 'string backends "npu", "npugraph_ex", "npugraphs"')
@pytest.mark.parametrize("backend", ["npu", "npugraph_ex", "npugraphs"])
def test_a_backend_by_its_string(ascend: Path, backend: str) -> None:
    x = torch.randn(3, requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend=backend)(x).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, x.detach().cos())


@pytest.mark.feature("npugraph_ex", "compile_fx, get_npu_backend, CompilerConfig, options=")
def test_options_of_npugraph_ex_do_not_leak(ascend: Path) -> None:
    import npugraph_ex

    calls = []

    def seen(gm: Any, example_inputs: Any, config: Any) -> None:
        calls.append(config.mode.value)

    x, options = torch.ones(2), {"post_grad_custom_post_pass": seen}
    torch.compile(lambda x: x + 1, backend="npugraph_ex", options=options)(x)
    torch.compile(lambda x: x + 2, backend="npugraph_ex")(x)
    assert calls == ["npugraph_ex"]
    with pytest.raises(Exception, match="Invalid option 'forse_eager', allowed options"):
        torch.compile(lambda x: x + 3, backend="npugraph_ex", options={"forse_eager": True})(x)
    config = npugraph_ex.CompilerConfig()
    config.force_eager = True
    config.post_grad_custom_post_pass = seen
    backend = npugraph_ex.get_npu_backend(compiler_config=config)
    more = {"pattern_fusion_pass": False}
    assert torch.compile(lambda x: x * 5, backend=backend, options=more)(x)[0] == 5
    assert len(calls) == 2  # options change a config, and do not take its place
    assert config.pattern_fusion_pass


def test_options_change_a_config_of_torchair_for_one_compile(ascend: Path) -> None:
    import torchair

    seen: list[str] = []
    config = torchair.CompilerConfig()
    config.post_grad_custom_pre_pass = lambda gm, example_inputs, config: seen.append(
        config.debug.run_eagerly.value
    )
    backend = torchair.get_npu_backend(compiler_config=config)
    torch.compile(lambda x: x + 7, backend=backend, options={"force_eager": True})(torch.ones(2))
    assert seen == ["1"]
    assert not config.debug.run_eagerly


@pytest.mark.parametrize("rest", [([torch.ones(2)],), ([torch.ones(2)], {"force_eager": 1}), ()])
def test_a_graph_of_dynamo_is_compiled(ascend: Path, rest: Any) -> None:
    import npugraph_ex

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (x.sinh() + 1,)

    x = torch.randn(2)
    made = npugraph_ex.compile_fx(torch.fx.symbolic_trace(Net()), *rest)
    torch.testing.assert_close(made(x)[0], x.sinh() + 1)
    with pytest.raises(ValueError, match="Invalid option 'eager'"):
        npugraph_ex.compile_fx(torch.fx.symbolic_trace(Net()), options={"eager": True})


def test_decompositions_of_npugraph_ex(ascend: Path) -> None:
    import npugraph_ex

    table = {torch.ops.aten.sinh.default: lambda x: x * 3}
    backend = npugraph_ex.get_npu_backend(custom_decompositions=table)
    assert torch.compile(torch.sinh, backend=backend)(torch.ones(2))[0] == 3


ADD = """REG_OP(CompatAdd{n}).INPUT(x, ge::TensorType::ALL()).INPUT(y, ge::TensorType::ALL())
.ATTR(alpha, Float, 1.0).OUTPUT(z, ge::TensorType::ALL()).OP_END_FACTORY_REG(CompatAdd{n})"""


def declare(tmp_path: Path, text: str) -> None:
    header = tmp_path / "reg.h"
    header.write_text(text)
    graft.load_prototypes(header)


def adding(x: torch.Tensor, y: torch.Tensor, *, alpha: float = 1.0) -> torch.Tensor:
    return x + alpha * y


@pytest.fixture
def my_op() -> Iterator[Any]:
    """An operator that has a schema and a meta, and no kernel: it runs through its converter."""
    library = torch.library.Library("compat_ops", "FRAGMENT")
    library.define("my_op(Tensor self, Tensor other) -> Tensor")
    library.impl("my_op", lambda self, other: torch.empty_like(self), "Meta")
    yield torch.ops.compat_ops.my_op.default
    _torch.drop_library(library)


@pytest.mark.feature("torchair", "converters with generated builders, dtype_promote, meta_outputs")
def test_the_custom_op_document(
    script: Script, my_op: Any, ascend: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchgraft.op.builders import generate
    from torchgraft.op.lookup import register_kernel

    text = """REG_OP(AddCustom).INPUT(x, ge::TensorType::ALL()).INPUT(y, ge::TensorType::ALL())
    .OUTPUT(z, ge::TensorType::ALL()).OP_END_FACTORY_REG(AddCustom)"""
    declare(ascend, text)
    register_kernel("AddCustom", lambda x, y: x + y)
    made = ascend / "auto_generated_ge_raw_custom_ops.py"
    made.write_text(generate(read_header(text).prototypes))
    monkeypatch.syspath_prepend(str(ascend))
    ran = script("air_custom_op.py")
    torch.testing.assert_close(ran["result"], (ran["x"] + ran["y"]) * 2)


@pytest.mark.feature("torch_npu", "op-plugin operators, Meta kernels, torch_npu.npu_x")
def test_the_op_plugin_document(script: Script, ascend: Path) -> None:
    from torchgraft.op import plugin
    from torchgraft.op.lookup import register_kernel

    functions = ascend / "op_plugin_functions.yaml"
    functions.write_text(
        "custom:\n  - func: npu_plus_custom(Tensor x, Tensor y) -> Tensor\n    impl_ns: op_api\n"
    )
    header = ascend / "plus_custom.h"
    header.write_text(ADD.format(n=3).replace("CompatAdd3", "PlusCustom"))
    plugin.build([str(functions), str(header)], plugin.FOLDER)
    register_kernel("PlusCustom", adding)
    ran = script("air_op_plugin.py")
    torch.testing.assert_close(ran["result"], ran["expected"])
    assert [n.op for n in graft.reports()[-1].nodes] == ["ge.PlusCustom.default"]


@pytest.mark.feature(
    "torchair", "ge.custom_op by names and by position, checked; ge.attr; ge.Const"
)
def test_custom_op_in_both_forms(ascend: Path, my_op: Any) -> None:
    import torchair
    from torchair import ge

    from torchgraft.op.lookup import register_kernel

    declare(ascend, ADD.format(n=1))
    register_kernel("CompatAdd1", adding)

    @torchair.register_fx_node_ge_converter(my_op)
    def convert(x: Any, y: Any, meta_outputs: Any = None) -> Any:
        assert x.dtype == ge.DataType.DT_FLOAT
        assert meta_outputs.rank == 1
        return chosen[-1](x, y)

    chosen: list[Callable[[Any, Any], Any]] = []

    def run(how: Callable[[Any, Any], Any]) -> torch.Tensor:
        chosen.append(how)
        torch.compiler.reset()
        model = torch.compile(lambda x, y: my_op(x, y), backend=torchair.get_npu_backend())
        result: torch.Tensor = model(torch.ones(2), torch.full((2,), 3.0))
        return result

    for how, expected in [
        (lambda x, y: ge.custom_op("CompatAdd1", x, y, 2.0), 7),
        (lambda x, y: ge.custom_op("CompatAdd1", x, y, None), 4),
        (
            lambda x, y: ge.custom_op(
                "CompatAdd1",
                inputs={"x": x, "y": y},
                outputs=["z"],
                attrs={"alpha": ge.attr.Float(0.5)},
            ),
            2.5,
        ),
        (lambda x, y: ge.custom_op("CompatAdd1", x, ge.Const([1.0, 1.0]), None), 2),
        (lambda x, y: ge.Cast(ge.Clone(x), dst_type=ge.DataType.DT_FLOAT), 1),
    ]:
        assert (run(how) == expected).all()
    for how, error, said in [
        (lambda x, y: ge.custom_op("CompatAdd1", x, y), IndexError, "2 inputs and 1 attributes"),
        (lambda x, y: ge.custom_op("CompatAd", x, y), RuntimeError, "No AscendIR CompatAd was"),
        (
            lambda x, y: ge.custom_op("CompatAdd1", inputs={"x": x, "yy": y}, outputs=["z"]),
            UnknownName,
            "Did you mean 'y'",
        ),
        (
            lambda x, y: ge.custom_op(
                "CompatAdd1", inputs={"x": x, "y": y}, outputs=["z"], attrs={"alpha": 2.0}
            ),
            AssertionError,
            r"expected ge.attr.Float\(...\), got 2.0",
        ),
    ]:
        with pytest.raises(Exception, match=said) as caught:
            run(how)
        causes = [caught.value]
        while causes[-1].__cause__ is not None or causes[-1].__context__ is not None:
            causes.append(causes[-1].__cause__ or causes[-1].__context__)  # type: ignore[arg-type]
        assert any(isinstance(cause, error) for cause in causes), causes
    with pytest.raises(RuntimeError, match="inside a converter"):
        ge.Const(1.0)


@pytest.mark.feature("torchair", "converters made from prototypes")
def test_an_operator_gets_the_prototype_of_its_name(ascend: Path) -> None:
    import torchair

    from torchgraft.op.lookup import register_kernel

    declare(ascend, ADD.format(n=2))
    register_kernel("CompatAdd2", adding)
    library = torch.library.Library("compat_ops", "FRAGMENT")
    library.define("compat_add2(Tensor self, Tensor other, float alpha) -> Tensor")
    library.impl("compat_add2", lambda self, other, alpha: torch.empty_like(self), "Meta")
    op = torch.ops.compat_ops.compat_add2.default
    model = torch.compile(lambda x: op(x, x, 3.0), backend=torchair.get_npu_backend())
    assert (model(torch.ones(2)) == 4).all()
    assert [n.op for n in graft.reports()[-1].nodes] == ["ge.CompatAdd2.default"]
    _torch.drop_library(library)


@pytest.mark.feature("torchair", "Support, declare_supported")
def test_declared_support_is_checked_against_eager(ascend: Path) -> None:
    from torchair import register_fx_node_ge_converter
    from torchair.ge_concrete_graph.supported_declaration import F32, Support, declare_supported

    from torchgraft.compat.air import ge
    from torchgraft.compat.air.convert import check_supported

    wrong = False

    @declare_supported([Support(F32(2, 2)), Support(F32(3), value_range=(-1, 1))])
    @register_fx_node_ge_converter(aten.neg.default)
    def neg(self: Any, meta_outputs: Any = None) -> Any:
        return ge.net().add(aten.mul.Tensor, self, 1 if wrong else -1)

    assert check_supported(neg) == 2
    wrong = True
    with pytest.raises(AssertionError, match="not close"):
        check_supported(neg)


@pytest.mark.feature("torchair", "register_replacement, extra_check, pattern_fusion_pass")
def test_a_replacement_fires_and_can_be_refused(ascend: Path) -> None:
    import torchair

    def search(x: Any, y: Any) -> Any:
        return torch.abs(x) * y

    def replace(x: Any, y: Any) -> Any:
        return torch.relu(x) * y

    rows = []

    def wide(match: Any) -> bool:
        rows.append(match.kwargs["x"].shape[0])
        return bool(match.kwargs["x"].shape[0] > 2)

    example = [torch.randn(2, 3), torch.randn(2, 3)]
    torchair.register_replacement(search, replace, example, extra_check=wide)
    torchair.register_replacement(search, replace, example, skip_duplicates=True)

    def run(rows: int, config: Any = None) -> float:
        model = torch.compile(search, backend=torchair.get_npu_backend(compiler_config=config))
        return float(model(-torch.ones(rows, 4), torch.ones(rows, 4))[0, 0])

    assert [run(4), run(2)] == [0, 1]
    assert rows
    off = torchair.CompilerConfig()
    off.experimental_config.pattern_fusion_pass = False
    torch.compiler.reset()
    assert run(4, off) == 1


@pytest.mark.feature("torchair", "custom_decompositions")
def test_decompositions_of_ones_own(ascend: Path) -> None:
    import torchair

    def silu(x: Any) -> Any:
        return x * 2

    backend = torchair.get_npu_backend(custom_decompositions={aten.silu.default: silu})
    model = torch.compile(torch.nn.functional.silu, backend=backend)
    assert model(torch.ones(1)) == 2
    assert backend.keywords["compiler_config"] == CompilerConfig()  # type: ignore[attr-defined]


@pytest.mark.feature(
    "torchair", "scope.npu_stream_switch, npu_wait_tensor; ops.record, wait, events"
)
def test_scopes_in_model_code(ascend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchair
    from torchair import ops, scope

    programs: list[Any] = []
    monkeypatch.setattr(Dumps, "finish", lambda self, program: programs.append(program))

    def model(x: torch.Tensor) -> torch.Tensor:
        with scope.npu_stream_switch("side", 3):
            side = x.sin()
            done = ops.record()
        main = x.cos()
        ops.wait([done])
        main = scope.npu_wait_tensor(main, side)
        return main + side

    def events(x: torch.Tensor) -> torch.Tensor:
        with scope.npu_stream_switch("side"):
            side = x.sin()
            torch.ops.air.tagged_event_record("compat")
        torch.ops.air.tagged_event_wait("compat")
        return x.cos() + side

    x = torch.randn(4)
    for fn in (model, events):
        compiled = torch.compile(fn, backend=torchair.get_npu_backend(), fullgraph=True)
        torch.testing.assert_close(compiled(x), x.sin() + x.cos())
        nodes = graft.reports()[-1].nodes
        assert {n.op: n.stream for n in nodes}["aten.sin.default"] == "side"
        plan = str(programs[-1].plan).splitlines()
        waits = [i for i, line in enumerate(plan) if "wait('main'" in line]
        cosine = next(i for i, line in enumerate(plan) if "aten.cos" in line)
        assert (waits[0] < cosine) == (fn is events)  # nothing but the event orders it
        torch.testing.assert_close(fn(x), x.sin() + x.cos())
    with pytest.raises(ValueError, match="expected a list of tensors"):
        ops.wait([])
    with pytest.raises(TypeError, match="expected True or False"):
        scope.op_never_timeout(1)
    event = ops.npu_create_tagged_event("compat2")
    with pytest.raises(ValueError, match="is in use"):
        ops.npu_create_tagged_event("compat2")
    ops.npu_tagged_event_record(event)
    ops.npu_tagged_event_wait(event)


@pytest.mark.feature(
    "torchair", "scope.super_kernel, limit_core_num, op_never_timeout, data_dump", "idle"
)
def test_scopes_that_tune_the_npu_change_nothing(ascend: Path) -> None:
    import torchair
    from torchair import scope

    def model(x: torch.Tensor) -> torch.Tensor:
        with scope.super_kernel("sk"), scope.limit_core_num(4, 8), scope.op_never_timeout():
            return x + 1

    assert model(torch.ones(1)) == 2
    compiled = torch.compile(model, backend=torchair.get_npu_backend(), fullgraph=True)
    with pytest.warns(UserWarning, match="super_kernel: this tunes the NPU"):
        assert compiled(torch.ones(1)) == 2


@pytest.mark.feature("torchair", "ops.npu_print")
def test_prints_come_in_order(ascend: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torchair
    from torchair import ops

    def model(x: torch.Tensor) -> torch.Tensor:
        ops.npu_print("first", x, "{}")
        y = x + 1
        ops.npu_print("then", y, summarize_size=1, tensor_detail=True)
        return y

    compiled = torch.compile(model, backend=torchair.get_npu_backend(), fullgraph=True)
    compiled(torch.arange(4.0))
    first, then = capsys.readouterr().out.splitlines()
    assert first == "first [0., 1., 2., 3.] {}"
    assert then == "then [1., ..., 4.] shape=(4,) dtype=torch.float32 device=cpu"
    with pytest.raises(ValueError, match="at least one tensor"):
        ops.npu_print("nothing")
    with pytest.raises(ValueError, match="more than 0"):
        ops.npu_print(torch.ones(1), summarize_size=0)


@pytest.mark.feature("torchair", "debug.graph_dump txt, pbtxt, py")
@pytest.mark.parametrize("kind", ["txt", "pbtxt", "py"])
def test_a_graph_is_dumped(ascend: Path, kind: str) -> None:
    import torchair

    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = kind
    config.debug.graph_dump.path = str(ascend / "dump")
    torch.compile(torch.sin, backend=torchair.get_npu_backend(compiler_config=config))(
        torch.ones(2)
    )
    optimized, original = sorted((ascend / "dump").iterdir())
    assert optimized.name.startswith("dynamo_optimized_graph_")
    assert original.suffix == f".{kind}"
    assert "sin" in original.read_text()
    config.mode = "reduce-overhead"
    if kind != "py":
        with pytest.raises(NotImplementedError, match="only support 'py' type"):
            torchair.get_npu_backend(compiler_config=config)


@pytest.mark.feature(
    "torchair", "debug.data_dump, dump_config, debug.fx_summary, debug.run_eagerly"
)
def test_tensors_and_a_summary_are_dumped(ascend: Path) -> None:
    import numpy
    import torchair

    x = torch.arange(3.0)
    config = torchair.CompilerConfig()
    config.debug.data_dump.type = "npy"
    config.debug.data_dump.filter = lambda node: node if "sin" in node.name else None
    config.debug.fx_summary.type = "csv"
    backend = torchair.get_npu_backend(compiler_config=config)
    torch.testing.assert_close(
        torch.compile(lambda x: x.sin() + 1, backend=backend)(x), x.sin() + 1
    )
    into, out = sorted(ascend.glob("worldsize1_global_rank0/graph_*/0/*.npy"))
    assert into.name.startswith("sin-aten.sin.default.INPUT.0.")
    assert numpy.array_equal(numpy.load(out), x.sin().numpy())
    [table] = ascend.glob("summary_graph_*.csv")
    assert "sin,aten.sin.default,aten," in table.read_text()

    config = torchair.CompilerConfig()
    config.dump_config.enable_dump = True
    config.dump_config.dump_mode = "output"
    config.dump_config.dump_step = "1|3-4"
    config.dump_config.dump_path = str(ascend)
    model = torch.compile(
        lambda x: x.cos(), backend=torchair.get_npu_backend(compiler_config=config)
    )
    for _ in range(3):
        model(x)
    [step] = {path.parent.name for path in ascend.rglob("cos-*.OUTPUT.*.npy")}
    assert step == "1"


@pytest.mark.feature("torchair", "inference.cache_compile, readable_cache, set_dim_gears")
def test_a_method_is_compiled_and_shown(ascend: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torchair

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)
            self.decode = torchair.inference.cache_compile(self._decode, dynamic=False)

        def _decode(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).relu()

    model = Model()
    with torch.no_grad():
        for rows in (2, 4):
            x = torch.ones(rows, 3)
            torchair.inference.set_dim_gears(x, {0: [2, 4]})
            torch.testing.assert_close(model.decode(x), model._decode(x))
    [cached] = ascend.rglob("compiled_module")
    assert "aten.relu.default" in torchair.inference.readable_cache(cached, file="shown.txt")
    assert capsys.readouterr().out.strip() == Path("shown.txt").read_text().strip()
    with pytest.raises(ValueError, match=r"expected a method of a torch\.nn\.Module"):
        torchair.inference.cache_compile(torch.sin)
    with pytest.raises(AssertionError, match="is 4, which is no gear"):
        torchair.inference.set_dim_gears(torch.ones(4), {0: [1, 2]})
    with pytest.raises(Exception, match="Backward cache compilation is not supported yet"):
        model.decode(torch.ones(3, 3)).sum().backward()


@pytest.mark.feature("torchair", "prefill and decode: a cache that is written, streams, a pass")
@pytest.mark.filterwarnings("ignore:mode .reduce-overhead")
def test_a_decode_loop_runs_as_it_is(script: Script) -> None:
    ran = script("air_decode.py")
    assert set(ran["results"]) == {"max-autotune", "reduce-overhead", "cached"}
    for made in ran["results"].values():
        torch.testing.assert_close(made, ran["expected"], rtol=1e-4, atol=1e-5)
    streams = [{node.stream for node in report.nodes} for report in graft.reports()[-6:]]
    assert streams[:4] == [{"main", "mlp", "embed"}] * 4
    assert streams[4:] == [{"main", "mlp"}] * 2


def test_every_gear_is_compiled(ascend: Path) -> None:
    """More of them than torch.compile keeps programs of one function by default."""
    import torchair

    gears = list(range(2, 14))
    model = torch.compile(
        lambda x: x.cumsum(0) * 3, backend=torchair.get_npu_backend(), fullgraph=True
    )
    with torch._dynamo.config.patch(recompile_limit=8):
        for size in gears:
            x = torch.ones(size)
            torchair.inference.set_dim_gears(x, {0: gears})
            assert model(x)[-1] == 3 * size
        if torch.__version__ >= (2, 13):  # before, there is one limit for all functions
            assert torch._dynamo.config.recompile_limit == 8, "the limit of other functions stays"


def test_gears_of_several_dims_are_pairs_or_products(ascend: Path) -> None:
    import torchair

    def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum() + y.sum()

    config = torchair.CompilerConfig()
    x, y = torch.ones(2), torch.ones(3)
    torchair.inference.set_dim_gears(x, {0: [2, 4]})
    torchair.inference.set_dim_gears(y, {0: [3, 5, 7]})
    with pytest.raises(Exception, match=r"\[2, 3\] gears cannot be paired"):
        torch.compile(both, backend=torchair.get_npu_backend(compiler_config=config))(x, y)
    config.inference_config.dynamic_gears_merge_policy = "product"
    compiled = torch.compile(both, backend=torchair.get_npu_backend(compiler_config=config))
    assert compiled(x, y) == 5
    z = torch.ones(40)
    torchair.inference.set_dim_gears(z, {0: list(range(2, 62))})
    with pytest.raises(Exception, match="120 programs are more than 100"):
        compiled(x, z)


@pytest.mark.parametrize("by_pass", [False, True])
def test_markers_by_the_names_of_npugraph_ex(ascend: Path, by_pass: bool) -> None:
    ex = torch.ops.npugraph_ex

    def model(x: torch.Tensor) -> torch.Tensor:
        if not by_pass:
            ex.scope_enter(["_user_stream_label"], ["side"])
        y = torch.mm(x, x)
        if not by_pass:
            done = ex.record()
            ex.scope_exit()
            ex.wait([done])
        return y - x

    def place(gm: torch.fx.GraphModule, example_inputs: Any, config: Any) -> None:
        [mm] = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        with gm.graph.inserting_before(mm):
            gm.graph.call_function(ex.scope_enter.default, (["_user_stream_label"], ["side"]))
        with gm.graph.inserting_after(mm):
            gm.graph.call_function(ex.scope_exit.default)

    options = {"post_grad_custom_pre_pass": place} if by_pass else {}
    x = torch.randn(3, 3)
    torch.testing.assert_close(model(x), x @ x - x)
    compiled = torch.compile(model, backend="npugraph_ex", options=options, fullgraph=True)
    torch.testing.assert_close(compiled(x), x @ x - x)
    assert [node.stream for node in graft.reports()[-1].nodes] == ["side", "main"]


@pytest.mark.feature(
    "torchair", "dynamo_export (an exported program of torch, not a model for the NPU)"
)
def test_an_export_can_be_compiled(ascend: Path) -> None:
    import torchair

    model, x = torch.nn.Linear(3, 2).eval(), torch.ones(4, 3)
    config = torchair.CompilerConfig()
    torchair.dynamo_export(x, model=model, export_name="m", dynamic=True, config=config)
    assert config == torchair.CompilerConfig()
    exported = torch.export.load(str(ascend / "export_file" / "m.air"))
    torch.testing.assert_close(exported.module()(torch.ones(7, 3)), model(torch.ones(7, 3)))
    assert "addmm" in (ascend / "export_file" / "dynamo.pbtxt").read_text()
    (ascend / "link").symlink_to(ascend)
    torchair.dynamo_export(x, model=model, export_path="link")
    assert not (ascend / "export.air").exists()


@pytest.mark.feature("torchair", "collectives of torch.distributed in a graph (hcom)")
def test_a_collective_is_compiled(ascend: Path) -> None:
    import torchair

    with pytest.warns(UserWarning, match="not needed"):
        torchair.patch_for_hcom()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:

        def model(x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            torch.distributed.all_reduce(x)
            return x + 1

        compiled = torch.compile(model, backend=torchair.get_npu_backend(), fullgraph=True)
        assert (compiled(torch.ones(2)) == 3).all()
        ops = [node.op for node in graft.reports()[-1].nodes]
        assert any("all_reduce" in op for op in ops)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.feature("torchair", "use_internal_format_weight, patch_for_hcom", "idle")
def test_what_the_npu_needs_is_accepted(ascend: Path) -> None:
    import torchair

    model = torch.nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="weights keep their layout"):
        assert torchair.use_internal_format_weight(model) is model


@pytest.mark.feature(
    "torchair", "llm_datadist, npu_format_cast_via_cpu, tools, attention v2", "refused"
)
def test_what_needs_the_device_says_what_does_not(ascend: Path) -> None:
    import torchair

    with pytest.raises(NotOnThisDevice, match=r"needs an NPU\. Formats private to the NPU"):
        _ = torchair.npu_format_cast_via_cpu
    with pytest.raises(NotOnThisDevice, match=r'Use torch.empty\(..., device="npu"\)'):
        from torchair.llm_datadist import create_npu_tensors  # noqa: F401
    with pytest.raises(NotOnThisDevice, match=r"Use torchair\.ops\.npu_fused_infer"):
        _ = torchair.ops.npu_fused_infer_attention_score_v2
    with pytest.raises(NotOnThisDevice, match="Every plan is proved"):
        from torchair.tools.gegraph_check.deadlock_check import deadlock_check  # noqa: F401
    with pytest.raises(NotOnThisDevice, match=r"as_dict needs an NPU\. Use repr"):
        torchair.CompilerConfig().as_dict()
    with pytest.raises(NotOnThisDevice, match='Use backend="npugraph_ex"'):
        _ = torchair.CompilerConfig().npugraphex_config
    with pytest.raises(NotOnThisDevice, match=r"attr\.Int\.get"):
        torchair.ge.attr.Int.get(None)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = torchair.nothing


@pytest.mark.feature("torch_npu", "profiler: a compiled program's streams and waits in the trace")
@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_a_profile_has_the_streams_of_a_compiled_program(ascend: Path, suffix: str) -> None:
    import gzip
    import json

    import torch_npu
    import torchair

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torchair.scope.npu_stream_switch("side"):
                beside = torch.mm(x, x)
            return beside + x.abs()

    model, x = torch.compile(Net(), backend=torchair.get_npu_backend()), torch.randn(4, 4)
    model(x)
    with torch_npu.profiler.profile() as prof:
        result = model(x)
    assert torch.equal(result, x @ x + x.abs())
    prof.export_chrome_trace(f"trace.{suffix}")
    read = gzip.open if suffix.endswith("gz") else open
    with read(f"trace.{suffix}") as file:
        events = json.load(file)["traceEvents"]
    [torchs, *_] = [event["ts"] for event in events if event["name"] == "aten::abs"]
    tracks = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["name"] == "thread_name" and str(event["args"]["name"]).startswith("stream ")
    }
    assert set(tracks.values()) == {"stream main", "stream side"}
    mine = [event for event in events if event.get("tid") in tracks]
    ran = {tracks[event["tid"]]: event["name"] for event in mine if event["ph"] == "X"}
    assert ran["stream side"] == "aten.mm.default"
    assert {event["ph"] for event in mine} >= {"s", "f"}  # a wait is an arrow
    [ours] = [event["ts"] for event in mine if event["name"] == "aten.abs.default"]
    assert abs(torchs - ours) < 3600e6  # microseconds on one axis: not from 1970 on
