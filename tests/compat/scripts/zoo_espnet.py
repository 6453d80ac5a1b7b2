"""Speech features of several lengths: gears, or a range; then the engine alone, to a file."""

import torch
import torch_aie
from torch_aie import _enums

GEARS = [4, 8, 12]
net = torch.nn.Sequential(torch.nn.Linear(83, 5), torch.nn.ReLU())
model = torch.jit.trace(net.eval(), torch.randn(7, 83)).eval()
arguments = {
    "precision_policy": _enums.PrecisionPolicy.FP32,
    "allow_tensor_replace_int": True,
    "soc_version": "Ascend310P3",
}
by_gears = torch_aie.compile(
    model, inputs=[[torch_aie.Input((gear, 83))] for gear in GEARS], **arguments
)
by_gears.save("encoder.ts")
by_range = torch_aie.compile(
    model, inputs=[torch_aie.Input(min_shape=(1, 83), max_shape=(1500, 83))], **arguments
)
engine = torch_aie.export_engine(
    model,
    inputs=[torch_aie.Input(min_shape=(1, 83), max_shape=(1500, 83))],
    method_name="forward",
    path="encoder.om",
    **arguments,
)

x, y = torch.randn(8, 83), torch.randn(41, 83)
result = [torch.jit.load("encoder.ts")(x), by_range(y)]
expected = [model(x), model(y)]
