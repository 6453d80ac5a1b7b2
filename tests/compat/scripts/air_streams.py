"""A pass that moves two operators to a stream of their own and lets a third wait for them."""

import logging
import sys

import torch
import torch_npu
import torchair
from torchair import logger

logger.setLevel(logging.DEBUG)
aten, air = torch.ops.aten, torch.ops.air


class Model(torch.nn.Module):
    def forward(self, x):
        mm = torch.mm(x, x)
        positive = torch.abs(mm)
        return torch.add(positive, 1), torch.sub(x, mm)


def two_streams(gm, example_inputs, config: torchair.CompilerConfig):
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target == aten.mm.default:
            with gm.graph.inserting_before(node):
                gm.graph.call_function(
                    air.scope_enter.default, args=(["_user_stream_label"], ["stream_1"])
                )
        if node.op == "call_function" and node.target == aten.abs.default:
            with gm.graph.inserting_after(node):
                record = gm.graph.call_function(air.record.default, args=())
            with gm.graph.inserting_after(record):
                gm.graph.call_function(air.scope_exit.default, args=())
        if node.op == "call_function" and node.target == aten.sub.Tensor:
            with gm.graph.inserting_before(node):
                gm.graph.call_function(air.wait.default, args=([record],))


config = torchair.CompilerConfig()
config.post_grad_custom_pre_pass = two_streams
config.mode = sys.argv[1] if len(sys.argv) > 1 else "max-autotune"
if config.mode.value == "max-autotune":
    config.debug.graph_dump.type = "pbtxt"
    config.debug.graph_dump.path = "./graph_dump"
config.ge_config.optimization_switch = "AutomaticUbFusion:off"

model = Model().npu()
compiled = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))
x = torch.randn([3, 3]).npu()
result = [one.cpu() for one in compiled(x)]
expected = [one.cpu() for one in model(x)]

experimental = torch_npu.profiler._ExperimentalConfig(
    profiler_level=torch_npu.profiler.ProfilerLevel.Level2
)
with torch_npu.profiler.profile(
    activities=[
        torch_npu.profiler.ProfilerActivity.NPU,
        torch_npu.profiler.ProfilerActivity.CPU,
    ],
    with_stack=True,
    record_shapes=False,
    profile_memory=False,
    schedule=torch_npu.profiler.schedule(wait=0, warmup=0, active=1, repeat=1, skip_first=0),
    experimental_config=experimental,
    on_trace_ready=torch_npu.profiler.tensorboard_trace_handler("./prof"),
) as prof:
    compiled(x)
prof.step()
