"""Decomposition for the generator: right values, and each node a value of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import torchgraft as graft
from torchgraft import _torch
from torchgraft.fx import dialect, meta
from torchgraft.fx.capture import from_exported
from torchgraft.fx.decompose import decompose, parts_of


def graph_of(fn: object, *args: Tensor) -> GraphModule:
    return graft.compile(fn, args, mode="eager").graph.gm


def three_norms(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.nn.functional.layer_norm(x, [6]) + y.softmax(-1)
    return torch.nn.functional.layer_norm(y, [6]) + torch.nn.functional.gelu(x) * x.var(0)


def test_equal_calls_are_traced_once_and_give_the_same_results() -> None:
    args = (torch.randn(4, 6), torch.randn(4, 6))
    gm = graph_of(three_norms, *args)
    before = len(gm.graph.nodes)
    parts = decompose(gm, meta.inputs_of(gm), _torch.inductor_decompositions())
    assert len(parts.graph.nodes) > before
    targets = {n.target for n in parts.graph.nodes}
    assert torch.ops.aten.native_layer_norm.default not in targets
    parts.recompile()
    torch.testing.assert_close(parts(*args)[0], three_norms(*args))


def test_no_two_nodes_share_the_memory_of_a_value() -> None:
    """Inductor reads aliasing off the fake tensors: shared ones made a frozen ResNet wrong."""
    gm = graph_of(three_norms, torch.randn(4, 6), torch.randn(4, 6))
    parts = decompose(gm, meta.inputs_of(gm), _torch.inductor_decompositions())
    values = [
        n.meta["val"]
        for n in parts.graph.nodes
        if n.op == "call_function"
        and isinstance(n.meta.get("val"), Tensor)
        and hasattr(n.target, "_schema")
        and not any(r.alias_info for r in n.target._schema.returns)
    ]
    assert len(values) > 20
    assert len({value.untyped_storage()._cdata for value in values}) == len(values)


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.dropout(self.layers(x), 0.5, self.training).flatten(1)
        return self.norm(y.reshape(-1, 8)).to(torch.float32)


def test_one_call_at_a_time_gives_the_graph_that_a_whole_trace_gives() -> None:
    model, x = Layers().eval(), torch.randn(2, 3, 8)
    exported = torch.export.export(model, (x,))
    assert parts_of(exported.graph, dialect.decompositions()) is not None
    whole = exported.run_decompositions(dialect.export_decompositions())
    one, other = (from_exported(e, freeze=True).gm.graph.nodes for e in (exported, whole))
    assert [n.target for n in one if n.op == "call_function"] == [
        n.target for n in other if n.op == "call_function"
    ]
    assert all(n.meta["stack_trace"] for n in one if n.op == "call_function")
    torch.testing.assert_close(graft.compile(exported, mode="eager")(x), model(x))


def test_a_graph_that_writes_is_traced_as_a_whole() -> None:
    def hidden(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return torch.nn.functional.batch_norm(x, mean, var, training=True)

    for fn, args in (
        (hidden, (torch.randn(4, 3), torch.zeros(3), torch.ones(3))),
        (lambda x: x.add_(1), (torch.randn(4),)),
    ):
        module = torch.nn.Module()
        module.forward = fn
        exported = torch.export.export(module, args, strict=False)
        assert parts_of(exported.graph, dialect.decompositions()) is None
        given, wanted = ([a.clone() for a in args] for _ in range(2))
        torch.testing.assert_close(graft.compile(fn, args, mode="eager")(*given), fn(*wanted))
        torch.testing.assert_close(given, wanted)


def test_constants_that_decompositions_make_outlast_new_weights() -> None:
    class Grid(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = torch.nn.Parameter(torch.randn(1, 2, 3))

        def forward(self, x: Tensor) -> Tensor:  # one row: its coordinate is a constant
            return torch.nn.functional.affine_grid(x + self.theta, [1, 1, 1, 4], False)

    first, second, x = Grid(), Grid(), torch.randn(1, 2, 3)
    compiled = graft.compile(first, (x,), mode="eager")
    torch.testing.assert_close(compiled(x), first(x))
    compiled.load_state_dict(second.state_dict())
    torch.testing.assert_close(compiled(x), second(x))


def test_symbolic_sizes_survive() -> None:
    spec = graft.Input(min_shape=(2, 6), max_shape=(9, 6))
    gm = graft.compile(lambda x: three_norms(x, x), (spec,), mode="eager").graph.gm
    parts = decompose(gm, meta.inputs_of(gm), _torch.inductor_decompositions())
    parts.recompile()
    for rows in (2, 5):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(parts(x)[0], three_norms(x, x))


class Masked(torch.nn.Module):
    """Attention under a mask that is made of comparisons, as Hugging Face makes it."""

    def __init__(self, mask: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[-2])
        mask = self.mask(at[:, None], at[None, :]).expand(x.shape[-2], x.shape[-2])
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@pytest.mark.parametrize(
    ("mask", "args"),
    [
        (lambda q, k: q >= 0, ()),  # nothing is hidden
        (lambda q, k: (q < 0) * 1.0, ()),
        (lambda q, k: q >= k, (0.0, True)),  # what lies ahead is
        (lambda q, k: q <= k, None),
        (lambda q, k: (q < k) * -1.0, None),
        (lambda q, k: (q - k).abs() < 3, None),
    ],
)
def test_a_mask_that_attention_can_do_without(
    mask: Callable[[Tensor, Tensor], Tensor], args: tuple[object, ...] | None
) -> None:
    model, x = Masked(mask), torch.randn(1, 2, 8, 16)
    compiled = graft.compile(model, (x,), mode="eager")
    torch.testing.assert_close(compiled(x), model(x))
    [call] = [n for n in compiled.graph.gm.graph.nodes if "attention" in str(n.target)]
    assert ("attn_mask" in call.kwargs) is (args is None)
    assert args is None or call.args[3:] == args


def test_a_mask_that_depends_on_the_input_stays() -> None:
    def attend(x: Tensor, hidden: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=hidden >= 0)

    x, hidden = torch.randn(1, 2, 8, 16), torch.randn(8, 8)
    compiled = graft.compile(attend, (x, hidden.abs()), mode="eager")
    torch.testing.assert_close(compiled(x, hidden), attend(x, hidden))
