"""Scale, shift, round in place, clamp: the model of the quantisation tutorial."""

import torch
import torch_aie


class Quantize(torch.nn.Module):
    def forward(self, x):
        x = x * 8.8 + 1.1
        return torch.clamp(torch.round_(x), -128, 127)


model = Quantize().eval()
traced = torch.jit.trace(model, torch.randint(1, 10, (5, 5)).type(torch.float))
torch_aie.set_device(0)
compiled = torch_aie.compile(
    traced,
    inputs=[torch_aie.Input((5, 5))],
    precision_policy=torch_aie.PrecisionPolicy.FP32,
    min_block_size=1,
    torch_executed_ops=[],
    soc_version="Ascend310P3",
)
x = torch.randint(1, 20, (5, 5)).type(torch.float)
result = compiled.forward(x).to("cpu")
expected = traced.forward(x)
