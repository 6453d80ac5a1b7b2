"""Operators that are declared here, on the device: kernels, every surface, op-plugin projects."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import Tensor

import torchgraft as graft
from torchgraft import compat
from torchgraft.op import plugin

compat.install()
import torch_npu  # noqa: E402  (there is one now)

pytestmark = pytest.mark.feature(
    "torch_npu", "simulated device: kernels in Python, op-plugin projects"
)


def test_a_kernel_for_npu_is_held_to_the_reference_on_every_surface() -> None:
    @graft.op("npu_ops::axpb")
    def axpb(x: Tensor, a: float, b: float = 1.0) -> Tensor:
        return x * a + b

    called = []

    @axpb.kernel("npu")
    def _(x: Tensor, a: float, b: float = 1.0) -> Tensor:
        called.append(x.device.type)
        return torch.add(torch.mul(x, a), b)

    x = torch.randn(4).npu()
    torch.testing.assert_close(axpb(x, 2.0).cpu(), x.cpu() * 2 + 1)
    assert called == ["npu"]
    result = graft.check(axpb)
    result.assert_ok()
    assert {cell.device for cell in result.cells} == {"cpu", "npu"}


def test_an_op_plugin_project_is_functions_of_torch_npu(tmp_path: pathlib.Path) -> None:
    (tmp_path / "ops.h").write_text(
        "REG_OP(NpuScale)\n.INPUT(x, TensorType({DT_FLOAT}))\n.ATTR(by, Float, 2.0)\n"
        ".OUTPUT(y, TensorType({DT_FLOAT}))\n.OP_END_FACTORY_REG(NpuScale)\n"
    )
    (tmp_path / "functions.yaml").write_text(
        "- func: npu_scale(Tensor x, float by=3.0) -> Tensor\n  op_api: all_version\n"
        "  gen_opapi:\n    out: {size: x, dtype: x}\n    exec: aclnnNpuScale, x, by\n"
    )
    plugin.build([tmp_path / "functions.yaml", tmp_path / "ops.h"], tmp_path / "kept")

    @graft.op("ge::NpuScale")
    def npu_scale(x: Tensor, *, by: float = 2.0) -> Tensor:
        return x * by

    graft.load_ops(tmp_path / "kept")
    x = torch.ones(3).npu()
    assert torch_npu.npu_scale(x).tolist() == [3.0] * 3
    assert torch_npu.npu_scale(x, 5.0).device.type == "npu"
