"""Converters: who is asked, what is checked, what the report says."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import torchgraft as graft
from torchgraft import errors

aten = torch.ops.aten
HERE = pathlib.Path(__file__).name


def ops(compiled: Any) -> list[str]:
    return [node.op for node in compiled.report.nodes]


def eager(fn: Any, *inputs: Any, **config: Any) -> Any:
    return graft.compile(fn, inputs, mode="eager", **config)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 4)


# --- Registration ---


def test_a_signature_is_checked_against_the_schema() -> None:
    with pytest.raises(errors.BadConverter, match=r"argument 'axis' stands where .* has 'dim'"):

        @graft.converter(aten.cumsum.default)
        def wrong_name(net: Any, x: Any, axis: int, *, dtype: Any = None) -> Any: ...

    with pytest.raises(errors.BadConverter, match="'dtype' is keyword-only"):

        @graft.converter(aten.cumsum.default)
        def wrong_kind(net: Any, x: Any, dim: int, dtype: Any = None) -> Any: ...

    with pytest.raises(errors.BadConverter, match="'dtype' has a default in the schema"):

        @graft.converter(aten.cumsum.default)
        def no_default(net: Any, x: Any, dim: int, *, dtype: Any) -> Any: ...

    with pytest.raises(errors.BadConverter, match="default of 'alpha' is 1, not 2"):

        @graft.converter(aten.add.Tensor)
        def other_default(net: Any, x: Any, other: Any, *, alpha: int = 2) -> Any: ...

    with pytest.raises(errors.BadConverter) as info:

        @graft.converter(aten.cumsum.default)
        def too_few(net: Any, x: Any) -> Any: ...

    assert str(info.value) == (
        "converter 'too_few': its signature (net: 'Any', x: 'Any') -> 'Any' does not fit "
        "aten::cumsum(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor: it takes 2 "
        "arguments, the schema asks for net and 3.\n"
        "Write def too_few(net, x, dim, *, dtype=None)."
    )


def test_a_bare_packet_is_an_error_that_says_so() -> None:
    with pytest.raises(errors.BadConverter, match=r"packet of .*\n.*all_overloads=True"):
        graft.converter(aten.cumsum)(lambda net, *args, **kwargs: None)


def test_a_packet_means_all_its_overloads_when_said(x: Tensor) -> None:
    @graft.converter(aten.sub, all_overloads=True)
    def sub(net: graft.Net, x: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not isinstance(other, graft.Value):
            raise graft.Declined("plain tensors only")
        return net.add("aten::add", x, net.add("aten::neg", other))

    compiled = eager(lambda x: (x - x.sin()) - 1, x)
    made = ["aten.sin.default", "aten.neg.default", "aten.add.Tensor"]
    assert ops(compiled) == [*made, "aten.sub.Tensor"]
    with pytest.raises(errors.BadConverter, match="too many positional arguments"):
        graft.converter(aten.sub, all_overloads=True)(lambda net, x: None)


def test_an_operator_that_writes_or_that_is_none() -> None:
    with pytest.raises(errors.BadConverter, match="writes its inputs"):
        graft.converter(aten.add_.Tensor)(lambda net, *args, **kwargs: None)
    with pytest.raises(errors.BadConverter, match="is no operator"):
        graft.converter(torch.sin)(lambda net, *args, **kwargs: None)
    with pytest.raises(errors.NotRegistered, match="Did you mean 'aten::cumsum'"):
        graft.converter("aten::cumsun(Tensor self) -> Tensor")(lambda net, *a: None)


def test_schema_text_counts_by_name_and_overload_only(x: Tensor) -> None:
    # The dtype has another type here, as it had in TorchScript.
    @graft.converter("aten::cumsum(Tensor self, int dim, *, int? dtype=None) -> (Tensor)")
    def cumsum(net: graft.Net, x: graft.Value, dim: int, *, dtype: Any = None) -> Any:
        return net.add("aten::flip", net.add("aten::flip", x, [dim]), [dim])

    assert graft.converters_for("aten::cumsum") == [cumsum]
    assert ops(eager(lambda x: x.cumsum(0), x)) == ["aten.flip.default"] * 2


# --- Who is asked ---


def halve(net: graft.Net, x: graft.Value) -> Any:
    return net.add("aten::mul", x, 0.5)


def test_later_beats_earlier_and_config_beats_registered(x: Tensor) -> None:
    asked: list[str] = []

    def named(name: str, **given: Any) -> Any:
        def fn(net: graft.Net, x: graft.Value) -> Any:
            asked.append(name)
            return NotImplemented

        return graft.converter(aten.sin.default, name=name, **given)(fn)

    one, two = named("one"), named("two")
    mine = named("mine", register=False)
    config = graft.Config(mode="eager", converters=[mine])
    assert graft.converters_for(aten.sin.default, config) == [mine, two, one]
    compiled = graft.compile(lambda x: x.sin(), (x,), config=config)
    assert asked == ["mine", "two", "one"]
    assert ops(compiled) == ["aten.sin.default"]
    assert [c.reason for c in compiled.report.conversions] == ["NotImplemented"] * 3
    assert HERE in one.where
    assert str(two).startswith("two (")


def test_refusals_have_reasons_and_fall_to_the_next(x: Tensor) -> None:
    graft.converter(aten.sin.default, name="last")(halve)
    graft.converter(aten.sin.default, when=lambda x: "not today", name="text")(halve)
    graft.converter(aten.sin.default, when=lambda x: x.ndim == 3, name="flag")(halve)

    @graft.converter(aten.sin.default)
    def raises(net: graft.Net, x: graft.Value) -> Any:
        net.add("aten::cos", x)  # taken back
        raise graft.Declined("changed my mind")

    class Sine(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    compiled = eager(Sine(), x)
    assert [(c.converter, c.reason) for c in compiled.report.conversions] == [
        ("raises", "changed my mind"),
        ("flag", "when= said no"),
        ("text", "not today"),
        ("last", None),
    ]
    assert ops(compiled) == ["aten.mul.Tensor"]
    assert "1 x aten.sin.default: declined: not today by text" in str(compiled.report)
    assert compiled.report.conversions[0].line is not None
    assert HERE in compiled.report.conversions[0].line


def test_registries_isolate(x: Tensor) -> None:
    graft.converter(aten.sin.default)(halve)
    with graft.Registry() as inner:
        assert graft.converters_for(aten.sin.default) == []
        graft.converter(aten.cos.default)(halve)
    assert [c.name for c in inner.converters] == ["halve"]
    assert graft.converters_for(aten.cos.default) == []
    compiled = graft.compile(lambda x: x.cos(), (x,), mode="eager", registry=inner)
    assert ops(compiled) == ["aten.mul.Tensor"]


def test_a_converter_sees_what_others_made_but_not_its_own(x: Tensor) -> None:
    @graft.converter(aten.sin.default)
    def to_cos(net: graft.Net, x: graft.Value) -> Any:
        return net.add("aten::cos", net.add("aten::sub", x, torch.pi / 2))

    @graft.converter(aten.cos.default)
    def to_sin(net: graft.Net, x: graft.Value) -> Any:
        return net.add("aten::sin", net.add("aten::add", x, torch.pi / 2))

    compiled = eager(lambda x: x.sin(), x)
    assert ops(compiled) == ["aten.sub.Tensor", "aten.add.Tensor", "aten.sin.default"]
    torch.testing.assert_close(compiled(x), x.sin())


def test_an_operator_with_a_converter_is_not_decomposed(x: Tensor) -> None:
    @graft.converter(aten.softplus.default)
    def softplus(net: graft.Net, x: graft.Value, beta: Any = 1, threshold: Any = 20) -> graft.Value:
        return net.add("aten::log1p", net.add("aten::exp", x))

    compiled = eager(torch.nn.Softplus(), x)
    assert ops(compiled) == ["aten.exp.default", "aten.log1p.default"]
    torch.testing.assert_close(compiled(x), torch.nn.functional.softplus(x))


def test_what_torch_itself_takes_apart_is_said(x: Tensor) -> None:
    graft.converter(aten.linear.default, name="whole")(lambda net, *args, **kwargs: NotImplemented)
    model = torch.nn.Linear(4, 2)
    torch.compile(model, backend=graft.backend(graft.Config(mode="eager")))(x)
    assert any("takes aten.linear.default apart" in note for note in graft.reports()[-1].notes)


# --- What is made ---


def test_values_know_their_types_and_constants_and_casts(x: Tensor) -> None:
    seen: list[Any] = []

    @graft.converter(aten.sin.default)
    def sin(net: graft.Net, x: graft.Value) -> Any:
        seen.extend([x.shape, x.dtype, x.ndim, x.device.type, x.node.op])
        wide = net.cast(x, torch.float64)
        assert net.cast(wide, torch.float64) is wide
        table = net.constant([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
        assert (table.shape, table.dtype) == ((4,), torch.float64)
        product = net.add(aten.mul.Tensor, wide, table)
        assert repr(product).endswith(": f64[3, 4]>")
        return net.cast(product, torch.float32)

    compiled = graft.compile(lambda x: x.sin(), (x,), verify="off")
    assert seen == [(3, 4), torch.float32, 2, "cpu", "placeholder"]
    torch.testing.assert_close(compiled(x), x * torch.tensor([1.0, 2.0, 3.0, 4.0]))
    for node in compiled.graph.nodes:
        assert "val" in node.meta


def test_several_results(x: Tensor) -> None:
    @graft.converter(aten.sort.default)
    def sort(net: graft.Net, x: graft.Value, dim: int = -1, descending: bool = False) -> Any:
        values, order = net.add("aten::topk", x, x.shape[dim], dim, descending)
        return values, order

    compiled = eager(lambda x: x.sort(), x)
    assert ops(compiled) == ["aten.topk.default", "getitem", "getitem"][:1]
    for got, want in zip(compiled(x), x.sort(), strict=True):
        torch.testing.assert_close(got, want)

    @graft.converter(aten.sort.default)
    def one(net: graft.Net, x: graft.Value, dim: int = -1, descending: bool = False) -> Any:
        return x

    with pytest.raises(errors.BadConversion, match=r"wanted 2 results.*\n.*got 1"):
        eager(lambda x: x.sort(), x)


def test_symbolic_sizes(x: Tensor) -> None:
    @graft.converter(aten.sin.default)
    def sin(net: graft.Net, x: graft.Value) -> Any:
        flat = net.add("aten::reshape", x, [x.shape[0] * 1 * 4])
        return net.add("aten::reshape", net.add("aten::sin", flat), list(x.shape))

    spec = graft.Input(min_shape=(2, 4), max_shape=(9, 4))
    with pytest.raises(errors.BadValue, match="a size of one of the values at hand"):
        graft.compile(lambda x: x.sin(), (spec,), mode="eager")

    @graft.converter(aten.sin.default)
    def better(net: graft.Net, x: graft.Value) -> Any:
        flat = net.add("aten::reshape", x, [-1])
        return net.add("aten::reshape", net.add("aten::sin", flat), list(x.shape))

    with graft.Registry() as registry:
        registry.converters.add(better)
        compiled = graft.compile(lambda x: x.sin() + 1, (spec,))
    for rows in (2, 9):
        given = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(given), given.sin() + 1)


def test_a_result_that_is_the_input_stays_a_tensor_of_its_own(x: Tensor) -> None:
    graft.converter(aten.relu.default, name="nothing")(lambda net, x: x)
    given = x.abs()
    result = eager(lambda x: x.relu(), x)(given)
    torch.testing.assert_close(result, given)
    assert result.data_ptr() != given.data_ptr()


# --- Mistakes ---


def test_another_type_names_both_and_the_node(x: Tensor) -> None:
    graft.converter(aten.sum.default, name="kept")(lambda net, x, *, dtype=None: x)
    with pytest.raises(errors.BadConversion) as info:
        eager(lambda x: x.sum(), x)
    text = str(info.value)
    assert "wanted f32[] on cpu for %sum_1" in text
    assert "got f32[3, 4] on cpu from 'x'" in text
    assert HERE in text
    graft.converter(aten.sin.default, name="wide")(lambda net, x: net.cast(x, torch.float64))
    with pytest.raises(errors.BadConversion, match=r"wanted f32\[3, 4\](.|\n)*got f64\[3, 4\]"):
        eager(lambda x: x.sin(), x)
    graft.converter(aten.cos.default, name="number")(lambda net, x: 3)
    with pytest.raises(errors.BadConversion, match="got 3, which is no value of the graph"):
        eager(lambda x: x.cos(), x)


def test_an_exception_names_the_converter_and_the_node(x: Tensor) -> None:
    def broken(net: graft.Net, x: graft.Value) -> Any:
        return net.add("aten::mm", x, x)

    graft.converter(aten.sin.default)(broken)
    with pytest.raises(errors.ConverterFailed, match=r"converter broken \(.*\) raised .*\n.*sin"):
        eager(lambda x: x.sin(), x)
    graft.converter(aten.cos.default, name="typo")(lambda net, x: net.add("aten::sinn", x))
    with pytest.raises(errors.NotRegistered, match="Did you mean 'aten::sin'"):
        eager(lambda x: x.cos(), x)


def test_config_refuses_what_is_no_converter() -> None:
    with pytest.raises(errors.BadValue, match=r"what @graft\.converter makes"):
        graft.Config(converters=[halve])


def test_conversion_is_linear() -> None:
    """Twice the nodes, about twice the calls of Python, whatever the machine's speed."""
    from torchgraft.convert.run import convert

    def work(count: int) -> int:
        def fn(x: Tensor) -> Tensor:
            for _ in range(count):
                x = x.sin()
            return x

        calls = 0

        def count_calls(*_: Any) -> None:
            nonlocal calls
            calls += 1

        with graft.Registry():
            graph = graft.compile(fn, (torch.ones(2),), mode="eager").graph
            graft.converter(aten.sin.default)(halve)
            sys.setprofile(count_calls)
            try:
                convert(graph.gm, graft.Config())
            finally:
                sys.setprofile(None)
        return calls

    work(10)
    assert work(200) < 2.3 * work(100)


def test_a_builder_of_a_prototype_adds_a_node(x: Tensor, tmp_path: pathlib.Path) -> None:
    from torchgraft.op.build import build
    from torchgraft.op.lookup import register_kernel

    header = tmp_path / "reg.h"
    header.write_text(
        "REG_OP(BuiltTwice).INPUT(x, DT_FLOAT).OUTPUT(y, DT_FLOAT).OP_END_FACTORY_REG(BuiltTwice)"
    )
    graft.load_prototypes(header)
    register_kernel("BuiltTwice", lambda x: x * 2)

    @graft.converter(aten.neg.default)
    def negate(net: graft.Net, x: graft.Value) -> Any:
        return build("BuiltTwice", inputs={"x": x}, outputs=["y"], attrs={})

    compiled = eager(torch.neg, x)
    assert ops(compiled) == ["ge.BuiltTwice.default"]
    assert torch.equal(compiled(x), x * 2)
