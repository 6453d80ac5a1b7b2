"""Declaring operators: what is derived, what is checked, and what a mistake says."""

from __future__ import annotations

import copy
import pathlib
import pickle
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any, Optional

import process
import pytest
import torch
from torch import Tensor

import torchgraft as graft
from torchgraft import errors
from torchgraft.op import cpp


def declare() -> graft.Op:
    @graft.op("t::scale_add")
    def scale_add(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        """x + alpha * y."""
        return x + alpha * y

    return scale_add


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b)


# --- Declaring ---


def test_the_schema_comes_from_the_signature() -> None:
    op = declare()
    assert op.schema == "t::scale_add(Tensor x, Tensor y, float alpha=1.) -> Tensor"
    assert op.overload is torch.ops.t.scale_add.default
    assert (op.__name__, op.__doc__) == ("scale_add", "x + alpha * y.")
    same(op(torch.ones(2), torch.ones(2), alpha=2.0), torch.full((2,), 3.0))


def test_every_kind_of_parameter_has_a_place_in_a_signature() -> None:
    @graft.op("t::kinds")
    def kinds(
        x: Optional[Tensor],  # noqa: UP045
        ys: list[Tensor],
        n: int,
        s: torch.types.Number,
        dtype: torch.dtype,
        mode: str = "a",
        sizes: list[int] | None = None,
        *,
        flag: bool = False,
        device: torch.device | None = None,
    ) -> tuple[Tensor, Tensor]:
        total = sum(ys, torch.zeros(()))
        return total * s * n, (total if x is None else total + x).to(dtype)

    assert kinds.schema == (
        "t::kinds(Tensor? x, Tensor[] ys, SymInt n, Scalar s, ScalarType dtype, "
        'str mode="a", SymInt[]? sizes=None, *, bool flag=False, Device? device=None) '
        "-> (Tensor, Tensor)"
    )
    first, second = torch.ops.t.kinds(None, [torch.ones(2)] * 3, 2, 0.5, torch.float64, flag=True)
    same(first, torch.full((2,), 3.0))
    assert second.dtype == torch.float64


def test_a_list_may_be_a_default() -> None:
    @graft.op("t::sums")
    def sums(x: Tensor, dims: list[int] = (0,), by: list[float] = (0.5, 4.0)) -> Tensor:  # type: ignore[assignment]
        return x.sum(dims) * by[0] * by[1]

    assert sums.schema == "t::sums(Tensor x, SymInt[] dims=[0], float[] by=[0.5, 4.]) -> Tensor"
    same(torch.ops.t.sums(torch.ones(2, 3)), torch.full((3,), 4.0))
    same(torch.ops.t.sums(torch.ones(2, 3), [0, 1], [1.0, 1.0]), torch.tensor(6.0))


def test_a_schema_may_be_given_as_text() -> None:
    @graft.op(
        "t::shift(Tensor x, *, Scalar by=1, ScalarType dtype=float) -> (Tensor y, Tensor[] z)"
    )
    def shift(x: Any, *, by: Any = 1, dtype: Any = torch.float32) -> Any:
        return (x + by).to(dtype), [x - by]

    y, [z] = torch.ops.t.shift(torch.zeros(2), by=2)
    same(y, torch.full((2,), 2.0))
    same(z, torch.full((2,), -2.0))


def test_an_operator_may_write_its_input() -> None:
    @graft.op("t::add_", mutates=("x",))
    def add_(x: Tensor, y: Tensor) -> None:
        x.add_(y)

    x = torch.zeros(3)
    version = x._version
    add_(x, torch.ones(3))
    same(x, torch.ones(3))
    assert x._version > version  # autograd sees that what it saved has changed


