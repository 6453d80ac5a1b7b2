"""An operator of one's own in a graph: its meta, its converter, and the generated builder."""

from typing import Any

import torch
import torchair
from auto_generated_ge_raw_custom_ops import AddCustom
from torchair.ge_concrete_graph.fx2ge_converter import register_fx_node_ge_converter
from torchair.ge_concrete_graph.ge_graph import Tensor, TensorSpec
from torchair.ge_concrete_graph.utils import dtype_promote


@register_fx_node_ge_converter(torch.ops.compat_ops.my_op.default)
def convert_my_op(input1: Tensor, input2: Tensor, out: Tensor = None, meta_outputs: Any = None):
    assert isinstance(meta_outputs, TensorSpec)
    input1, input2 = dtype_promote(input1, input2, target_dtype=meta_outputs.dtype)
    return AddCustom(input1, input2)


def model(x, y):
    return torch.ops.compat_ops.my_op(x, y) * 2


compiled = torch.compile(model, backend=torchair.get_npu_backend())
x, y = torch.randn(3), torch.randn(3)
result = compiled(x.npu(), y.npu()).cpu()
