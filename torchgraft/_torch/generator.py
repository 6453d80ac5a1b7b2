"""Inductor: code for a graph, in this process or as a shared library. torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import uuid
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft import _torch
from torchgraft._torch import Flat, fake_mode_of


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


_GRAPH_IDS = itertools.count()


def compile_graph(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any],
    is_inference: bool,
    is_backward: bool,
    own: Callable[[Any], Any] = lambda constant: constant,
    onednn: bool = False,
    generates: Callable[[float, bool], bool] | None = None,
) -> Flat:
    """Generate code for a graph decomposed as Inductor wants it; `gm` is changed.

    The same steps that `torch._inductor.compile_fx` takes behind AOTAutograd, from the point where
    the graph is functional and decomposed: its joint passes, freezing where weights are held, then
    `compile_fx_inner`. What is left of the constants after freezing goes through `own`. With
    `generates(operations, is constant)`, code is generated for those matrix products for whose
    size and second operand it holds; the others are library calls, and nothing is timed.
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
    if generates is not None:
        settings |= {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,CPP"}
    with (
        config.patch({**settings, **options}),
        tracing(TracingContext(mode)),
        _torch.lazily(),
        _gcc_scalars(),
        _untimed(generates) if generates is not None else contextlib.nullcontext(),
    ):
        if is_inference:
            gm = _joint_passes(gm, inputs)
        extra: dict[str, Any] = {}
        if frozen:
            gm, extra = _freeze(gm, inputs, onednn)
            for node in gm.graph.find_nodes(op="get_attr"):
                setattr(gm, node.target, own(getattr(gm, node.target)))
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
                graph_id=next(_GRAPH_IDS),
                is_inference=is_inference,
                is_backward=is_backward,
                **extra,
            )
        finally:
            mode.allow_non_fake_inputs = allow
            _forget_modules(loaded)
    # CompiledFxGraph.__call__ only adds a profiler range around this.
    return getattr(code, "current_callable", None) or code


def laid_out() -> Any:
    """The operator with which Inductor writes a value to memory, in the order of given strides."""
    from torch._inductor import inductor_prims

    return inductor_prims.force_stride_order