def test_a_gradient_goes_through_a_write() -> None:
    @graft.op("t::scale_", mutates=("x",))
    def scale_(x: Tensor, y: Tensor, by: float = 2.0) -> Tensor:
        x.mul_(y)
        return x.sin() * by

    graft.check(scale_).assert_ok()

    def gradients(op: Any) -> Any:
        x, y = (torch.tensor([v], requires_grad=True) for v in (2.0, 3.0))
        both = x * 1
        out = op(both, y)
        return torch.autograd.grad((both.cos() + out).sum(), (x, y))

    same(gradients(scale_), gradients(scale_.reference))
    leaf = torch.ones(3, requires_grad=True)
    with pytest.raises(errors.BadOp, match="it writes x, here a leaf that needs a gradient"):
        scale_(leaf, leaf)
    same(leaf, torch.ones(3))  # and nothing was written
    with pytest.raises(errors.BadOp, match=r"torch\.func derives nothing through a write"):
        torch.func.grad(lambda y: scale_(torch.ones(3), y).sum())(leaf.detach())
    again = torch.autograd.grad
    with pytest.raises(errors.BadOp, match="its gradient is not derived a second time"):
        again(scale_(leaf * 1, leaf).sum(), leaf, create_graph=True)
    with pytest.raises(errors.BadOp, match="always derived from the body"):
        scale_.backward(lambda grad: grad)


