"""Inductor: code for a graph, in this process or as a shared library. torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import os
import pathlib
import platform
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchgraft import _torch
from torchgraft._torch import Flat, entry, fake_mode_of, rows, sizes
from torchgraft._torch.together import together

_HALVES = (torch.float16, torch.bfloat16)


def known_options() -> frozenset[str]:
    from torch._inductor import list_options

    return frozenset(list_options())


def mode_options(mode: str) -> dict[str, Any]:
    """What Inductor turns on for a mode of torch.compile, its CUDA graphs left out."""
    from torch._inductor import list_mode_options

    options = list_mode_options().get(mode, {})
    return {k: v for k, v in options.items() if not k.startswith("triton.cudagraph")}


def cache_id() -> str | None:
    """The same text in every process that shares Inductor's cache of graphs; None where there is
    no such cache."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if not config.fx_graph_cache or config.force_disable_caches:
        return None
    file = pathlib.Path(cache_dir()) / "torchgraft.id"
    own = file.with_suffix(f".{uuid.uuid4().hex}")
    try:
        if not file.exists():
            own.write_text(own.suffix)
            with contextlib.suppress(FileExistsError):
                file.hardlink_to(own)  # whole, or not there
            own.unlink()
        return file.read_text()
    except OSError:  # read-only, say: then nothing can be left for others
        return None


def cache_hits() -> int:
    """How many graphs this process has found in Inductor's cache."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fxgraph_cache_hit"])


GRAPH_IDS = itertools.count()
Keep = Callable[[GraphModule, Any], None]
"""`keep(gm, before)` lays a graph's outputs out as they were."""


