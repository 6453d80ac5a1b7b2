"""What runs on torch, from every front end: forced, too small, tied, in a branch; and why."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

import pytest
import torch
from fronts import through
from torch import Tensor, nn

import torchgraft as graft
from torchgraft import errors

FRONT_ENDS = [
    "module", "exported", "traced", "loaded", "scripted", "symbolic", "torch.compile",
]  # fmt: skip


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cos() + 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.twin = Inner(), Inner()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * 2
        with graft.fallback():
            y = y.sin()
        return self.twin(y).relu()


def kinds(report: graft.Report) -> dict[str, str]:
    """The reason of each node, by operator and how often it was met."""
    found: dict[str, str] = {}
    for node in report.nodes:
        name = node.op.split(".")[1]
        found[f"{name}_" if name in found else name] = node.kind
    return found


@pytest.mark.parametrize("front", FRONT_ENDS)
def test_blocks_operators_and_modules(front: str, tmp_path: pathlib.Path) -> None:
    model, x = Model(), torch.randn(4, 4)
    config = graft.Config(torch_executed_ops=["aten::relu"], torch_executed_modules=["twin"])
    run = through(front, model, x, config, tmp_path)
    report = graft.reports()[-1]
    assert kinds(report) == {
        "cos": "generated",
        "add": "generated",
        "mul": "generated",
        "sin": "forced block",
        "cos_": "forced module",
        "add_": "forced module",
        "relu": "forced op",
    }
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    assert 0 < report.coverage < 1
    [relu] = [node for node in report.fallbacks if node.kind == "forced op"]
    assert relu.reason == "aten::relu is in torch_executed_ops"


@pytest.mark.parametrize(
    "wish", ["inner", Inner, "Inner", f"{Inner.__module__}.Inner", r"in.*", r".*\.Inner"]
)
def test_modules_by_path_class_name_or_expression(wish: Any) -> None:
    compiled = graft.compile(Model(), (torch.randn(4, 4),), torch_executed_modules=[wish])
    assert kinds(compiled.report)["cos"] == "forced module"
    twin = kinds(compiled.report)["cos_"]
    assert (twin == "forced module") == (wish not in ("inner", r"in.*"))


@pytest.mark.parametrize("wish", ["inner", Inner, "Inner", r".*\.Inner"])
@pytest.mark.parametrize("make", ["trace", "script"])
def test_modules_of_a_frozen_script(make: str, wish: Any, tmp_path: pathlib.Path) -> None:
    model, x = Model().eval(), torch.randn(4, 4)
    script = torch.jit.trace(model, x) if make == "trace" else torch.jit.script(model)
    frozen = torch.jit.freeze(script)
    report = graft.compile(frozen, (x,), torch_executed_modules=[wish]).report
    assert kinds(report)["cos"] == kinds(report)["add"] == "forced module"
    assert (kinds(report)["cos_"] == "forced module") == (wish != "inner")
    assert kinds(report)["mul"] == kinds(report)["relu"] == "generated"

    torch.jit.save(frozen, tmp_path / "frozen.pt")
    with pytest.warns(UserWarning, match="no node of this program says which module it is of"):
        compiled = graft.compile(tmp_path / "frozen.pt", (x,), torch_executed_modules=[wish])
    assert "forced module" not in kinds(compiled.report).values()
    assert any(note.startswith("torch_executed_modules has no") for note in compiled.report.notes)
    assert any(note.startswith("torch_executed_modules: no") for note in compiled.report.notes)


NAMES = ["aten::sin", "aten.sin", "aten::sin.default", "aten.sin.default"]


@pytest.mark.parametrize("name", [*NAMES, torch.ops.aten.sin, torch.ops.aten.sin.default])
def test_operators_by_any_name(name: Any) -> None:
    compiled = graft.compile(lambda x: x.sin() + 1, (torch.randn(4),), torch_executed_ops=[name])
    assert kinds(compiled.report) == {"sin": "forced op", "add": "generated"}


def test_an_operator_by_its_name_before_it_was_decomposed() -> None:
    model = nn.Sequential(nn.Softplus(), nn.ReLU())
    compiled = graft.compile(model, (torch.randn(4),), torch_executed_ops=["aten::softplus"])
    assert kinds(compiled.report).pop("relu") == "generated"
    assert kinds(compiled.report)["log1p"] == "forced op"


def test_a_wish_that_meets_nothing_is_said_and_a_wrong_name_is_an_error() -> None:
    x = torch.randn(4)
    compiled = graft.compile(
        nn.ReLU(), (x,), torch_executed_ops=["aten::cos"], torch_executed_modules=["encoder"]
    )
    assert "torch_executed_ops: no node is aten::cos" in compiled.report.notes
    assert "torch_executed_modules: no node is in encoder" in compiled.report.notes
    with pytest.raises(errors.NotRegistered, match="Did you mean 'aten::relu'"):
        graft.compile(nn.ReLU(), (x,), torch_executed_ops=["aten::rellu"])
    with pytest.raises(errors.BadValue, match="whole number"):
        graft.Config(min_block_size=0)


@torch.library.custom_op("graft_tests::wall", mutates_args=())
def wall(x: Tensor) -> Tensor:
    return x.clone()


@wall.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_block_that_is_too_small() -> None:
    def fn(x: Tensor) -> Tensor:
        return wall(wall(x.sin().cos().tan()).exp())

    x = torch.randn(4)
    compiled = graft.compile(fn, (x,), min_block_size=3)
    assert kinds(compiled.report) == {
        "sin": "generated",
        "cos": "generated",
        "tan": "generated",
        "wall": "custom operator",
        "exp": "small block",
        "wall_": "custom operator",
    }
    torch.testing.assert_close(compiled(x), fn(x))


def test_full_compilation_lists_every_culprit() -> None:
    x = torch.randn(4)

    class Complex(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.sin().to(torch.complex64) * 1j).abs() + x.cos()

    with pytest.raises(errors.NotCompiled) as info:
        graft.compile(
            Complex(), (x,), require_full_compilation=True, torch_executed_ops=["aten::cos"]
        )
    text = str(info.value)
    assert "complex numbers" in text
    assert "(aten.cos.default) at " in text
    assert "forced op: aten::cos is in torch_executed_ops" in text
    assert pathlib.Path(__file__).name in text
    assert len(info.value.culprits) == 4
    graft.compile(lambda x: x.sin(), (x,), require_full_compilation=True)


def test_nothing_compiled_is_said() -> None:
    x = torch.randn(4)
    with pytest.warns(UserWarning, match="nothing was compiled: all 1 nodes run on ATen"):
        compiled = graft.compile(nn.ReLU(), (x,), torch_executed_ops=["aten::relu"])
    assert compiled.report.coverage == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graft.compile(nn.ReLU(), (x,), mode="eager")


def test_only_tensors_and_sizes_cross_a_seam() -> None:
    """The square root of a size is a number, so what computes it follows the node that uses it."""

    def fn(x: Tensor) -> Tensor:
        return (x * 2).sin() / torch.sym_sqrt(x.shape[0])

    spec = graft.Input(min_shape=(2,), max_shape=(64,))
    compiled = graft.compile(fn, (spec,), torch_executed_ops=["aten::div"])
    found = {node.op: node.kind for node in compiled.report.nodes}
    assert found["aten.div.Tensor"] == "forced op"
    assert found["aten.sin.default"] == "generated"
    assert "non-tensor link" in found.values()
    for size in (2, 9):
        x = torch.randn(size)
        torch.testing.assert_close(compiled(x), fn(x))


def test_writes_views_and_random_numbers_across_a_seam() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            self.count += x.sin()
            y.mul_(2).add_(self.count.cos())
            return y[:2], (x + y).tan()

    for ops in (["aten::sin", "aten::add"], ["aten::mul", "aten::copy_"], ["aten::slice"]):
        model, twin = Writes(), Writes()
        compiled = graft.compile(model, (torch.ones(4), torch.ones(4)), torch_executed_ops=ops)
        for _ in range(2):
            x, y = torch.randn(4), torch.randn(4)
            mine, theirs = y.clone(), y.clone()
            got, want = compiled(x, mine), twin(x, theirs)
            torch.testing.assert_close((got, mine), (want, theirs))
            assert got[0].data_ptr() == mine.data_ptr()
        torch.testing.assert_close(model.count, twin.count)


def test_random_numbers_on_aten_are_drawn_in_the_order_of_the_program() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.rand_like(wall(x).sin())
        return first, torch.rand_like(x)

    x = torch.ones(4)
    compiled = graft.compile(fn, (x,), torch_executed_ops=["aten::rand_like", "aten::rand"])
    torch.manual_seed(3)
    got = compiled(x)
    torch.manual_seed(3)
    torch.testing.assert_close(got, fn(x))


# --- Control flow ---


class Branches(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        y = torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() * 2, (x,))
        body = lambda i, z: (i + 1, z * 2 + 1)  # noqa: E731
        return torch.ops.higher_order.while_loop(lambda i, z: i < 3, body, (n, y), ())


@pytest.mark.slow
@pytest.mark.parametrize("front", ["module", "exported", "torch.compile"])
def test_branches_and_loops_are_compiled(front: str) -> None:
    model, args = Branches(), (torch.ones(3), torch.tensor(0))
    if front == "torch.compile":
        run: Any = torch.compile(model, backend="torchgraft")
        run(*args)
    else:
        program = torch.export.export(model, args) if front == "exported" else model
        run = graft.compile(program, None if front == "exported" else args)
    report = graft.reports()[-1]
    assert report.coverage == 1
    assert {node.kind for node in report.nodes} == {"generated", "control flow"}
    assert any("/" in node.node and node.op == "aten.sin.default" for node in report.nodes)
    for x in (torch.ones(3), -torch.ones(3)):
        for n in (torch.tensor(0), torch.tensor(5)):
            torch.testing.assert_close(run(x, n), model(x, n))


class Mapped(nn.Module):
    def forward(self, rows: Tensor, y: Tensor) -> Tensor:
        from functorch.experimental.control_flow import map

        result: Tensor = map(lambda x, y: (x * 2).sin() + y, rows, y)
        return result


class Scanned(nn.Module):
    def forward(self, rows: Tensor, y: Tensor) -> Any:
        from torch._higher_order_ops.scan import scan

        return scan(lambda carry, x: (carry + x.sin(), (carry * x).cos()), y, rows, reverse=True)


@pytest.mark.parametrize("model", [Mapped(), Scanned()], ids=["map", "scan"])
@pytest.mark.parametrize("strided", [False, True])
def test_bodies_of_map_and_scan_are_compiled(model: nn.Module, strided: bool) -> None:
    rows = torch.randn(3, 5).t() if strided else torch.randn(5, 3)
    args = (rows, torch.randn(3))
    compiled = graft.compile(model, args)
    assert {node.kind for node in compiled.report.nodes} == {"generated", "control flow"}
    torch.testing.assert_close(compiled(*args), model(*args))


@pytest.mark.slow
def test_converters_and_passes_reach_into_branches() -> None:
    @graft.converter(torch.ops.aten.cos.default)
    def cos(net: graft.Net, x: graft.Value) -> Any:
        return net.add("aten::sin", net.add("aten::add", x, torch.pi / 2))

    args = (-torch.ones(3), torch.tensor(0))
    compiled = graft.compile(Branches(), args, verify="each")
    assert "aten.cos.default" not in {node.op for node in compiled.report.nodes}
    torch.testing.assert_close(compiled(*args), Branches()(*args))


def test_a_refusal_is_the_reason_where_the_generator_refuses_too() -> None:
    @graft.converter(torch.ops.aten.abs.default)
    def magnitude(net: graft.Net, x: graft.Value) -> Any:
        raise graft.Declined("no square root here")

    x = torch.randn(4, dtype=torch.complex64)
    compiled = graft.compile(lambda x: x.abs() + 1, (x,))
    assert kinds(compiled.report) == {"abs": "declined", "add": "generated"}
    [node] = compiled.report.fallbacks
    assert node.reason == "complex numbers; magnitude: no square root here"


def test_a_block_is_left_to_torch_in_training_too() -> None:
    def fn(x: Tensor) -> Tensor:
        with graft.fallback():
            y = x.sin()
        return (y * 2).sum()

    x = torch.randn(4, requires_grad=True)
    torch.compile(fn, backend="torchgraft")(x).backward()
    forward = [r for r in graft.reports() if r.name.endswith("forward")][-1]
    assert kinds(forward)["sin"] == "forced block"
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())
