"""Operators on every surface of torch: five kinds of operator, and what check() does not try."""

from __future__ import annotations

import pathlib
import runpy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import torchgraft as graft

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "ops"


def plain() -> graft.Op:
    @graft.op("s::scale_add")
    def scale_add(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        return x.sin() + alpha * y

    return scale_add


def with_parts() -> graft.Op:
    op = plain()

    @op.kernel("cpu")
    def _(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        return torch.add(x.sin(), y, alpha=alpha)

    @op.fake
    def _(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        return torch.empty_like(x + alpha * y)

    @op.backward(save=("x",))
    def _(grad: Tensor, x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        return grad * x.cos(), grad * alpha

    op.kernel("cuda")(lambda x, y, alpha=1.0: torch.add(x.sin(), y, alpha=alpha))
    return op


def several() -> graft.Op:
    @graft.op(
        "s::several(Tensor? x, Tensor[] ys, Scalar s, ScalarType dtype, str mode='a', *, "
        "int[] dims=[0], Device? device=None) -> (Tensor, Tensor[], Tensor)"
    )
    def several(
        x: Any,
        ys: Any,
        s: Any,
        dtype: Any,
        mode: Any = "a",
        *,
        dims: Any = (0,),
        device: Any = None,
    ) -> Any:
        z = sum(y.sin() for y in ys)
        z = z if x is None else z * x
        return z * s, [y * y for y in ys], z.to(dtype).argmax()

    return several


def writing() -> graft.Op:
    @graft.op("s::axpy_", mutates=("x",))
    def axpy_(x: Tensor, y: Tensor, alpha: float = 1.0) -> None:
        x.add_(y, alpha=alpha)

    return axpy_


def integral() -> graft.Op:
    @graft.op("s::lookup")
    def lookup(table: Tensor, index: Tensor) -> Tensor:
        return table[index].contiguous()  # torch's own fake of indexing has other strides

    @lookup.samples
    def _(make: graft.Make) -> Iterator[tuple[Any, ...]]:
        yield make(10, 3), make(5, dtype=torch.int64, low=0, high=10)
        yield make(10, 3), make(2, 2, dtype=torch.int64, low=0, high=10)

    return lookup


KINDS: dict[str, Callable[[], graft.Op]] = {
    "plain": plain,
    "with_parts": with_parts,
    "several": several,
    "writing": writing,
    "integral": integral,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_every_surface(kind: str) -> None:
    result = graft.check(KINDS[kind]())
    result.assert_ok()
    left_out = {cell.surface for cell in result.cells if cell.status == "–"}
    expected = {"writing": {"double backward", "func.grad", "vmap", "jit.trace, saved"}}
    assert left_out == expected.get(kind, set())


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_every_surface_on_cuda(kind: str) -> None:
    graft.check(KINDS[kind](), devices=["cuda"]).assert_ok()


# --- What check() does not try ---


def pair() -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(3, 4, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: torch.func.grad(lambda x, y: f(x, y).sum(), argnums=(0, 1)),
    "grad of grad": lambda f: torch.func.grad(
        lambda x, y: torch.func.grad(lambda x, y: f(x, y).sum())(x, y).sum()
    ),
    "vmap": lambda f: torch.vmap(f, in_dims=(0, None)),
    "vmap of vmap": lambda f: torch.vmap(torch.vmap(f)),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(lambda x, y: f(x, y).sum())),
    "grad of vmap": lambda f: torch.func.grad(lambda x, y: torch.vmap(f)(x, y).sum()),
    "jacrev": lambda f: torch.func.jacrev(f),
    "hessian": lambda f: torch.func.hessian(lambda x, y: f(x, y).sum()),
    "jvp": lambda f: lambda x, y: torch.func.jvp(f, (x, y), (y, x)),
    "compiled grad": lambda f: torch.compile(
        torch.func.grad(lambda x, y: f(x, y).sum()), backend="aot_eager", fullgraph=True
    ),
    "compiled vmap of grad": lambda f: torch.compile(
        torch.vmap(torch.func.grad(lambda x, y: f(x, y).sum())), backend="aot_eager"
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", ["plain", "with_parts"])
def test_transforms_of_torch_func(kind: str, transform: str) -> None:
    op, (x, y) = KINDS[kind](), pair()
    y = y[0] if transform == "vmap" else y
    apply = TRANSFORMS[transform]
    want = apply(lambda x, y: x.sin() + 2.0 * y)(x, y)
    got = apply(lambda x, y: torch.ops.s.scale_add(x, y, 2.0))(x, y)
    torch.testing.assert_close(got, want)
    assert op.name == "s::scale_add"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor", "torchgraft"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["plain", "with_parts"])
def test_torch_compile_with_any_backend(backend: str, dynamic: bool, kind: str) -> None:
    op = KINDS[kind]()

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return op(x * 2, y, alpha=3.0).relu()

    run = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)
    for rows in (3, 5) if dynamic else (3,):
        leaves = [torch.randn(rows, 4, requires_grad=True) for _ in range(2)]
        want = torch.autograd.grad(fn(*leaves).sum(), leaves)
        torch.testing.assert_close(torch.autograd.grad(run(*leaves).sum(), leaves), want)
        with torch.no_grad():
            torch.testing.assert_close(run(*leaves), fn(*leaves))


@pytest.mark.parametrize("backend", ["aot_eager", "torchgraft"])
def test_a_compiled_program_writes_through_an_operator(backend: str) -> None:
    op = writing()

    def fn(x: Tensor, y: Tensor) -> Tensor:
        op(x, y, 2.0)
        return x + 1

    x, y = torch.zeros(3), torch.ones(3)
    torch.testing.assert_close(torch.compile(fn, backend=backend)(x, y), torch.full((3,), 3.0))
    torch.testing.assert_close(x, torch.full((3,), 2.0))


def test_autocast_leaves_the_types_alone() -> None:
    @graft.op("s::matmul")
    def matmul(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    x = torch.randn(3, 3, requires_grad=True)
    compiled = torch.compile(matmul, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert matmul(x, x).dtype == compiled(x, x).dtype == torch.float32
        matmul(x, x).sum().backward()
    assert x.grad is not None


def test_checkpointing_and_complex_numbers() -> None:
    @graft.op("s::twice")
    def twice(x: Tensor) -> Tensor:
        return x * x.conj() * 2

    x = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(twice, (x,))
    y = torch.randn(3, requires_grad=True)
    torch.utils.checkpoint.checkpoint(twice, y, use_reentrant=False).sum().backward()
    torch.testing.assert_close(y.grad, 4 * y.detach())


def test_no_tensors_but_a_device() -> None:
    @graft.op("s::ones")
    def ones(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.ones(n, dtype=dtype, device=device)

    graft.check(ones).assert_ok()


@pytest.mark.slow
def test_a_write_in_cpp_called_first_by_many_threads() -> None:
    op = writing()
    op.kernel("cpu", cpp="void axpy_(at::Tensor x, const at::Tensor& y, double a) {x.add_(y, a);}")
    results: list[Tensor] = []

    def work() -> None:
        x = torch.zeros(3)
        op(x, torch.ones(3), 2.0)
        results.append(x)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [x.tolist() for x in results] == [[2.0] * 3] * 4
    x = torch.zeros(3)
    version = x._version
    op(x, torch.ones(3))
    assert x._version > version
    with torch.inference_mode():
        op(x.clone(), torch.ones(3))


SCALE_ADD: Any = None  # scripted code names what is in its module


def test_script_takes_the_operator_by_its_python_name() -> None:
    global SCALE_ADD
    SCALE_ADD = plain()

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return SCALE_ADD(x, y, alpha=2.0)

    x, y = pair()
    script = torch.jit.script(fn)
    assert "s::scale_add" in str(script.graph)
    torch.testing.assert_close(script(x, y), x.sin() + 2 * y)


def test_export_with_a_dynamic_size_and_a_gradient_from_a_script() -> None:
    plain()

    class Model(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.ops.s.scale_add(x, y)

    rows = torch.export.Dim("rows")
    program = torch.export.export(Model(), pair(), dynamic_shapes=({0: rows}, {0: rows}))
    x = torch.randn(7, 4, dtype=torch.float64)
    torch.testing.assert_close(program.module()(x, x), x.sin() + x)
    traced = torch.jit.trace(Model(), pair())
    x.requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(traced(x, x.detach()).sum(), x)[0], x.cos())


def test_a_size_that_depends_on_data() -> None:
    @graft.op("s::positive")
    def positive(x: Tensor) -> Tensor:
        return x[x > 0]

    def fn(x: Tensor) -> Tensor:
        return torch.ops.s.positive(x).sin()

    x = torch.tensor([1.0, -1.0, 2.0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(fn, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(run(x), x[x > 0].sin())


def test_inside_graft_compile_it_is_launched_as_itself() -> None:
    op = with_parts()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    compiled = graft.compile(lambda x, y: op(x + 1, y, 2.0).relu(), (x, y))
    torch.testing.assert_close(compiled(x, y), ((x + 1).sin() + 2 * y).relu())
    [node] = [node for node in compiled.report.nodes if node.op == "s.scale_add.default"]
    assert node.runs == "kernel"
    assert f"launched as itself: cpu python kernel at {__file__}:" in node.reason


def test_a_choice_by_size_does_not_fix_the_size() -> None:
    op = plain()
    op.kernel("cpu", when=lambda x, y, alpha=1.0: x.shape[0] > 4)(
        lambda x, y, alpha=1.0: torch.zeros_like(x)
    )
    rows = graft.Input(min_shape=(2, 4), max_shape=(8, 4))
    compiled = graft.compile(lambda x, y: op(x, y), (rows, rows))
    assert compiled.report.nodes[0].reason.endswith("itself: its kernel is chosen at each call")
    small, large = torch.ones(2, 4), torch.ones(8, 4)
    assert compiled(small, small).sum() > 0
    assert compiled(large, large).sum() == 0


CUDA_SOURCE = """
#include <ATen/cuda/CUDAContext.h>

__global__ void add(const float* x, const float* y, float* out, float alpha, int64_t count) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < count) out[i] = sinf(x[i]) + alpha * y[i];
}

at::Tensor scale_add(const at::Tensor& x, const at::Tensor& y, double alpha) {
  at::Tensor out = at::empty_like(x);
  const int64_t count = x.numel();
  if (count > 0)
    add<<<(count + 255) / 256, 256, 0, at::cuda::getCurrentCUDAStream()>>>(
        x.const_data_ptr<float>(), y.const_data_ptr<float>(), out.mutable_data_ptr<float>(),
        alpha, count);
  return out;
}
"""


@pytest.mark.cuda
@pytest.mark.slow
def test_a_cuda_source() -> None:
    op = plain()

    def fits(x: Tensor, y: Tensor, alpha: float = 1.0) -> bool:
        dense = x.is_contiguous() and y.is_contiguous() and x.shape == y.shape
        return dense and x.dtype == y.dtype == torch.float32

    op.kernel("cuda", cuda=CUDA_SOURCE, when=fits)
    x = torch.randn(1000, device="cuda")
    assert "cuda CUDA kernel" in op.chosen(x, x)
    graft.check(op, devices=["cuda"]).assert_ok()


# --- The examples ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["python_op", "cpp_op", pytest.param("triton_op", marks=pytest.mark.cuda)]
)
def test_the_examples_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert "MISS" not in capsys.readouterr().out