def compile_graph(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any],
    is_inference: bool,
    is_backward: bool,
    keep: Keep = lambda gm, before: None,
    own: Callable[[Any], Any] = lambda constant: constant,
    onednn: bool = False,
    generates: Callable[[float, bool], bool] | None = None,
    many_rows: bool = True,
    finish: Callable[[GraphModule], None] | None = None,
) -> Flat:
    """Generate code for a graph decomposed as Inductor wants it; `gm` is changed.

    The same steps that `torch._inductor.compile_fx` takes behind AOTAutograd, from the point where
    the graph is functional and decomposed: its joint passes, freezing where weights are held, then
    `compile_fx_inner`. `keep` is for the first; the constants that the code reads in the end go
    through `own`. With `generates(operations, is constant)`, code is generated for those matrix
    products for whose size and second operand it holds; the others are library calls, and nothing
    is timed. gcc needs
    `gcc_flags` only for products of `many_rows`, and another precompiled header then. `finish`
    changes a frozen graph whose convolutions are computed channels last.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx, config
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.utils import BoxedBool

    mode = fake_mode_of(inputs)
    frozen = is_inference and any("weight" in node.meta for node in gm.graph.nodes)
    settings: dict[str, Any] = {}
    if frozen:
        settings |= {"freezing": True, "freezing_discard_parameters": False}
        if device_of(gm, inputs).type == "cpu":
            # Packed weights cannot be cached; before it finds one, Inductor lists the others,
            # number by number, for a key. And those that generated code packs would be taken for
            # any of their type: torch (to 2.13) has folded ones in the key by type alone.
            settings["fx_graph_cache"] = False
    with (
        products(generates),
        config.patch({**settings, **options}),
        tracing(TracingContext(mode)),
        _torch.lazily(),
        sizes.unassumed(),
        together(joined=is_inference),  # what backward is given should go as early as it can
        gcc_flags() if many_rows else contextlib.nullcontext(),
    ):
        if is_inference:
            gm = joint_passes(gm, inputs, keep)
        extra: dict[str, Any] = {}
        if frozen:
            gm, extra = freeze(gm, inputs, onednn)
            if finish is not None and extra["layout_opt"]:
                finish(gm)
        rebase(gm)
        if frozen:
            by_type(gm)
        output = next(iter(reversed(gm.graph.nodes)))
        output.meta["user_visible_output_idxs"] = [
            i for i, value in enumerate(output.args[0]) if isinstance(value, Node)
        ]
        allow, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
        loaded = len(PyCodeCache.modules)
        try:
            code = compile_fx.compile_fx_inner(
                gm,
                inputs,
                cudagraphs=BoxedBool(False),
                graph_id=next(GRAPH_IDS),
                is_inference=is_inference,
                is_backward=is_backward,
                **extra,
            )
            for module in PyCodeCache.modules[loaded:]:
                _own(module, own)
        finally:
            mode.allow_non_fake_inputs = allow
            _forget_modules(loaded)
    # CompiledFxGraph.__call__ only adds a profiler range around this.
    return entry.joined(getattr(code, "current_callable", None) or code)


def call_channels_last(op: Any) -> None:
    """Generated code calls `op` on images and matrices of images that lie channels last."""
    from torch._inductor import ir
    from torch._inductor.lowering import fallback_handler, register_lowering

    call = fallback_handler(op, add_to_fallback_set=False)  # type: ignore[no-untyped-call]

    def lower(*args: Any) -> Any:
        laid = (
            ir.ExternKernel.require_channels_last(arg)
            if isinstance(arg, ir.TensorBox) and len(arg.get_size()) == 4
            else arg
            for arg in args
        )
        return call(*laid)

    register_lowering(op, type_promotion_kind=None)(lower)


def module_of(source: str) -> ModuleType:
    """Python code as a module with a file, which Triton reads its functions from."""
    from torch._inductor.codecache import PyCodeCache

    return PyCodeCache.load(source)


def laid_out() -> Any:
    """The operator with which Inductor writes a value to memory, in the order of given strides."""
    from torch._inductor import inductor_prims

    return inductor_prims.force_stride_order


@contextlib.contextmanager
def rounding(gm: GraphModule, table: Mapping[Any, Any]) -> Iterator[None]:
    """While a graph comes apart by a table: mark the calls whose halves are rounded, as they are in
    eager mode. Inductor keeps them in float32 between the calls of a kernel otherwise.

    The mark is what its option `emulate_precision_casts` looks for, and what torch's tracing
    leaves where it is on; calls that are not traced again get it here. torch 2.11 to 2.13.
    """
    from torch._inductor import config

    for node in gm.graph.nodes:
        values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
        halves = any(isinstance(v, Tensor) and v.dtype in _HALVES for v in values)
        if halves and node.op == "call_function" and node.target not in table:
            node.meta["low_precision_pointwise_barrier"] = True
    with config.patch(emulate_precision_casts=True):
        yield


@contextlib.contextmanager
def products(generates: Callable[[float, bool], bool] | None) -> Iterator[None]:
    """Inductor has one choice for each product, generated code or a library, and so need not time
    any; None: it is asked for libraries only."""
    from torch._inductor import config

    if generates is None:
        yield
        return
    settings = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,CPP"}
    with config.patch(settings), _untimed(generates):
        yield


@contextlib.contextmanager
def _untimed(generates: Callable[[float, bool], bool]) -> Iterator[None]:
    from torch._inductor import ir
    from torch._inductor.select_algorithm import ExternKernelCaller, get_algorithm_selector_cache
    from torch._inductor.virtualized import V

    def held(node: Any) -> bool:
        while isinstance(node, (ir.BaseView, ir.MutableBox)):
            node = node.data
        return isinstance(node, ir.ConstantBuffer) and node.get_name() in V.graph.constants

    def choose(choices: list[Any]) -> list[Any]:
        libraries = [c for c in choices if isinstance(c, ExternKernelCaller)][:1]
        generated = [c for c in choices if not isinstance(c, ExternKernelCaller)][:1]
        if not generated or not libraries:
            return generated or libraries
        [library] = libraries
        data, *others = library.input_nodes
        sizes = [*library.layout.size, data.get_size()[-1]]
        try:
            flops = 2.0 * math.prod(map(int, sizes))
        except TypeError:  # a symbol
            flops = math.inf
        return generated if generates(flops, any(map(held, others))) else libraries

    choosers = get_algorithm_selector_cache().preprocessing_fns
    choosers.append(choose)
    try:
        with rows.fitted():
            yield
    finally:
        choosers.remove(choose)


_SCALARS = (
    "param=early-inlining-insns=1000",
    "param=large-stack-frame=65536",
    "param=dse-max-object-size=4096",
)
"""What gcc needs to keep the sums of a generated product in registers. Without, it also stores each
of them to the stack in every step of the inner loop: 8 x 32 of them on 512-bit registers were 16
stores to 16 multiplications, twice the time (gcc 12)."""


@contextlib.contextmanager
def gcc_flags(*, library: bool = False) -> Iterator[None]:
    """C++ is compiled with `_SCALARS`, where the compiler takes them, and a library for others to
    load is linked to the C++ library that they have."""
    from torch._inductor import cpp_builder

    original = cpp_builder._get_optimization_cflags

    def flags(compiler: str, *args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        compile_flags, link_flags = original(compiler, *args, **kwargs)
        if _takes(compiler, *(f"--{flag}" for flag in _SCALARS)):
            compile_flags = [*compile_flags, *(f"-{flag}" for flag in _SCALARS)]
        if library:
            link_flags = [*link_flags, *(flag[1:] for flag in shared_cxx(compiler))]
        return compile_flags, link_flags

    cpp_builder._get_optimization_cflags = flags  # type: ignore[assignment]
    try:
        yield
    finally:
        cpp_builder._get_optimization_cflags = original


def shared_cxx(compiler: str) -> list[str]:
    """The flags that link a library to the C++ library which all others have.

    A compiler that finds it only as an archive gives each library a copy. Two copies in a process
    share half of their state: a regular expression, as in AOTInductor's constructor for CUDA, then
    ends the process.
    """
    return [_SHARED] if _takes(compiler, "-shared", _SHARED, link=True) else []


_SHARED = "-l:libstdc++.so.6"


@functools.cache
def _takes(compiler: str, *flags: str, link: bool = False) -> bool:
    action = ["-o", os.devnull] if link else ["-E"]
    command = [compiler, "-x", "c++", "-", *action, *flags]
    try:
        tried = subprocess.run(command, input=b"", capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0


def _own(module: ModuleType, own: Callable[[Any], Any]) -> None:
    """Give a generated module, whose constants are its globals, those that are its own."""
    for name, value in list(vars(module).items()):
        if isinstance(value, Tensor):
            setattr(module, name, own(value))


def _forget_modules(first: int) -> None:
    """Inductor keeps every module it wrote, and in them the constants: no weight would be freed."""
    from torch._inductor.codecache import PyCodeCache

    for module in PyCodeCache.modules[first:]:
        if any(isinstance(value, Tensor) for value in vars(module).values()):
            PyCodeCache.modules.remove(module)
            sys.modules.pop(module.__name__, None)


def joint_passes(gm: GraphModule, inputs: Sequence[Any], keep: Keep) -> GraphModule:
    """Inductor's passes over whole graphs. A product that they pad becomes a view with gaps, and
    who reads it elsewhere counts on its strides: `keep` sees to those."""
    from torch._inductor.compile_fx import _recursive_joint_graph_passes as run
    from torch._inductor.virtualized import V

    before = map_arg(gm.graph.output_node().args[0], lambda node: node.meta.get("val"))
    with V.set_fake_mode(fake_mode_of(inputs)):
        if "input_device" in inspect.signature(run).parameters:  # torch >= 2.12
            gm = run(gm, input_device=device_of(gm, inputs))
        else:
            gm = run(gm)
    keep(gm, before)
    return gm


def freeze(
    gm: GraphModule, inputs: Sequence[Any], onednn: bool
) -> tuple[GraphModule, dict[str, Any]]:
    """Inductor's freezing: packed and folded weights, channels-last convolutions where they pay.

    Linears are packed by MKL, or by oneDNN, as torch itself does only ahead of time.
    """
    from torch._guards import tracing
    from torch._inductor import freezing
    from torch._inductor.compile_fx import fake_tensor_prop
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    _name_once(gm)
    layout = GraphLowering.decide_layout_opt(gm, is_inference=True)
    with tracing(None), V.set_aot_compilation(onednn):
        if layout:
            fake_tensor_prop(gm, inputs, True)
            freezing.convert_conv_weights_to_channels_last(gm)
        with contextlib.nullcontext() if layout else _values_known():
            gm, _ = freezing.freeze(gm, gm, list(inputs))
    _drop_unnamed(gm)
    return gm, {"layout_opt": layout}


@contextlib.contextmanager
def _values_known() -> Iterator[None]:
    """Inside, freezing computes the values of a graph only where some node has none: it would do so
    three times, and they are computed once more before code is made."""
    from torch._inductor.fx_passes import freezing_patterns

    compute: Any = freezing_patterns.fake_tensor_prop  # type: ignore[attr-defined]

    def missing(gm: GraphModule, *args: Any) -> Any:
        known = all("val" in node.meta for node in gm.graph.nodes)
        return None if known else compute(gm, *args)

    with mock.patch.object(freezing_patterns, "fake_tensor_prop", missing):
        yield


def _drop_unnamed(gm: GraphModule) -> None:
    """Let go of constants that no node names: folding (torch to 2.13) leaves those of which it has
    taken views, in memory and in the key of Inductor's cache."""
    named = {node.target for node in gm.graph.find_nodes(op="get_attr")}
    held = [
        *vars(gm).items(),
        *gm.named_buffers(recurse=False),
        *gm.named_parameters(recurse=False),
    ]
    for name, value in held:
        if isinstance(value, Tensor) and name not in named:
            delattr(gm, name)


