"""Small layers of one row on CUDA, one after the other, as one kernel.

Each layer alone is a kernel that waits for the one before it, though all their weights fit into the
registers of one multiprocessor. The generator has no kernel whose sums go into further sums; this
one is written for the layers at hand, in Triton, as the generator's are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from torchgraft._torch import generator
from torchgraft.codegen import own
from torchgraft.fx import meta

aten = torch.ops.aten

WIDEST, MOST = 256, 3 * 128 * 128
"""Inputs or outputs of a layer, and weights in all, that one multiprocessor reads sooner than
several kernels begin. So many weights lie in its registers: 176 a thread in float32, 119 in
float16, by ptxas for an H200; two layers of 129, which fill blocks of 256, do not."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class _Layer:
    """A product with a constant matrix and what follows it, number by number."""

    product: Node
    last: Node
    follows: tuple[str, ...]

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        return _parts(self.product)

    @property
    def data(self) -> Node:
        node: Node = self.parts[1]  # as it is now: it may be what replaced another chain
        return node


def _parts(product: Node) -> tuple[Any, Any, Any]:
    """The bias, the data and the weights."""
    args: Any = product.args
    return (None, *args) if product.target is aten.mm.default else args


def as_one(gm: GraphModule, mode: Any, device: str = "cuda") -> None:
    """Replace chains of two layers and more, in place. `mode` is the fake mode of its values."""
    gm.meta["fake_mode"] = mode
    found = [layer for node in gm.graph.nodes if (layer := _layer(node, device))]
    alone = {layer.data: layer for layer in found if len(layer.data.users) == 1}
    inner = {alone[layer.last] for layer in found if layer.last in alone}
    for layer in found:
        chain = [layer] if layer not in inner else []
        while chain and chain[-1].last in alone:
            chain.append(alone[chain[-1].last])
        for piece in _cut(chain):
            _replace(gm, piece)
            gm.graph.eliminate_dead_code()
            gm.recompile()


def _cut(chain: list[_Layer]) -> list[list[_Layer]]:
    """The chain in pieces of a kernel each; what would be one alone is left out."""
    pieces: list[list[_Layer]] = [[]]
    for layer in chain:
        if sum(map(_size, [*pieces[-1], layer])) > MOST:
            pieces.append([])
        pieces[-1].append(layer)
    return [piece for piece in pieces if len(piece) > 1]


def _size(layer: _Layer) -> int:
    """Of the block that a layer's weights fill."""
    return math.prod(map(_power, layer.parts[2].meta["val"].shape))


def _layer(node: Node, device: str) -> _Layer | None:
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return None
    bias, data, weight = _parts(node)
    x, w = data.meta["val"], weight.meta["val"]
    if (
        x.device.type != device
        or x.dtype not in _FLOATS
        or list(x.shape[:-1]) != [1]
        or "weight" not in weight.meta
        or not all(isinstance(size, int) and 0 < size <= WIDEST for size in w.shape)
        or (bias is not None and tuple(bias.meta["val"].shape) != (w.shape[1],))
    ):
        return None
    follows: list[str] = []
    last = node
    while (step := _step(last)) is not None:
        name, last = step
        follows += [name] if name else []
    return _Layer(node, last, tuple(follows))


def _step(node: Node) -> tuple[str, Node] | None:
    """What alone reads a value and works number by number: its name in `_FOLLOWS`, or "" where it
    changes the shape, and its result."""
    match list(node.users):
        case [then] if then.args[0] is node:
            if then.target in (aten.view.default, aten.reshape.default):
                return "", then
            if then.target is aten.gelu.default:
                return f"gelu_{then.kwargs.get('approximate', 'none')}", then
            if then.target is aten._to_copy.default:
                return _wide(node, then)
            target: Any = then.target
            return (_NAMES[target], then) if target in _NAMES else None
        case [gate, then] if gate.target is aten.sigmoid.default:  # silu, taken apart
            if then.target is aten.mul.Tensor and [*gate.users] == [then]:
                return "silu", then
    return None


def _wide(node: Node, wide: Node) -> tuple[str, Node] | None:
    """A step in float32, as silu of halves is written, and back: the kernel computes all so."""
    if wide.kwargs == {"dtype": torch.float32} and (step := _step(wide)) is not None:
        match list(step[1].users):
            case [back] if back.target is aten._to_copy.default:
                if back.kwargs == {"dtype": node.meta["val"].dtype}:
                    return step[0], back
    return None


def _replace(gm: GraphModule, chain: Sequence[_Layer]) -> None:
    last = chain[-1].last
    call = functools.partial(meta.call, gm, last)
    with gm.graph.inserting_before(last):
        weights = []
        for layer in chain:
            rows = call(aten.permute.default, layer.parts[2], [1, 0])
            if not rows.meta["val"].is_contiguous():
                rows = call(aten.clone.default, rows, memory_format=torch.contiguous_format)
            weights.append(rows)
        follows = [" ".join(layer.follows) for layer in chain]
        biases = [_as_matrix(layer.parts[0], call) for layer in chain]
        made = call(layers(), chain[0].data, weights, biases, follows)
        made = call(aten.reshape.default, made, list(last.meta["val"].shape))
    last.replace_all_uses_with(made)


