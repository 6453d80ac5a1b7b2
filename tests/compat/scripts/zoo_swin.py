"""Load a traced model, compile it for one shape in half precision, save it, load it again."""

import torch
import torch_aie
from torch_aie import _enums

torch_aie.set_device(0)
net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 4, stride=4), torch.nn.GELU(), torch.nn.Flatten())
torch.jit.trace(net.eval(), torch.randn(2, 3, 8, 8)).save("swin.ts")

model = torch.jit.load("swin.ts").eval()
compiled = torch_aie.compile(
    model,
    inputs=[torch_aie.Input((2, 3, 8, 8))],
    precision_policy=_enums.PrecisionPolicy.FP16,
    optimization_level=0,
    soc_version="Ascend310P3",
)
compiled.save("swin_aie.ts")

x = torch.randn(2, 3, 8, 8)
again = torch.jit.load("swin_aie.ts")
result = again(x.to("npu:0")).to("cpu")
expected = model(x)