def _name_once(gm: GraphModule) -> None:
    """Let one node name each constant. Folding (torch to 2.13) deletes a constant with the first
    node of it that has no users, though others may have some."""
    first: dict[Any, Node] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        if (kept := first.setdefault(node.target, node)) is not node:
            node.replace_all_uses_with(kept)
            gm.graph.erase_node(node)


def rebase(
    gm: GraphModule, told: Callable[[GraphModule, Node, Tensor], None] = lambda *_: None
) -> None:
    """Let each constant begin where its memory does; `told` gets a copy before it takes its place.

    Inductor (to 2.13) packs the weights of a generated product from the beginning of their memory,
    wherever in it they lie: those of a slice would be others.
    """
    for node in gm.graph.find_nodes(op="get_attr"):
        held = getattr(gm, node.target)
        if not isinstance(held, Tensor) or held.layout != torch.strided or not held.numel():
            continue
        if held.storage_offset() != 0:
            ends = zip(held.shape, held.stride(), strict=True)
            span = 1 + sum((size - 1) * step for size, step in ends)
            copy = held.as_strided((span,), (1,)).clone().as_strided(held.shape, held.stride())
            told(gm, node, copy)
            setattr(gm, node.target, copy)


def by_type(gm: GraphModule, device: str = "cuda") -> None:
    """Let constants count by their types in Inductor's cache, and be bound to its code when that is
    found there. By value, each number is listed for a key: 163 million of them take 16 s.
    Nothing is packed on CUDA, so no other constant has their values in it."""
    for node in gm.graph.find_nodes(op="get_attr"):
        held = getattr(gm, node.target)
        if isinstance(held, Tensor) and held.device.type == device:
            alias = held.detach()  # the caller's own tensor is not marked
            alias._is_frozen_param = True  # type: ignore[attr-defined]
            setattr(gm, node.target, alias)


def vendor() -> str:
    """Whose processor this is: "amd", "intel", or "" for anybody else's."""
    names = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}
    return next((short for name, short in names.items() if name in _processor()), "")


@functools.cache
def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return file.read()
    except OSError:
        return platform.processor()


def device_of(gm: GraphModule, inputs: Sequence[Any]) -> torch.device:
    """Where a region computes: on the CPU where nothing is anywhere else."""
    values = [*inputs, *(node.meta.get("val") for node in gm.graph.nodes)]
    devices = [v.device for v in values if isinstance(v, Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def has_compiler() -> str | None:
    """The C++ compiler that Inductor would use on CPU, or None."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError):
        return None


def settings_hash() -> str:
    """A hash of Inductor's global settings."""
    from torch._inductor import config

    return str(config.get_hash().hex())


# --- AOTInductor ---
