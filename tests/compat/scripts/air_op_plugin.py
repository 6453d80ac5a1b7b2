"""An operator of an op-plugin project in a graph: its meta, its converter, a model."""

from typing import Any

import torch
import torch_npu
import torchair
from torch.library import impl
from torch_npu.meta._meta_registrations import m
from torchair import register_fx_node_ge_converter
from torchair.ge import Tensor


@impl(m, "npu_plus_custom")
def npu_plus_custom_meta(x, y):
    return torch.empty_like(x)


@register_fx_node_ge_converter(torch.ops.npu.npu_plus_custom.default)
def convert_npu_plus_custom(x: Tensor, y: Tensor, z: Tensor = None, meta_outputs: Any = None):
    return torchair.ge.custom_op("PlusCustom", inputs={"x": x, "y": y}, outputs=["z"])


class Model(torch.nn.Module):
    def forward(self, x, y):
        return torch_npu.npu_plus_custom(x, y)


model = torch.compile(Model().npu(), backend=torchair.get_npu_backend(), dynamic=False)
x, y = torch.rand(8, 2048).npu(), torch.rand(8, 2048).npu()
result = model(x, y).cpu()
expected = (x + y).cpu()
