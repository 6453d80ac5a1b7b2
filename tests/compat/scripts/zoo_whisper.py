"""A decoder step with a cache of keys: a five-dimensional input, only one size of it free."""

import mindietorch
import torch


class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.keys = torch.nn.Linear(8, 8)

    def forward(self, hidden, cache):
        new = self.keys(hidden).view(1, 1, 1, 1, 8)
        return torch.cat([cache, new.expand(2, 2, 1, 1, 8)], 3)


example = torch.randn(1, 8), torch.randn(2, 2, 1, 6, 8)
model = torch.jit.trace(Step().eval(), example).eval()
compiled = mindietorch.compile(
    model,
    inputs=[
        mindietorch.Input((1, 8)),
        mindietorch.Input(min_shape=(2, 2, 1, 2, 8), max_shape=(2, 2, 1, 448, 8)),
    ],
    precision_policy=mindietorch._enums.PrecisionPolicy.FP16,
    soc_version="Ascend310P3",
)
compiled.save("decoder.ts")
hidden, cache = torch.randn(1, 8), torch.randn(2, 2, 1, 30, 8)
result = torch.jit.load("decoder.ts")(hidden, cache).to("cpu")
expected = model(hidden, cache)
