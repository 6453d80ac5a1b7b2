"""An extension as an NPU user writes one: built into a wheel, installed, and used."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import process
import pytest
import torch
from torch import Tensor

import torchgraft as graft
import torchgraft.compat
from torchgraft.compat import simulated
from torchgraft.errors import GraftError
from torchgraft.op.declare import declare
from torchgraft.op.header import read_header

pytestmark = pytest.mark.feature(
    "torch_npu",
    "NpuExtension, EXEC_NPU_CMD, wheels; kernels for PrivateUse1, AutogradPrivateUse1, Meta",
)

HEADER = """
REG_OP(ScaleSum)
    .INPUT(x, TensorType({DT_FLOAT, DT_FLOAT16}))
    .INPUT(y, TensorType({DT_FLOAT, DT_FLOAT16}))
    .OUTPUT(z, TensorType({DT_FLOAT, DT_FLOAT16}))
    .ATTR(alpha, Float, 1.0)
    .OP_END_FACTORY_REG(ScaleSum)
REG_OP(Halves)
    .INPUT(x, TensorType::ALL())
    .OUTPUT(low, TensorType::ALL())
    .OUTPUT(high, TensorType::ALL())
    .OP_END_FACTORY_REG(Halves)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The project, built and installed as its user would, then imported."""
    home = tmp_path_factory.mktemp("project")
    shutil.copytree(Path(__file__).parent / "project", home, dirs_exist_ok=True)
    env = os.environ | {"TORCHGRAFT_DEVICE": "npu", "MAX_JOBS": "1"}
    root = str(Path(torchgraft.__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join([str(torchgraft.compat.SITE), root])
    command = [sys.executable, "setup.py", "-q", "build", "bdist_wheel"]
    done = process.run(command, cwd=home, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,) = (home / "dist").glob("scaled_ops-1.0-*.whl")
    target = home / "installed"
    shutil.unpack_archive(wheel, target, "zip")
    sys.path.insert(0, str(target))
    declare(read_header(HEADER, where="scale.h"), "scale.h", True)

    @graft.op("ge::ScaleSum")
    def scale(x: Tensor, y: Tensor, *, alpha: float = 1.0) -> Tensor:
        return x + alpha * y

    @graft.op("ge::Halves")
    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[: x.shape[0] // 2].clone(), x[x.shape[0] // 2 :].clone()

    import scaled_ops

    yield scaled_ops
    sys.path.remove(str(target))


def test_a_kernel_is_found_by_its_aclnn_name(package: Any) -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    for seed in range(4):
        with simulated.adversary(seed):
            found = torch.ops.scaled_ops.scale_sum(x.npu(), y.npu(), 0.5)
            assert found.is_npu
            torch.testing.assert_close(found.cpu(), x + 0.5 * y)
    low, high = torch.ops.scaled_ops.halves(torch.arange(6.0).npu())
    assert (low.tolist(), high.tolist()) == ([0, 1, 2], [3, 4, 5])


def test_gradients_that_are_bound_in_cpp(package: Any) -> None:
    x, y = (torch.randn(4, 3, device="npu", requires_grad=True) for _ in range(2))
    package.scale_sum(x, y, 0.25).sum().backward()
    assert x.grad.unique().tolist() == [1.0]
    assert y.grad.unique().tolist() == [0.25]


def test_shapes_come_from_the_meta_kernel(package: Any) -> None:
    x = torch.empty(4, 3, device="meta")
    assert torch.ops.scaled_ops.scale_sum(x, x, 1.0).shape == (4, 3)
    compiled = torch.compile(
        lambda a, b: torch.ops.scaled_ops.scale_sum(a.sin(), b, 2.0).cos(),
        backend="torchgraft",
        options={"mode": "eager"},
        fullgraph=True,
    )
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    found = compiled(a.npu(), b.npu())
    torch.testing.assert_close(found.cpu(), (a.sin() + 2 * b).cos())


def test_a_kernel_of_the_cpu_stands_in(package: Any) -> None:
    """A prototype with a kernel for the CPU only: it runs on the memory of the device."""
    lib = torch.library.Library("npu_ext", "DEF")
    lib.define("twice(Tensor x) -> Tensor")
    lib.impl("twice", lambda x: x * 2, "CPU")
    assert torch.ops.npu_ext.twice(torch.ones(3, device="npu")).tolist() == [2, 2, 2]


def test_a_dtype_that_the_prototype_does_not_take(package: Any) -> None:
    x = torch.ones(2, dtype=torch.int32, device="npu")
    with pytest.raises((GraftError, RuntimeError), match="ScaleSum"):
        torch.ops.scaled_ops.scale_sum(x, x, 1.0)
