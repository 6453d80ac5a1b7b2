"""A traced model with one operator, compiled for a fixed shape: the third of an AIE tutorial."""

import torch
import torch_aie


class Sums(torch.nn.Module):
    def forward(self, x):
        return torch.cumsum(x, 0)


model = Sums().eval()
example = torch.randint(1, 10, (5, 5)).type(torch.float)
traced = torch.jit.trace(model, example)

torch_aie.set_device(0)
compiled = torch_aie.compile(
    traced,
    inputs=[torch_aie.Input((5, 5))],
    precision_policy=torch_aie.PrecisionPolicy.FP16,
    truncate_long_and_double=True,
    require_full_compilation=False,
    allow_tensor_replace_int=False,
    min_block_size=1,
    torch_executed_ops=[],
    soc_version="Ascend310P3",
    optimization_level=0,
)

x = torch.randint(1, 10, (5, 5)).type(torch.float)
result = compiled.forward(x).to("cpu")
expected = traced.forward(x)
