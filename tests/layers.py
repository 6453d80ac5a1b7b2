"""The layers of `tests/cpp/layers.cpp`, as torch computes them, and what each is asked with."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def _conv(x: Tensor, y: Tensor) -> Tensor:
    return F.conv2d(x, y, stride=2, padding=1, groups=2)


LAYERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda x, y: x.relu(),
    "relu6": lambda x, y: F.relu6(x),
    "sigmoid": lambda x, y: x.sigmoid(),
    "tanh": lambda x, y: x.tanh(),
    "leaky_relu": lambda x, y: F.leaky_relu(x),
    "elu": lambda x, y: F.elu(x),
    "selu": lambda x, y: F.selu(x),
    "softplus": lambda x, y: F.softplus(x),
    "softsign": lambda x, y: F.softsign(x),
    "gelu": lambda x, y: F.gelu(x),
    "silu": lambda x, y: F.silu(x),
    "mish": lambda x, y: F.mish(x),
    "hard_sigmoid": lambda x, y: F.hardsigmoid(x),
    "hard_swish": lambda x, y: F.hardswish(x),
    "clip6": lambda x, y: x.clamp(0, 6),
    "leaky_set": lambda x, y: F.leaky_relu(x, 0.3),
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "floor_div": lambda x, y: x // y,
    "maximum": lambda x, y: torch.maximum(x, y),
    "minimum": lambda x, y: torch.minimum(x, y),
    "pow": lambda x, y: x.abs() ** y,
    "mod": lambda x, y: x % y,
    "equal": lambda x, y: x == y,
    "greater": lambda x, y: x > y,
    "less": lambda x, y: x < y,
    "logical_and": lambda x, y: torch.logical_and(x, y),
    "logical_or": lambda x, y: torch.logical_or(x, y),
    "logical_xor": lambda x, y: torch.logical_xor(x, y),
    "exp": lambda x, y: x.exp(),
    "log": lambda x, y: x.log(),
    "sqrt": lambda x, y: x.sqrt(),
    "reciprocal": lambda x, y: x.reciprocal(),
    "abs": lambda x, y: x.abs(),
    "neg": lambda x, y: -x,
    "sin": lambda x, y: x.sin(),
    "cos": lambda x, y: x.cos(),
    "tan": lambda x, y: x.tan(),
    "ceil": lambda x, y: x.ceil(),
    "floor": lambda x, y: x.floor(),
    "round": lambda x, y: x.round(),
    "erf": lambda x, y: x.erf(),
    "logical_not": lambda x, y: x.logical_not(),
    "sign": lambda x, y: x.sign(),
    "sum_all": lambda x, y: x.sum(),
    "mean_keep": lambda x, y: x.mean(-1, keepdim=True),
    "max_two": lambda x, y: x.amax((0, 1)),
    "min_last": lambda x, y: x.amin(-1),
    "prod_two": lambda x, y: x.prod(-1).prod(0),
    "matmul": lambda x, y: x @ y,
    "matmul_turned": lambda x, y: x.T @ y.T,
    "matmul_vectors": lambda x, y: (x * y).sum(-1),
    "convolution": _conv,
    "convolution_weights": lambda x, y: F.conv2d(x, y) + 1,
    "deconvolution": lambda x, y: F.conv_transpose2d(x, y, stride=2),
    "max_pool": lambda x, y: F.max_pool2d(x, 3, 2, 1),
    "avg_pool": lambda x, y: F.avg_pool2d(x, 2, ceil_mode=True),
    "shuffle": lambda x, y: x.T.reshape(3, 2, 2).permute(2, 0, 1),
    "shape": lambda x, y: torch.tensor(x.shape),
    "clip": lambda x, y: x.clamp(-0.5, 0.25),
    "quantize": lambda x, y: (x * 40 + 3).round().clamp(-128, 127).to(torch.int8),
    "quantize_unsigned": lambda x, y: (x * 40).round().clamp(0, 255).to(torch.uint8),
    "dequantize": lambda x, y: ((x * 40 + 3).round().clamp(-128, 127) - 3) / 40,
    "cumsum": lambda x, y: x.cumsum(1),
    "cumsum_back": lambda x, y: x.flip(-1).cumsum(-1).flip(-1) - x,
    "softmax": lambda x, y: x.softmax(-1),
    "concat": lambda x, y: torch.cat([x, y, x], -1),
    "slice": lambda x, y: x[1:3, 0:3:2],
    "gather": lambda x, y: x[:, torch.tensor([[0, 2], [1, 0]])],
    "cast": lambda x, y: x.half(),
    "constant": lambda x, y: x * torch.tensor([1.5, -2.5, 3.5]),
    "any_operator": lambda x, y: torch.addcmul(x, y, y, value=0.5),
    "any_arguments": lambda x, y: x.clamp(max=0.5),
    "padded": lambda x, y: x.relu(),
    "inputs_of_the_network": lambda x, y: x.abs(),
}
IMAGES = {"convolution", "convolution_weights", "deconvolution", "max_pool", "avg_pool"}
CUBES = {"max_two", "prod_two"}
REFUSALS = {
    "refuses_late_setter": "cumsum layer  is built already. Set it up before its outputs are used.",
    "refuses_axis": "cumsum layer: axis 9 of a tensor with 2 dims",
    "refuses_operator": "aten::no_such_operator is not registered.",
    "refuses_output": "unary layer  has 1 outputs, not one at 3",
    "refuses_input": "a converter adds no inputs: those of the call are its arguments",
    "refuses_unknown": "an argument is not known at compile time: it is a tensor that is computed",
    "refuses_false": "it returned false",
    "refuses_nothing": "it associated nothing with output 0",
    "refuses_odd": "it threw something that is no std::exception",
}


def inputs(name: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    if name in IMAGES:
        groups = {"convolution": 2, "deconvolution": 1}.get(name, 1)
        return torch.randn(2, 4, 7, 7), torch.randn(4, 4 // groups, 3, 3)
    if name in CUBES:
        return torch.randn(2, 3, 4), torch.ones(1)
    x = torch.randn(4, 3)
    if name in ("log", "sqrt", "pow"):
        x = x.abs() + 0.1
    if name == "matmul":
        return x, torch.randn(3, 4)
    if name == "matmul_turned":
        return x, torch.randn(5, 4)
    return x, torch.randn(4, 3) + 0.1
