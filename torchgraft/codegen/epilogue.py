"""What follows a product or a convolution on CUDA, done by the library's own kernel.

The generator calls libraries for both, so that a relu behind them is a kernel of its own: 1.4 µs
each in a captured graph on an H200, where most convolutions of ResNet-50 and GoogLeNet took 3.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft import _torch
from torchgraft._torch import generator
from torchgraft.codegen import own

aten = torch.ops.aten
Sizes = Sequence[int]


def join_products(gm: GraphModule, device: str = "cuda") -> None:
    """Let cuBLAS do the relu of a product with bias."""
    for relu in _calls(gm, aten.relu.default):
        product: Any = relu.args[0]
        if product.target is not aten.addmm.default or len(product.users) > 1:
            continue
        bias = product.args[0].meta["val"]
        if product.kwargs or bias.ndim != 1 or bias.device.type != device:
            continue
        _replace(relu, aten._addmm_activation.default, product.args, [product])
    gm.recompile()


def join_convolutions(gm: GraphModule, device: str = "cuda") -> None:
    """Let cuDNN do bias, sum and relu of a convolution, where it can. For frozen graphs that are
    computed channels last."""
    for relu in _calls(gm, aten.relu.default):
        total: Any = relu.args[0]
        if total.target is not aten.add.Tensor or total.kwargs or len(total.users) > 1:
            _join(relu, total, None, device)
            continue
        if all(isinstance(arg, Node) for arg in total.args):  # the later one: the other is there
            first, last = sorted(total.args)
            _join(relu, last, first, device) or _join(relu, first, last, device)
    gm.recompile()


def _join(relu: Node, node: Any, other: Node | None, device: str) -> bool:
    if node.target is not aten.convolution.default or len(node.users) > 1:
        return False
    data, weight, bias, steps, pads, dilation, transposed, _, groups = node.args
    value, x, w = (n.meta["val"] for n in (relu, data, weight))
    shapes = (*x.shape, *w.shape)
    if (
        value.device.type != device
        or value.dtype not in (torch.float16, torch.bfloat16)
        or value.ndim != 4
        or bias is None
        or transposed
        or groups != 1
        or not all(isinstance(size, int) for size in shapes)
        or (other is not None and not _alike(other.meta["val"], value))
    ):
        return False
    how = tuple(steps), tuple(pads), tuple(dilation)
    if not _runs(tuple(x.shape), tuple(w.shape), value.dtype, value.device, how, other is not None):
        return False
    args = (data, weight, bias, *map(list, how), *([other] if other is not None else ()))
    _replace(relu, convolution_relu(), args, [*relu.all_input_nodes, node])
    return True


def _alike(value: Any, other: Tensor) -> bool:
    same = isinstance(value, Tensor) and value.shape == other.shape
    return same and value.dtype == other.dtype and value.device == other.device


@functools.lru_cache(1024)
def _runs(x: Sizes, weight: Sizes, dtype: Any, device: Any, how: Any, summed: bool) -> bool:
    """Whether the library has a kernel for this, found out by a call."""
    new = functools.partial(torch.zeros, dtype=dtype, device=device)
    with _torch.real():
        try:
            data, matrix = (_last(new(shape)) for shape in (x, weight))
            plain = convolution_relu()(data, matrix, new(weight[:1]), *how)
            if summed:
                convolution_relu()(data, matrix, new(weight[:1]), *how, plain)
        except RuntimeError:
            return False
    return True


def _last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _calls(gm: GraphModule, target: Any) -> list[Node]:
    return list(gm.graph.find_nodes(op="call_function", target=target))


def _replace(node: Node, target: Any, args: Any, dead: Sequence[Node]) -> None:
    graph = node.graph
    with graph.inserting_before(node):
        joined = graph.call_function(target, args)
    joined.meta |= node.meta
    node.replace_all_uses_with(joined)
    for gone in dict.fromkeys((node, *dead)):
        if not gone.users:
            graph.erase_node(gone)


# --- The operator that stands for it in a graph ---

_SCHEMA = (
    "convolution_relu(Tensor x, Tensor weight, Tensor bias, int[] stride, int[] padding, "
    "int[] dilation, Tensor? other=None) -> Tensor"
)


@functools.cache
def convolution_relu() -> Any:
    """relu(convolution + bias + other), channels last; by cuDNN on CUDA."""
    op = own.declared(_SCHEMA, _plain, CUDA=_by_cudnn, Meta=_fake)
    generator.call_channels_last(op)
    return op


def _plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    other: Tensor | None = None,
) -> Tensor:
    made = aten.convolution(x, weight, bias, stride, padding, dilation, False, [0, 0], 1)
    return _last((made if other is None else made + other).relu())


def _by_cudnn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    other: Tensor | None = None,
) -> Tensor:
    how = stride, padding, dilation, 1
    if other is None:
        return _last(aten.cudnn_convolution_relu(x, weight, bias, *how))
    return _last(aten.cudnn_convolution_add_relu(x, weight, other, 1.0, bias, *how))


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    other: Tensor | None = None,
) -> Tensor:
    sizes = [x.shape[0], weight.shape[0]]
    for i, step in enumerate(stride):
        seen = dilation[i] * (weight.shape[2 + i] - 1) + 1
        sizes.append((x.shape[2 + i] + 2 * padding[i] - seen) // step + 1)
    return x.new_empty(sizes).to(memory_format=torch.channels_last)