def test_a_body_that_draws_random_numbers_has_no_derived_gradient() -> None:
    @graft.op("t::noise")
    def noise(x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(errors.BadOp, match=r"its body draws random numbers \(aten\.rand_like"):
        noise(x).sum().backward()
    result = graft.check(noise)
    assert {cell.surface for cell in result.misses} >= {"gradient", "func.grad"}
    assert all("draws random numbers" in str(cell) for cell in result.misses[1:3])

    @noise.backward(save=("x", "out"))
    def _(grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
        return grad * out / x

    out = noise(x)
    same(torch.autograd.grad(out.sum(), x)[0], out.detach())


def test_a_body_that_draws_random_numbers_with_some_arguments() -> None:
    @graft.op("t::drop")
    def drop(x: Tensor, p: float) -> Tensor:
        return torch.dropout(x, p, True) if p else x * 2

    x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        drop(x, 0.0).sum().backward()
        with pytest.raises(errors.BadOp, match="its body draws random numbers"):
            drop(x, 0.5).sum().backward()
    same(x.grad, torch.full((3,), 4.0))


def test_a_body_may_return_what_it_was_given() -> None:
    @graft.op("t::dense")
    def dense(x: Tensor) -> Tensor:
        return x.contiguous()

    x = torch.ones(3, requires_grad=True)
    result = dense(x)
    assert result.data_ptr() != x.data_ptr()
    result.sum().backward()
    same(x.grad, torch.ones(3))


@pytest.mark.parametrize(
    ("spec", "fn", "said"),
    [
        ("scale", lambda x: x, "this is no name of an operator"),
        ("t::f", lambda x: x, "Parameter x must have a type annotation"),
        ("t::f(Tensor x -> Tensor", lambda x: x, "its schema does not parse"),
        ("t::f(Tensor(a!) x) -> Tensor(a!)", lambda x: x, "it returns one of its inputs"),
    ],
)
def test_what_cannot_be_declared_says_why(spec: str, fn: Any, said: str) -> None:
    with pytest.raises(errors.BadOp, match=re.escape(said)) as found:
        graft.op(spec)(fn)
    assert f"{__file__}:" in str(found.value)


def test_the_body_must_fit_a_schema_given_as_text() -> None:
    said = r"not fit its schema:\n  alpha has default 2.0, in the schema default 1.0"
    with pytest.raises(errors.SignatureMismatch, match=said):

        @graft.op("t::f(Tensor x, float alpha=1.0) -> Tensor")
        def f(x: Tensor, alpha: float = 2.0) -> Tensor:
            return x


def test_a_name_is_taken_once() -> None:
    first = declare()
    with pytest.raises(errors.BadOp, match=re.escape(f"the name is taken, by {first.where}")):
        declare()
    with pytest.raises(errors.BadOp, match="another library"):
        graft.op("aten::relu(Tensor x) -> Tensor")(lambda x: x)


def test_operators_of_a_scope_go_with_it() -> None:
    for _ in range(2):
        with graft.Registry() as registry:
            op = declare()
            assert [kept.name for kept in registry.ops] == ["t::scale_add"]
        assert not hasattr(torch.ops.t, "scale_add")
        with pytest.raises(errors.BadOp, match="it was removed"):
            op(torch.ones(1), torch.ones(1))


def test_a_copy_of_an_operator_is_the_operator() -> None:
    op = declare()
    assert copy.deepcopy(op) is op
    assert pickle.loads(pickle.dumps(op)) is op


def test_a_view_of_a_parameter_is_copied() -> None:
    @graft.op("t::first")
    def first(x: Tensor) -> Tensor:
        return x[0]

    weight = torch.nn.Parameter(torch.ones(2, 2))
    with torch.no_grad():
        first(weight).zero_()
    assert weight.sum().item() == 4


def test_operators_may_be_declared_by_many_threads() -> None:
    made: list[graft.Op] = []

    def work(i: int) -> None:
        made.append(graft.op(f"t::thread{i}(Tensor x) -> Tensor")(lambda x: x + i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(made) == 8
    assert torch.ops.t.thread5(torch.zeros(1)).item() == 5
    for op in made:  # a thread's scope is the default one
        op.remove()


# --- Kernels ---


def test_a_kernel_is_used_for_its_device() -> None:
    op = declare()
    calls: list[float] = []

    @op.kernel("cpu")
    def _(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        calls.append(alpha)
        return torch.add(x, y, alpha=alpha)

    same(op(torch.ones(2), torch.ones(2), 2.0), torch.full((2,), 3.0))
    assert calls == [2.0]
    assert op(torch.ones(2, device="meta"), torch.ones(2, device="meta")).device.type == "meta"
    assert calls == [2.0]


def test_when_and_priority_choose_a_kernel() -> None:
    op = declare()

    def half(x: Tensor, y: Tensor, alpha: float = 1.0) -> bool:
        return x.dtype == torch.float16

    def long(x: Tensor, y: Tensor, alpha: float = 1.0) -> bool:
        return x.numel() > 4

    @op.kernel("cpu", when=half, priority=2)
    def first(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        return torch.full_like(x, 1)

    @op.kernel("cpu", when=long, priority=1)
    def second(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        return torch.full_like(x, 2)

    a, b = torch.zeros(8, dtype=torch.float16), torch.zeros(8)
    assert [op(x, x)[0].item() for x in (a, b, b[:2])] == [1, 2, 0]
    assert "when half, priority 2" in op.chosen(a, a)
    assert "when long, priority 1" in op.chosen(b, b)
    assert op.chosen(b[:2], b[:2]) == f"the reference at {op.where}"


def test_two_kernels_with_one_priority_are_an_error_that_names_both() -> None:
    op = declare()

    def body(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        return x

    op.kernel("cpu")(body)
    with pytest.raises(errors.AmbiguousKernel) as found:
        op.kernel("cpu")(lambda x, y, alpha=1.0: x)
    lines = str(found.value).splitlines()
    assert lines[0] == "operator 't::scale_add' has two kernels for 'cpu' with priority 0:"
    assert all(f"cpu python kernel at {__file__}:" in line for line in lines[1:3])
    assert lines[1] != lines[2]


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x, y: x, "it takes (x, y), the reference (x, y, alpha)"),
        (lambda x, alpha, y: x, "it takes (x, alpha, y), the reference (x, y, alpha)"),
        (lambda x, y, alpha: x, "alpha has no default, in the reference default 1.0"),
        (lambda x, y, alpha=2.0: x, "alpha has default 2.0, in the reference default 1.0"),
        (lambda x, y, *, alpha=1.0: x, "alpha is keyword-only, and is not in the reference"),
    ],
)
@pytest.mark.parametrize("part", ["kernel", "fake"])
def test_kernels_and_fakes_take_what_the_reference_takes(part: str, fn: Any, said: str) -> None:
    op = declare()
    with pytest.raises(errors.SignatureMismatch, match=re.escape(said)) as found:
        (op.kernel("cpu") if part == "kernel" else op.fake)(fn)
    assert op.where in str(found.value)
    assert f"{__file__}:{fn.__code__.co_firstlineno}" in str(found.value)


def test_an_unknown_device_is_an_error() -> None:
    with pytest.raises(errors.UnknownName, match="Did you mean 'cuda'"):
        declare().kernel("cude")


# --- Gradients ---


def test_the_gradient_of_the_body_and_that_of_the_gradient() -> None:
    @graft.op("t::poly")
    def poly(x: Tensor, ys: list[Tensor], k: float) -> tuple[Tensor, Tensor]:
        return x**3 * ys[0] * k, ys[1].argmax()

    x, y, z = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def run(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        value, index = torch.ops.t.poly(x, [y, z], 0.5)
        assert not index.requires_grad
        return value

    assert torch.autograd.gradcheck(lambda x, y: run(x, y, z), (x, y))
    assert torch.autograd.gradgradcheck(lambda x, y: run(x, y, z), (x, y))
    assert torch.autograd.grad(run(x, y, z).sum(), z, allow_unused=True) == (None,)


def test_an_authors_backward_gets_what_it_asked_to_be_saved() -> None:
    op = declare()
    seen: list[Any] = []

    @op.backward(save=("y", "out"))
    def _(grad: Tensor, y: Tensor, out: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        seen.append((y.shape, out.shape, alpha))
        return grad, grad * alpha

    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    gx, gy = torch.autograd.grad(op(x, y, 2.0).sum(), (x, y))
    same(gx, torch.ones(3))
    same(gy, torch.full((3,), 2.0))
    assert seen == [((3,), (3,), 2.0)]
    func = torch.func.grad(lambda y: op(x.detach(), y, 3.0).sum())(y.detach())
    same(func, torch.full((3,), 3.0))


@pytest.mark.parametrize(
    ("fn", "save", "said"),
    [
        (lambda grad, z: grad, (), "it takes 'z', which is no parameter of the reference"),
        (lambda grad, y: grad, ("x",), "it takes 'y', which is not in save=('x',)"),
        (lambda grad: grad, ("z",), "a tensor to save is one of: x, y, out"),
        (lambda: None, (), "there is one gradient for each of 1 results, first"),
    ],
)
def test_a_backward_that_cannot_be_given_what_it_takes(fn: Any, save: Any, said: str) -> None:
    with pytest.raises(errors.SignatureMismatch, match=re.escape(said)):
        declare().backward(save=save)(fn)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda grad: grad, "it returned 1 for 2 tensor parameters (x, y)"),
        (lambda grad: (grad.sum(), grad), "the gradient of 'x' has shape (), 'x' has (3,)"),
        (lambda grad: (1.0, grad), "the gradient of 'x' is a float, not a tensor"),
    ],
)
def test_gradients_that_do_not_fit(fn: Any, said: str) -> None:
    op = declare()
    op.backward(fn)
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(errors.BadGradient, match=re.escape(said)):
        op(x, x.detach()).sum().backward()


# --- Checking: what must be caught ---

QUICK = {"dtypes": [torch.float32, torch.float64], "surfaces": ["kernels"]}


def reasons(op: graft.Op, **settings: Any) -> str:
    result = graft.check(op, **{**QUICK, **settings})
    assert not result.ok
    with pytest.raises(errors.CheckFailed):
        result.assert_ok()
    return "\n".join(cell.reason for cell in result.misses)


def test_a_fake_that_returns_an_alias_is_caught() -> None:
    op = declare()
    op.fake(lambda x, y, alpha=1.0: x)
    assert "the fake returns an alias: its result shares memory with input 'x'" in reasons(op)


def test_a_fake_with_the_wrong_dtype_is_caught() -> None:
    op = declare()
    op.fake(lambda x, y, alpha=1.0: torch.empty_like(x, dtype=torch.float16))
    assert "the fake has the wrong dtype: its result is torch.float16, really" in reasons(op)


def test_a_fake_with_the_wrong_stride_is_caught() -> None:
    op = declare()
    op.fake(lambda x, y, alpha=1.0: x.new_empty(x.shape[::-1]).permute(*range(x.ndim)[::-1]))
    said = reasons(op)
    assert "the fake has the wrong stride: its result has (1, 4), really (8, 1)" in said


def test_a_fake_with_the_wrong_shape_is_caught() -> None:
    op = declare()
    op.fake(lambda x, y, alpha=1.0: x.new_empty((*x.shape, 1)))
    assert "the fake has the wrong shape: its result is (4, 8, 1), really (4, 8)" in reasons(op)


def test_a_kernel_that_drops_the_tail_is_caught() -> None:
    op = declare()

    @op.samples
    def _(make: graft.Make) -> Iterator[tuple[Any, ...]]:
        yield make(64), make(64), 0.5

    @op.kernel("cpu")
    def _(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        whole = x.numel() // 64 * 64  # a grid that rounds down
        out = torch.zeros_like(x)
        out.view(-1)[:whole] = (x + alpha * y).reshape(-1)[:whole]
        return out

    said = reasons(op)
    assert "large, odd size" in said
    assert "the tail is not computed: elements 0 to 4095 agree, the rest do not" in said


def test_a_kernel_that_writes_its_input_is_caught() -> None:
    op = declare()

    @op.kernel("cpu")
    def _(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        return x.add_(y, alpha=alpha).clone()

    assert "the kernel writes its input 'x', which the schema does not declare" in reasons(op)


def test_a_kernel_with_another_dtype_is_caught() -> None:
    op = declare()
    op.kernel("cpu")(lambda x, y, alpha=1.0: (x + alpha * y).half())
    assert "the result is torch.float16, the reference gives torch.float32" in reasons(op)


def test_a_kernel_that_forgets_nan_is_caught() -> None:
    op = declare()
    op.kernel("cpu")(lambda x, y, alpha=1.0: (x + alpha * y).nan_to_num())
    assert "NaN and inf" in reasons(op)


def test_a_kernel_that_assumes_contiguous_is_caught() -> None:
    op = declare()

    @op.kernel("cpu")
    def _(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        size, stride = x.shape, x.new_empty(x.shape).stride()
        return x.as_strided(size, stride) + alpha * y.as_strided(size, stride)

    assert "not contiguous" in reasons(op)


def test_a_kernel_that_fails_on_empty_is_caught() -> None:
    op = declare()

    @op.kernel("cpu")
    def _(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        return x + alpha * y + 0 * x.max()

    assert "empty, float32: refused, and the reference takes it" in reasons(op)


def test_lists_of_numbers_need_no_samples() -> None:
    @graft.op("t::weighted")
    def weighted(x: Tensor, weights: list[float], flags: list[bool]) -> Tensor:
        return x * weights[0] if flags[0] else x + weights[0]

    graft.check(weighted, surfaces=["kernels"]).assert_ok()


def test_samples_that_the_reference_refuses_say_why() -> None:
    @graft.op("t::of_three")
    def of_three(x: Tensor, at: list[int]) -> Tensor:
        return x + at[2]

    [miss] = graft.check(of_three).misses
    assert miss.reason == (
        "the reference takes none of the samples (IndexError: list index out of range); "
        "write @op.samples"
    )


def test_a_kernel_that_no_sample_reaches_is_named() -> None:
    op = declare()
    op.kernel("cpu", when=lambda x, y, alpha: x.ndim == 9)(lambda x, y, alpha=1.0: x)
    assert "no sample reaches it" in reasons(op)


def test_a_backward_with_the_wrong_scale_is_caught() -> None:
    op = declare()
    op.backward(lambda grad, alpha: (grad, 2 * grad * alpha))
    said = reasons(op, surfaces=["gradient"])
    assert said == ("the gradient of 'y' has the wrong scale: it is 2 times that of the reference")


def test_a_backward_with_the_wrong_shape_is_caught() -> None:
    op = declare()
    op.backward(lambda grad, alpha: (grad, (grad * alpha).sum(0)))
    said = reasons(op, surfaces=["gradient"])
    assert "the gradient of 'y' has shape (8,), 'y' has (4, 8)" in said


def test_a_tolerance_is_data_with_a_reason() -> None:
    op = declare()
    op.kernel("cpu")(lambda x, y, alpha=1.0: (x + alpha * y) * 1.001)
    assert "differs in" in reasons(op)
    op.tolerance(dict.fromkeys(QUICK["dtypes"], (0.01, 0.01, "a table of 256 entries")))
    graft.check(op, **QUICK).assert_ok()
    with pytest.raises(errors.BadValue, match="reason"):
        op.tolerance({torch.float32: (1e-2, 1e-2, "")})


def test_the_table_is_text_and_data() -> None:
    result = graft.check(declare(), surfaces=["kernels", "meta"], dtypes=[torch.float32])
    assert [(c.surface, c.device, c.status) for c in result.cells] == [
        ("kernel: the reference", "cpu", "ok"),
        ("fake", "cpu", "ok"),
        ("meta", "cpu", "ok"),
    ]
    assert str(result).splitlines()[-1].split() == ["t::scale_add", "meta", "cpu", "ok"]
    with pytest.raises(errors.UnknownName, match="Did you mean 'meta'"):
        graft.check(declare_again(), surfaces=["metta"])


def declare_again() -> graft.Op:
    return graft.op("t::again(Tensor x) -> Tensor")(lambda x: x + 1)


# --- C++ ---

SOURCE = """
at::Tensor scale_add(const at::Tensor& x, const at::Tensor& y, double alpha) {
  return x + y * alpha;
}
"""


@pytest.mark.slow
def test_torchscript_forgets_a_removed_operator() -> None:
    """Its `id` may be that of the next list that a module holds."""

    @graft.op("t_gone::once")
    def once(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    known = torch.ops.t_gone.once._op
    assert torch.jit._builtins._find_builtin(known) == "t_gone::once"
    once.remove()
    assert torch.jit._builtins._find_builtin(known) is None


def test_a_cpp_kernel_is_built_once_and_found_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = declare()
    op.kernel("cpu", cpp=SOURCE)
    x = torch.randn(4, requires_grad=True)
    same(op(x, x, 2.0), 3 * x)  # the call that builds it has its gradient, too
    same(torch.autograd.grad(op(x, x, 2.0).sum(), x)[0], torch.full((4,), 3.0))
    op.remove()

    def never(*args: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(cpp, "compile_library", never)
    again = declare()
    again.kernel("cpu", cpp=SOURCE)
    same(again(x.detach(), x.detach(), 2.0), 3 * x.detach())


@pytest.mark.slow
def test_cpp_kernels_can_be_chosen_among() -> None:
    op = declare()
    op.kernel("cpu", cpp=SOURCE, when=lambda x, y, alpha=1.0: x.numel() > 2, priority=1)
    x = torch.ones(4)
    same(op(x, x, 2.0), 3 * x)
    same(op(x[:2], x[:2]), 2 * x[:2])
    assert "cpu C++ kernel" in op.chosen(x, x)
    assert op.chosen(x[:1], x[:1]).startswith("the reference")


@pytest.mark.slow
def test_a_source_that_does_not_compile_gives_its_first_error(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "scale_add.cpp"
    file.write_text(SOURCE.replace("x + y", "x + zz"))
    op = declare()
    op.kernel("cpu", cpp=str(file))
    with pytest.raises(errors.KernelBuild) as found:
        op(torch.ones(1), torch.ones(1))
    lines = str(found.value).splitlines()
    assert lines[1].startswith(f"  {file}:3: ")
    assert "zz" in lines[1]
    assert len(lines) == 3


@pytest.mark.slow
def test_a_source_that_does_not_fit_the_schema_says_so() -> None:
    op = declare()
    op.kernel("cpu", cpp=SOURCE.replace(", double alpha", "").replace("alpha", "1.0"))
    with pytest.raises(errors.KernelBuild, match=r"number of arguments is different. 3 vs 2"):
        op(torch.ones(1), torch.ones(1))


def test_a_source_that_is_not_there() -> None:
    with pytest.raises(errors.BadValue, match=r"C\+\+ text, or a file beside .*test_op"):
        declare().kernel("cpu", cpp="csrc/missing.cpp")


def test_a_changed_header_is_another_kernel(tmp_path: pathlib.Path) -> None:
    (tmp_path / "deep.h").write_text("#define A 1\n")
    (tmp_path / "near.h").write_text('#include "deep.h"\n')
    (tmp_path / "k.cpp").write_text('#include "near.h"\n')
    source = cpp.Source.read(str(tmp_path / "k.cpp"), "C++", "")
    assert [pathlib.Path(name).name for name in source.files()] == ["near.h", "deep.h"]


def test_processes_that_build_at_once_wait_for_each_other(tmp_path: pathlib.Path) -> None:
    """The compiler is a stand-in that notes each run, so this is about the lock alone."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys, time\n"
        "if '--version' in sys.argv: sys.exit()\n"
        "if '-' in sys.argv: sys.exit(1)  # asked what it takes\n"
        f"with open({str(tmp_path / 'runs')!r}, 'a') as log: log.write('run\\n')\n"
        "time.sleep(0.3)\n"
        "pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).write_text('built')\n"
    )
    compiler.chmod(0o755)
    script = (
        "from torchgraft.op import cpp\n"
        "print(cpp.build('t::f', cpp.Source('int f();', 'C++', 'f.cpp'), '').read_text())\n"
    )
    env = {"CXX": str(compiler), "TORCHGRAFT_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin"}
    runs = [
        process.start([sys.executable, "-c", script], env={**env, "PYTHONPATH": ":".join(sys.path)})
        for _ in range(2)
    ]
    assert [run.stdout for run in process.finish_all(runs)] == ["built\n"] * 2
    assert (tmp_path / "runs").read_text() == "run\n"
