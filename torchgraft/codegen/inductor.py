"""Regions by Inductor, torch's own code generator."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft import _torch
from torchgraft._torch import generator
from torchgraft.codegen import (
    attention,
    chain,
    convolve,
    depthwise,
    direct,
    epilogue,
    large,
    single,
    stacks,
    winograd,
)
from torchgraft.config import Config
from torchgraft.fx import meta
from torchgraft.fx.cost import flops_of, has_formula
from torchgraft.fx.decompose import decompose, keep_strides
from torchgraft.fx.dialect import is_held, is_view
from torchgraft.run import pages

log = logging.getLogger("torchgraft")


def generate(
    gm: GraphModule,
    inputs: Sequence[Any],
    config: Config,
    *,
    is_inference: bool,
    is_backward: bool,
    own: Callable[[Any], Any],
    checked: bool = False,
) -> _torch.Flat:
    """Code for one region. `gm` is the generator's to change; constants it keeps go through
    `own`, which copies those that belong to the caller. Where the caller has `checked` sizes and
    strides of all inputs, the code need not do so again."""
    # These are operators in Python, whose calls cost more than they gain unless captured.
    replayed = is_inference and config.mode == "reduce-overhead"
    if replayed:
        chain.as_one(gm, _torch.fake_mode_of(inputs))
    task = prepared(gm, inputs, config, is_inference=is_inference, checked=checked)
    return generator.compile_graph(
        task.gm,
        inputs,
        options=task.options,
        is_inference=is_inference,
        is_backward=is_backward,
        keep=task.keep,
        own=own,
        onednn=task.onednn,
        generates=task.generates,
        many_rows=task.many_rows,
        finish=epilogue.join_convolutions if replayed else None,
    )


@dataclasses.dataclass(frozen=True)
class Task:
    """A region as Inductor is to get it, and how it is to be told so."""

    gm: GraphModule
    options: dict[str, Any]
    onednn: bool
    generates: Callable[[float, bool], bool] | None
    many_rows: bool  # of products that are generated
    keep: generator.Keep  # strides of outputs, through Inductor's own passes


def prepared(
    gm: GraphModule,
    inputs: Sequence[Any],
    config: Config,
    *,
    is_inference: bool = True,
    checked: bool = False,
) -> Task:
    """What is decided about a region before Inductor sees it, for this process or for a library:
    who computes its products, and with which options. `gm` is changed."""
    options = options_for(inputs, config)
    timed, mode = config.mode == "max-autotune", _torch.fake_mode_of(inputs)
    own_registers = "cpp.simdlen" not in options  # and not others than the processor's
    written = is_inference and own_registers and winograd.as_code(gm, mode)
    if is_inference and not timed and generator.vendor() in LARGE:
        convolve.as_products(gm, mode)
    if is_inference and own_registers:
        written |= direct.as_code(gm, mode)
        written |= depthwise.as_code(gm, mode)
    if is_inference:
        single.as_loops(gm, mode)
    if is_inference and own_registers and not timed:
        written |= large.as_code(gm, mode)
    own_products = not timed and _by_generator(_products(gm))
    many_rows = written or (own_products and _has_many_rows(gm))
    if checked and all(map(_lays_out, gm.graph.nodes)):
        options = _UNASKED | options
    onednn = by_onednn(gm)
    table = _torch.inductor_decompositions()
    rounds = bool(options.get("emulate_precision_casts"))
    with generator.rounding(gm, table) if rounds else contextlib.nullcontext():
        gm = decompose(gm, inputs, table)
    gm.meta["fake_mode"] = mode
    stacks.as_rows(gm)
    del gm.meta["fake_mode"]  # Inductor's cache key holds `meta`, and no mode can be pickled
    hold_views(gm, mode)
    if is_inference and own_registers:
        many_rows |= attention.as_code(gm)
    if not timed:  # it compares kernels with epilogues of their own
        epilogue.join_products(gm)
    keep = functools.partial(keep_strides, mode=mode)
    return Task(gm, options, onednn, _generates if own_products else None, many_rows, keep)


def hold_views(gm: GraphModule, mode: Any) -> None:
    """Lay out what outputs with gaps are views of as their types say: who reads an output elsewhere
    counts on its strides, and Inductor keeps those of outputs without gaps only. `mode` is the fake
    mode of the graph's values."""
    for output in meta.outputs_of(gm):
        base = _viewed(output)
        if base is output or base.op != "call_function" or _is_dense(output.meta["val"]):
            continue
        value = base.meta["val"]
        with gm.graph.inserting_after(base):
            laid = gm.graph.call_function(generator.laid_out(), (base, list(value.stride())))
        with mode:  # a value of its own: Inductor takes one that two nodes have for one memory
            same = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
        laid.meta |= base.meta | {"val": same}
        for user in [user for user in base.users if user is not laid]:
            user.replace_input_with(base, laid)
    gm.recompile()


def _viewed(node: Any) -> Any:
    """The value that a value is a view of, or itself."""
    while isinstance(node, Node) and node.op == "call_function" and is_view(node):
        source = node.args[0]
        if not isinstance(source, Node):
            break
        if not isinstance(source.meta.get("val"), Tensor) and not is_view(source):
            break  # one of several results
        node = source
    return node


