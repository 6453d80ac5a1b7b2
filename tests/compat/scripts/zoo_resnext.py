"""A batch of any size up to 32, on a stream, timed around it."""

import time

import mindietorch
import torch

net = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten()
)
model = torch.jit.trace(net.eval(), torch.randn(4, 3, 8, 8))
mindietorch.set_device(0)
compiled = mindietorch.compile(
    model,
    inputs=[mindietorch.Input(min_shape=(1, 3, 8, 8), max_shape=(32, 3, 8, 8))],
    precision_policy=mindietorch.PrecisionPolicy.FP32,
    allow_tensor_replace_int=True,
    soc_version="Ascend310P3",
)

x = torch.randn(16, 3, 8, 8)
stream = mindietorch.npu.Stream("npu:0")
start = time.time()
with mindietorch.npu.stream(stream):
    result = compiled(x.to("npu:0"))
    stream.synchronize()
took = time.time() - start
result = result.to("cpu")
expected = model(x)
mindietorch.finalize()