def _as_matrix(bias: Node | None, call: Callable[..., Node]) -> Node | None:
    """Inductor writes short constant rows into code, and a kernel would make them at each call."""
    return bias and call(aten.reshape.default, bias, [1, -1])


# --- The operator that stands for them in a graph ---

_SCHEMA = "layers(Tensor x, Tensor[] weights, Tensor?[] biases, str[] follows) -> Tensor"
_NAMES = {
    aten.relu.default: "relu",
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
}
_FOLLOWS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "relu": (F.relu, "tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)"),
    "sigmoid": (F.sigmoid, "tl.sigmoid(v)"),
    "tanh": (F.tanh, "libdevice.tanh(v)"),
    "silu": (F.silu, "v * tl.sigmoid(v)"),
    "gelu_none": (F.gelu, "v * 0.5 * (1.0 + tl.erf(v * 0.7071067811865476))"),
    "gelu_tanh": (
        functools.partial(F.gelu, approximate="tanh"),
        "0.5 * v * (1.0 + libdevice.tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)))",
    ),
}


@functools.cache
def layers() -> Any:
    """Each layer's product with a row of weights for each number, its bias and what follows."""
    return own.declared(_SCHEMA, _plain, CUDA=_launch)


def _plain(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], follows: Sequence[str]
) -> Tensor:
    for weight, bias, names in zip(weights, biases, follows, strict=True):
        x = F.linear(x, weight, None if bias is None else bias.flatten())
        for name in names.split():
            x = _FOLLOWS[name][0](x)
    return x


def _launch(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], follows: Sequence[str]
) -> Tensor:
    shapes = tuple(tuple(weight.shape) for weight in weights)
    kernel = _kernel(shapes, tuple(bias is not None for bias in biases), tuple(follows))
    made = x.new_empty(1, shapes[-1][0])
    given = [bias for bias in biases if bias is not None]
    kernel[(1,)](x.contiguous(), *weights, *given, made, num_warps=8)
    return made


@functools.cache
def _kernel(shapes: Any, biased: tuple[bool, ...], follows: tuple[str, ...]) -> Any:
    return generator.module_of(source(shapes, biased, follows)).layers


def source(
    shapes: Sequence[tuple[int, int]], biased: Sequence[bool], follows: Sequence[str]
) -> str:
    """The kernel for layers of these shapes, outputs by inputs. All weights are asked for before
    the first is used. Between layers numbers are rounded as they would be in memory."""
    count = range(len(shapes))
    names = ["x", *(f"w{i}" for i in count), *(f"b{i}" for i in count if biased[i]), "y"]
    body = [_read("v", "x", shapes[0][1])]
    for i, (high, wide) in enumerate(shapes):
        held = [_held(f"o{i}[:, None]", high), _held(f"i{i}[None, :]", wide)]
        body += [
            f"o{i} = tl.arange(0, {_power(high)})",
            f"i{i} = tl.arange(0, {_power(wide)})",
            f"m{i} = {_load(f'w{i} + o{i}[:, None] * {wide} + i{i}[None, :]', held)}",
        ]
        body += [_read(f"c{i}", f"b{i}", high)] if biased[i] else []
    for i in count:
        body.append(f"v = tl.sum(m{i}.to(tl.float32) * v[None, :].to(tl.float32), 1)")
        body += [f"v = v + c{i}.to(tl.float32)"] if biased[i] else []
        body.append(f"v = v.to({_TYPE})")
        for name in follows[i].split():
            body += ["v = v.to(tl.float32)", f"v = ({_FOLLOWS[name][1]}).to({_TYPE})"]
    last, width = len(shapes) - 1, shapes[-1][0]
    body.append(f"tl.store(y + o{last}, v, mask={_held(f'o{last}', width) or None})")
    return "\n".join(
        [
            "import triton",
            "import triton.language as tl",
            "from triton.language.extra import libdevice",
            "",
            "@triton.jit",
            f"def layers({', '.join(names)}):",
            *(f"    {line}" for line in body),
            "",
        ]
    )


_TYPE = "y.dtype.element_ty"


def _read(name: str, memory: str, size: int) -> str:
    at = f"tl.arange(0, {_power(size)})"
    return f"{name} = {_load(f'{memory} + {at}', [_held(at, size)])}"


def _load(at: str, held: Sequence[str]) -> str:
    mask = " & ".join(f"({one})" for one in held if one)
    return f"tl.load({at}, mask={mask}, other=0.0)" if mask else f"tl.load({at})"


def _held(at: str, size: int) -> str:
    """Which of a block's places there are; "" for all."""
    return "" if size == _power(size) else f"{at} < {size}"


def _power(size: int) -> int:
    """The next power of two, which is what Triton has blocks of."""
    return 1 << (size - 1).bit_length()
