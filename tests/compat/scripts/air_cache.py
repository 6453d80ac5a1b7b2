"""A prompt and a token, each compiled into a cache, with an operator and its converter."""

import torch
import torchair
from torch.library import Library, impl
from torchair._ge_concrete_graph import ge_apis as ge
from torchair._ge_concrete_graph.fx2ge_converter import register_fx_node_ge_converter
from torchair.configs.compiler_config import CompilerConfig
from torchair.ge._ge_graph import Tensor, TensorSpec

library = Library("air_cache", "DEF")
library.define("scaled_relu(Tensor x, float scale, *, int times=1) -> Tensor")


@impl(library, "scaled_relu", "CompositeExplicitAutograd")
def scaled_relu(x, scale, *, times=1):
    return torch.relu(x) * scale * times


@impl(library, "scaled_relu", "Meta")
def scaled_relu_meta(x, scale, *, times=1):
    return torch.empty_like(x)


@register_fx_node_ge_converter(torch.ops.air_cache.scaled_relu.default)
def convert(x: Tensor, scale: float, *, times: int = 1, meta_outputs: TensorSpec = None):
    y = torchair.ge.custom_op("Relu", inputs={"x": x}, attrs={}, outputs=["y"])
    return ge.Mul(y, torchair.ge.Const(scale * times, dtype=y.dtype))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)
        config = CompilerConfig()
        config.experimental_config.frozen_parameter = True
        same = {"config": config, "cache_dir": "cache"}
        self.cached_prompt = torchair.inference.cache_compile(self.prompt, dynamic=True, **same)
        self.cached_token = torchair.inference.cache_compile(self.token, dynamic=False, **same)

    def forward(self, x, seen):
        return (self.cached_prompt if x.shape[0] > 1 else self.cached_token)(x, seen)

    def prompt(self, x, seen):
        return self.run(x, seen)

    def token(self, x, seen):
        return self.run(x, seen)

    def run(self, x, seen):
        y = torch.ops.air_cache.scaled_relu(self.up(x), 2.0, times=3)
        seen.add_(y.mean())
        return self.down(y)


torch.manual_seed(0)
model = Model().npu().eval()
result, expected = [], []
with torch.no_grad():
    for tokens in (1, 5, 9, 1):
        x = torch.randn(tokens, 16).npu()
        mine, theirs = torch.zeros(4).npu(), torch.zeros(4).npu()
        result += [model(x, mine), mine]
        expected += [model.run(x, theirs), theirs]