@contextlib.contextmanager
def _untimed(generates: Callable[[float, bool], bool]) -> Iterator[None]:
    """Inductor has one choice for each product and so need not time any."""
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
def _gcc_scalars() -> Iterator[None]:
    """C++ is compiled with `_SCALARS`, where the compiler takes them."""
    from torch._inductor import cpp_builder

    original = cpp_builder._get_optimization_cflags

    def flags(compiler: str, *args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        compile_flags, link_flags = original(compiler, *args, **kwargs)
        more = [f"-{flag}" for flag in _SCALARS] if _takes_scalars(compiler) else []
        return [*compile_flags, *more], link_flags

    cpp_builder._get_optimization_cflags = flags  # type: ignore[assignment]
    try:
        yield
    finally:
        cpp_builder._get_optimization_cflags = original


@functools.cache
def _takes_scalars(compiler: str) -> bool:
    command = [compiler, *(f"--{flag}" for flag in _SCALARS), "-x", "c++", "-E", "-"]
    try:
        tried = subprocess.run(command, input=b"", capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0


def _forget_modules(first: int) -> None:
    """Inductor keeps every module it wrote, and in them the constants: no weight would be freed."""
    from torch._inductor.codecache import PyCodeCache

    for module in PyCodeCache.modules[first:]:
        if any(isinstance(value, Tensor) for value in vars(module).values()):
            PyCodeCache.modules.remove(module)
            sys.modules.pop(module.__name__, None)


def _joint_passes(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    from torch._inductor.compile_fx import _recursive_joint_graph_passes as run
    from torch._inductor.virtualized import V

    with V.set_fake_mode(fake_mode_of(inputs)):
        if "input_device" in inspect.signature(run).parameters:  # torch >= 2.12
            return run(gm, input_device=_device(gm, inputs))
        return run(gm)


def _freeze(
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

    layout = GraphLowering.decide_layout_opt(gm, is_inference=True)
    with tracing(None), V.set_aot_compilation(onednn):
        if layout:
            fake_tensor_prop(gm, inputs, True)
            freezing.convert_conv_weights_to_channels_last(gm)
        gm, _ = freezing.freeze(gm, gm, list(inputs))
    return gm, {"layout_opt": layout}


def is_intel() -> bool:
    """Whether the processor is one that MKL is written for."""
    return "GenuineIntel" in _processor()


def is_amd() -> bool:
    """Whether the processor is one of AMD's."""
    return "AuthenticAMD" in _processor()


@functools.cache
def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return file.read()
    except OSError:
        return platform.processor()


def _device(gm: GraphModule, inputs: Sequence[Any]) -> torch.device:
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


def aot_compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any],
    path: str,
    folded: Callable[[GraphModule, Node, Tensor], None],
    onednn: bool = False,
) -> dict[str, Tensor]:
    """`compile_graph` for inference into a shared library at `path`, which holds no constants.

    Gives the tensors that are to be bound to it, by the library's names. No code depends on their
    values, only on what their types say; `folded` is told how each folded one came about.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx, config
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    mode = fake_mode_of(inputs)
    settings = {
        "cpp_wrapper": True,
        "always_keep_tensor_constants": True,  # or small ones become literals
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.embed_kernel_binary": True,
        "aot_inductor.output_path": path,
    }
    frozen = any("weight" in node.meta for node in gm.graph.nodes)
    settings |= {"freezing": True, "freezing_discard_parameters": False} if frozen else {}
    constants: dict[str, Tensor] = {}
    with (
        config.patch({**settings, **options}),
        tracing(TracingContext(mode)),
        V.set_aot_compilation(True),
        config.patch(compile_fx.get_cpp_wrapper_config()),  # on CUDA: tuned now, kernels kept
        _gcc_scalars(),
        _watched_folds(folded),
        _watched_constants(constants),
    ):
        gm = _without_values(gm, inputs)
        extra: dict[str, Any] = {}
        if frozen:
            # For a library, torch leaves MKL out: a weight that MKL packed cannot be moved, and so
            # not be saved. Here each is packed where the library is loaded.
            gm, extra = _freeze(gm, inputs, onednn)
        output = next(iter(reversed(gm.graph.nodes)))
        output.meta["user_visible_output_idxs"] = [
            i for i, value in enumerate(output.args[0]) if isinstance(value, Node)
        ]
        allow, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
        try:
            compile_fx.compile_fx_inner(
                gm,
                inputs,
                cudagraphs=BoxedBool(False),
                graph_id=next(_GRAPH_IDS),
                is_inference=True,
                cpp_wrapper=True,
                **extra,
            )
        finally:
            mode.allow_non_fake_inputs = allow
    made = pathlib.Path(path)
    for nodes in made.parent.glob("*.wrapper.json"):  # calls that go through the dispatcher
        nodes.rename(made.with_suffix(".json"))
    return constants


def _without_values(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """The joint passes with constants as inputs: they fold by value what happens to be uniform."""
    held: dict[str, tuple[str, Any]] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        if isinstance(node.meta.get("val"), Tensor):
            with gm.graph.inserting_before(_first_call(gm)):
                lifted = gm.graph.placeholder(f"lifted_{node.name}")
            lifted.meta = dict(node.meta)
            held[str(lifted.target)] = (str(node.target), node.meta)
            node.replace_all_uses_with(lifted)
            gm.graph.erase_node(node)
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    gm = _joint_passes(gm, [*inputs, *values[len(inputs) :]])
    for node in gm.graph.find_nodes(op="placeholder")[len(inputs) :]:
        target, node_meta = held[str(node.target)]
        with gm.graph.inserting_before(node):
            constant = gm.graph.create_node("get_attr", target)
        constant.meta = dict(node_meta)
        node.replace_all_uses_with(constant)
        gm.graph.erase_node(node)
    gm.recompile()
    return gm


def _first_call(gm: GraphModule) -> Any:
    return next(node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr"))


@contextlib.contextmanager
def _watched_folds(folded: Callable[[GraphModule, Node, Tensor], None]) -> Iterator[None]:
    from torch._inductor import constant_folding

    original = constant_folding.replace_node_with_constant

    def replace(gm: Any, node: Any, constant: Any = None, name: Any = None) -> None:
        if constant is not None:
            folded(gm, node, constant)
        original(gm, node, constant, name)

    constant_folding.replace_node_with_constant = replace
    try:
        yield
    finally:
        constant_folding.replace_node_with_constant = original


@contextlib.contextmanager
def _watched_constants(constants: dict[str, Tensor]) -> Iterator[None]:
    """Collect what a library's constants are; the compiled artefact does not tell."""
    from torch._inductor.codecache import AotCodeCompiler

    original = AotCodeCompiler.compile

    def compile(graph: Any, *args: Any, **kwargs: Any) -> Any:
        constants.update(graph.constants)
        return original(graph, *args, **kwargs)

    AotCodeCompiler.compile = compile  # type: ignore[method-assign]
    try:
        yield
    finally:
        AotCodeCompiler.compile = original  # type: ignore[method-assign]


def aot_load(path: str, device: torch.device, constants: Mapping[str, Tensor]) -> Flat:
    """The function of a library that `aot_compile` made, with its constants bound, not copied."""
    from torch._C import _aoti

    runner: Any
    if device.type == "cpu":
        runner = _aoti.AOTIModelContainerRunnerCpu(path, _CONTEXTS)
    else:
        runner = _alone(path, device)
    if constants:
        aliases = {name: tensor.detach() for name, tensor in constants.items()}
        runner.update_constant_buffer(aliases, False, True, True)
        weakref.finalize(runner, _empty, list(aliases.values()))
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        return _on_device(runner.run, device)
    return runner.run  # type: ignore[no-any-return]


def _alone(path: str, device: torch.device) -> Any:
    """The runner of a library that does without a container's own turns: those wait for the call
    before to end on the device, and ask for that while a graph is captured. One call at a time.

    Only torch's loader of packages gives such a runner to Python, so the library goes into one.
    """
    from torch._C import _aoti

    with tempfile.TemporaryDirectory(prefix="torchgraft-") as folder:
        package = os.path.join(folder, "region.pt2")
        about = json.dumps({"AOTI_DEVICE_KEY": device.type})
        with zipfile.ZipFile(package, "w") as file:
            place = "region/data/aotinductor/model/region"
            file.write(path, f"{place}.so")
            file.writestr(f"{place}.cpp", "")  # what the library was made of; gives the name below
            file.writestr(f"{place}_metadata.json", about)
            if os.path.exists(nodes := path.removesuffix(".so") + ".json"):
                file.write(nodes, f"{place}.json")
        index = -1 if device.index is None else device.index
        return _aoti.AOTIModelPackageLoader(package, "model", True, 1, index)


def _on_device(run: Flat, device: torch.device) -> Flat:
    """A library runs on the current stream of the current device, whatever device it is for."""

    def guarded(args: list[Any]) -> Sequence[Any]:
        with torch.cuda.device(device):
            return run(args)

    return guarded


def _empty(aliases: Sequence[Tensor]) -> None:
    """Let go of what constants refer to. A container keeps a handle of each that it never frees
    (`MaybeOwningAtenTensorHandle`, torch 2.11 to 2.13), so that the weights would stay for good."""
    from torch.utils._python_dispatch import _disable_current_modes

    # Garbage may be collected in a trace.
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        for alias in aliases:
            if alias.layout == torch.strided:
                alias.set_()  # type: ignore[call-overload]
            else:
                alias.data = torch.zeros(1).to_mkldnn()


_CONTEXTS = 4
"""How many calls of one CPU region run at the same time; the others wait."""
