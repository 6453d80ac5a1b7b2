"""Token ids of any length up to 512; every argument given; CPU tensors passed straight in."""

import torch
import torch_aie


class Bert(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(30, 16)
        self.types = torch.nn.Embedding(2, 16)
        self.heads = torch.nn.Linear(16, 2)

    def forward(self, ids, mask, types):
        hidden = (self.words(ids) + self.types(types)) * mask.unsqueeze(-1)
        logits = self.heads(hidden)
        return logits[..., 0], logits[..., 1]


example = torch.ones(1, 20, dtype=torch.int32)
model = torch.jit.trace(Bert().eval(), (example, example, example))
inputs = [torch_aie.Input(min_shape=[1, 8], max_shape=(1, 512), dtype=torch.int32)] * 3
compiled = torch_aie.compile(
    model,
    inputs=inputs,
    precision_policy=torch_aie.PrecisionPolicy.FP32,
    truncate_long_and_double=True,
    require_full_compilation=False,
    allow_tensor_replace_int=True,
    min_block_size=3,
    torch_executed_ops=[],
    soc_version="Ascend310P3",
    optimization_level=0,
)
torch_aie.set_device(0)

ids = torch.randint(0, 30, (1, 33))
ones = torch.ones_like(ids)
outputs = compiled(ids, ones, torch.zeros_like(ids))
result = [outputs[0].to("cpu"), outputs[1].to("cpu")]
expected = list(model(ids, ones, torch.zeros_like(ids)))
