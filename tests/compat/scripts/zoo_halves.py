"""A classifier of any batch and image size in half precision: saved, loaded, run on a stream."""

import mindietorch
import torch
from mindietorch import _enums


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8)
        self.pool, self.head = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Linear(8, 10)

    def forward(self, x, mask):
        y = torch.relu(self.norm(self.conv(x)))
        return self.head(self.pool(y).flatten(1)) * mask


mindietorch.set_device(0)
net = Net().eval()
torch.jit.trace(net, (torch.randn(2, 3, 16, 16), torch.ones(2, 1))).save("net.pt")
compiled = mindietorch.compile(
    torch.jit.load("net.pt").eval(),
    inputs=[
        mindietorch.Input(min_shape=(1, 3, 16, 16), max_shape=(8, 3, 64, 64)),
        mindietorch.Input(min_shape=(1, 1), max_shape=(8, 1), dtype=mindietorch.dtype.FLOAT),
    ],
    precision_policy=_enums.PrecisionPolicy.FP16,
    truncate_long_and_double=True,
    require_full_compilation=True,
    min_block_size=3,
    torch_executed_ops=[],
    soc_version="Ascend310P3",
    optimization_level=0,
)
compiled.save("compiled.ts")

loaded = torch.jit.load("compiled.ts").eval()
stream = mindietorch.npu.Stream("npu:0")
result, expected = [], []
for batch, size in ((1, 16), (4, 32), (8, 64)):
    x, mask = torch.randn(batch, 3, size, size), torch.rand(batch, 1)
    with mindietorch.npu.stream(stream):
        made = loaded(x.to("npu:0"), mask.to("npu:0"))
        stream.synchronize()
    result.append(made.to("cpu"))
    expected.append(net(x, mask).detach())
mindietorch.finalize()