def _is_dense(value: Any) -> bool:
    """Whether a value has no gaps; one whose sizes are not known yet may have some."""
    if not isinstance(value, Tensor):
        return True
    dims = [(step, size) for size, step in zip(value.shape, value.stride(), strict=True)]
    if not all(isinstance(number, int) for dim in dims for number in dim):
        return False
    filled = 1
    for step, size in sorted(dims):
        if size != 1 and step != filled:
            return False
        filled *= size
    return True


def options_for(inputs: Sequence[Any], config: Config) -> dict[str, Any]:
    """Inductor's options for a region with these inputs."""
    options = generator.mode_options(_MODES.get(config.mode, config.mode))
    mode, symbols = _torch.fake_mode_of(inputs), {s for v in inputs for s in _torch.symbols_of(v)}
    if any(_torch.symbol_range(mode, symbol)[0] < 2 for symbol in symbols):
        options["layout_optimization"] = False  # guessing channels-last assumes that sizes exceed 1
    return options | dict(config.inductor)


_UNASKED = {"size_asserts": False, "alignment_asserts": False}
_LAID_OUT = {torch.ops.aten.bmm.default, torch.ops.aten.addmm.default, torch.ops.aten.mm.default}


def _lays_out(node: Node) -> bool:
    """Whether generated code itself decides on the memory of a call's result on CPU: a kernel of
    somebody else's may give other strides than were foretold."""
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return False
    if node.op != "call_function" or node.target in _LAID_OUT:
        return True
    return not has_formula(node.target) and not _torch.is_fallback(node.target)


FEW_ROWS, FEW_FLOPS = 6, 2e5
"""Up to so many rows, or operations, the generator's own product with constant weights beats those
of libraries by 2. Where it was measured, it is as fast as any with more too, and what follows is
part of it (docs/performance.md). Of two computed matrices, only products with few operations are
generated: packing the second one in each call costs more than the call."""
LARGE = {"amd": 3e8, "intel": 4e7}
"""Operations from which a product goes to a library all the same, which is a little ahead there; by
whose processor it is, of those that it was measured on."""
CACHED = 16e6
"""Weights (elements of a region's products with few rows) that a cache may hold. With more, as in
GPT-2, it is memory that decides: in huge pages generated products are faster, else MKL's are."""
MANY_FLOPS = 8e6
"""From so many operations a product on, oneDNN beats MKL on a processor that is not Intel's; below,
a call of it costs 15 us more."""
_PRODUCTS = {  # where the rows are
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.bmm.default: 0,
}


def _products(gm: GraphModule) -> list[tuple[int, int]]:
    """Rows and operations of each product with constant weights on CPU."""
    return [(rows, flops) for rows, flops, is_held in _all_products(gm) if is_held]


def _has_many_rows(gm: GraphModule) -> bool:
    """Whether code may be generated for a product with many rows, if for any."""
    return any(rows > FEW_ROWS and flops <= _largest() for rows, flops, _ in _all_products(gm))


def _all_products(gm: GraphModule) -> Iterator[tuple[int, int, bool]]:
    """Rows and operations of each product on CPU, and whether its weights are constant."""
    for node in gm.graph.nodes:
        if node.target in _PRODUCTS:
            data, weight = node.args[_PRODUCTS[node.target] :][:2]
            value = data.meta["val"]
            rows = value.shape[-2]
            if value.device.type == "cpu" and isinstance(rows, int):
                yield rows, flops_of(node), is_held(weight)


def _generates(flops: float, is_constant: bool) -> bool:
    """Not for an empty product: the generated loops are divided by their length (to 2.13)."""
    return 0 < flops <= (_largest() if is_constant else FEW_FLOPS)


def _largest() -> float:
    return LARGE.get(generator.vendor(), min(LARGE.values()))


def _by_generator(products: Sequence[tuple[int, int]]) -> bool:
    """Whether code is to be generated for a region's products."""
    read = sum(f / max(1, 2 * rows) for rows, f in products if rows <= FEW_ROWS)
    if read > CACHED and not pages.has_huge():
        return False
    small = sum(f for rows, f in products if rows <= FEW_ROWS or f <= FEW_FLOPS)
    if 2 * small > sum(f for _, f in products):
        return True
    return generator.vendor() in LARGE and any(f <= _largest() for _, f in products)


def by_onednn(gm: GraphModule) -> bool:
    """Whether oneDNN, and not MKL, is to compute a region's products."""
    products = _products(gm)
    work = sum(f for _, f in products)
    return generator.vendor() != "intel" and work >= MANY_FLOPS * max(1, len(products))


_MODES = {"max-autotune": "max-autotune-no-cudagraphs"}


def unavailable(values: Sequence[Any]) -> str | None:
    """Why no code can be generated for these values on this machine, or None."""
    on_cpu = any(isinstance(v, Tensor) and v.device.type == "cpu" for v in values)
    if on_cpu and _compiler() is None:
        return "no C++ compiler on this machine"
    return None


@functools.cache
def _compiler() -> str | None:
    found = generator.has_compiler()
    if found is None:
        log.warning(
            "torchgraft: no C++ compiler found, so CPU programs run on ATen, node by node. "
            "Install g++ or clang++ (or set CXX) for generated code; `torchgraft doctor` checks."
        )
    return found
