"""The only file that imports private torch modules: one function per need, torch 2.11 to 2.13.

Everything else in torchgraft speaks public torch. When a torch release moves one of these, this
is the one file to mend; each function says what it gives, not how torch spells it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

Flat = Callable[[list[Any]], Sequence[Any]]
"""A compiled graph: takes a list of inputs (which it may empty), gives the outputs in order."""

TreeSpec = pytree.TreeSpec


# --- Trees of arguments ---


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of nested tuples, lists, dicts and registered classes, and how to rebuild it."""
    return pytree.tree_flatten(tree)


def unflatten(leaves: Iterable[Any], spec: TreeSpec) -> Any:
    """The inverse of `flatten`."""
    return pytree.tree_unflatten(leaves, spec)


def flatten_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """The leaves with a readable path each, such as `[0]['mask']`."""
    return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(tree)[0]]


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with `fn` applied to each leaf."""
    return pytree.tree_map(fn, tree)


def is_row(tree: TreeSpec, count: int) -> bool:
    """Whether `(args, kwargs)` is `count` plain positional arguments and no keywords."""
    args, kwargs = tree.children()
    leaves = all(child.is_leaf() for child in args.children())
    return leaves and args.num_children == count and kwargs.num_children == 0


def flatten_like(tree: TreeSpec, value: Any) -> list[Any] | None:
    """The leaves of a value in the order of a tree (dicts may have another), or None."""
    try:
        leaves = tree.flatten_up_to(value)
    except ValueError:
        return None
    return leaves if all(pytree.tree_structure(leaf).is_leaf() for leaf in leaves) else None


def show_tree(tree: TreeSpec) -> str:
    """A tree of `(args, kwargs)` as a call: `(*, [*, *], mask=*)`."""
    args, kwargs = unflatten(["*"] * tree.num_leaves, tree)
    parts = [str(arg) for arg in args] + [f"{k}={v}" for k, v in kwargs.items()]
    return f"({', '.join(parts)})".replace("'*'", "*")


# --- Fake tensors and symbols ---


def fake_mode_of(values: Iterable[Any]) -> Any:
    """The fake mode that the values (or the surrounding trace) belong to, else a new one."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(list(values)) or new_fake_mode()


def fake_of(mode: Any, tensor: Tensor) -> Tensor:
    """A static fake twin of a real tensor."""
    fake: Tensor = mode.from_tensor(tensor, static_shapes=True)
    return fake


def new_fake_mode() -> Any:
    """A fake mode of its own, whatever is being traced around it."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def quiet_guards(mode: Any) -> contextlib.AbstractContextManager[None]:
    """Assume nothing of symbolic sizes that outlasts the block."""
    env = mode.shape_env
    return contextlib.nullcontext() if env is None else env.suppress_guards()


def is_fake(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


@contextlib.contextmanager
def faking(mode: Any) -> Iterator[None]:
    """Run operators on fake tensors, real constants allowed, no new symbols recorded."""
    allow, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    fresh = (
        mode.shape_env.ignore_fresh_unbacked_symbols()
        if mode.shape_env is not None
        else contextlib.nullcontext()
    )
    try:
        with mode, fresh, torch.no_grad():
            yield
    finally:
        mode.allow_non_fake_inputs = allow


def symbols_of(value: Any) -> set[Any]:
    """The free symbols (sympy) in a tensor's sizes and strides, or in a symbolic number."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    return set(free_symbols(value)) if isinstance(value, (Tensor, *SYMBOLIC)) else set()


def has_unbacked(value: Any) -> bool:
    """Whether a size depends on data (`nonzero`, `item`), so that it is known only when run."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return isinstance(value, (Tensor, *SYMBOLIC)) and bool(free_unbacked_symbols(value))


def hint(number: Any) -> Any:
    """A plausible value for a symbolic number: the one it was traced with where there is one."""
    if not isinstance(number, SYMBOLIC):
        return number
    return number.node.hint if number.node.has_hint() else 2


@contextlib.contextmanager
def real(seed: int = 0) -> Iterator[None]:
    """Run operators on real tensors inside a compile: no mode, no gradient, a seed of its own."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.no_grad(), no_autocast(), torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def expression(number: Any) -> Any:
    """The sympy expression of a symbolic number; an int where it is known to be one."""
    if not isinstance(number, SYMBOLIC):
        return number
    return int(number.node.expr) if number.node.expr.is_Integer else number.node.expr


def shape_guards(mode: Any) -> list[tuple[Any, str]]:
    """What was assumed of the symbols while compiling: (sympy condition, source line)."""
    if mode.shape_env is None:
        return []
    return [(guard.expr, str(guard.sloc)) for guard in mode.shape_env.guards]


def symbol_range(mode: Any, symbol: Any) -> tuple[int, int | None]:
    """The sizes that a symbol may take; None is unbounded."""
    bounds = mode.shape_env.var_to_range.get(symbol)
    if bounds is None:
        return 0, None
    low, high = (
        int(end) if getattr(end, "is_Integer", False) else None
        for end in (bounds.lower, bounds.upper)
    )
    return low or 0, high


def format_of(value: Tensor) -> torch.memory_format:
    """The memory format of a fake tensor, judged by the sizes it was traced with."""
    sizes, strides = (
        [s.node.hint if isinstance(s, torch.SymInt) else s for s in part]
        for part in (value.shape, value.stride())
    )
    real = torch.empty_strided(sizes, strides, device="meta")
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(sizes))
    if last is None or real.is_contiguous() or not real.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def may_be(mode: Any, size: Any, value: int) -> bool:
    """Whether a symbolic size can have this value, but need not."""
    if isinstance(expr := expression(size), int):
        return False
    bounds = mode.shape_env.bound_sympy(expr)
    return bool(bounds.lower <= value <= bounds.upper and bounds.lower != bounds.upper)


@functools.lru_cache(maxsize=4096)
def evaluate(expr: Any, sizes: tuple[tuple[str, int], ...]) -> Any:
    """A sympy expression or condition with the symbols (by name) set to these sizes."""
    known = dict(sizes)
    value = expr.subs({s: known[str(s)] for s in expr.free_symbols if str(s) in known})
    return int(value) if getattr(value, "is_Integer", False) else value


# --- The dialect ---


def _core() -> dict[Any, Callable[..., Any]]:
    """Core ATen's decompositions, less composite operators: those come apart by themselves."""
    from torch._decomp import _core_aten_decompositions_post_autograd

    return _core_aten_decompositions_post_autograd()


@functools.cache
def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """Core ATen's decompositions, less those that Inductor declines (it has something better)."""
    generator = inductor_decompositions()
    return {op: body for op, body in _core().items() if op in generator}


@functools.cache
def declined_decompositions() -> frozenset[Any]:
    """What core ATen would decompose and Inductor would not."""
    return frozenset(_core()) - core_decompositions().keys()


@functools.cache
def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    import torch._inductor.lowering  # noqa: F401 (some decompositions reach for it)
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


@functools.cache
def export_decompositions() -> dict[Any, Callable[..., Any]]:
    """`core_decompositions` for `ExportedProgram.run_decompositions`, which wants the bodies of
    composite operators (`linear`, `matmul`, …) in the table, too."""
    table = torch.export.default_decompositions()
    for op in declined_decompositions():
        table.pop(op, None)  # type: ignore[no-untyped-call]
    return dict(table.items())  # type: ignore[no-untyped-call]


def graph_module(root: torch.nn.Module, graph: Graph) -> GraphModule:
    """A GraphModule whose Python code is written when somebody asks for it, as Inductor has them:
    code costs as much as a pass, and a graph that is compiled further never runs it."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def _lazily() -> contextlib.AbstractContextManager[None]:
    """Make `graph_module`s only, whoever makes them."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(True)


def retrace(
    fn: Callable[..., Any], inputs: Sequence[Any], table: Mapping[Any, Callable[..., Any]]
) -> GraphModule:
    """Trace `fn` on fake inputs, decomposing by `table`; `meta["original_aten"]` is what a node is
    part of."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = fake_mode_of(inputs)
    origin = torch.fx.traceback.preserve_node_meta()
    with faking(mode), enable_python_dispatcher(), _lazily(), origin:
        return make_fx(fn, decomposition_table=dict(table))(*inputs)


def trace(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    mode: Any,
    table: Mapping[Any, Callable[..., Any]],
) -> GraphModule:
    """`retrace` of code that somebody wrote: writes in place become new values, and composite
    operators are taken apart as AOTAutograd does it."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    with faking(mode), enable_python_dispatcher(), _silent("torch._subclasses.fake_tensor"):
        functional = dispatch_functionalize(fn, FunctionalTensorMode())
        return make_fx(functional, decomposition_table=dict(table))(*inputs)


@contextlib.contextmanager
def _silent(logger: str) -> Iterator[None]:
    """Keep a logger from telling of an exception that the caller handles."""
    log = logging.getLogger(logger)
    log.disabled, was = True, log.disabled
    try:
        yield
    finally:
        log.disabled = was


def is_op(target: Any) -> bool:
    """Whether a call's target is an operator of torch's registry."""
    return isinstance(target, torch._ops.OpOverload)


def is_fallback(target: Any) -> bool:
    """Whether Inductor calls ATen's kernel for an operator and writes none (2.11 to 2.13)."""
    from torch._inductor import lowering

    return target in lowering.fallbacks


def is_composite(target: Any) -> bool:
    """Whether an operator is made of others before autograd sees it (`linear`, `matmul`, …)."""
    try:
        return is_op(target) and target._can_decompose()
    except RuntimeError:  # one of TorchScript's own (`sub.int`), which no dispatcher knows
        return False


def is_packet(target: Any) -> bool:
    """Whether a target is an operator with its overload left open."""
    return isinstance(target, torch._ops.OpOverloadPacket)


def resolve_overload(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Which overload of `ns::op` a call with these (fake) arguments means."""
    found: str = torch._C._jit_resolve_packet(name, *args, **kwargs)
    return found or "default"


def is_higher_order(target: Any) -> bool:
    """Whether a call's target takes functions (`cond`, `while_loop`, …)."""
    return isinstance(target, torch._ops.HigherOrderOperator)


@functools.cache
def control_flow() -> tuple[Any, ...]:
    """The operators that run graphs as they are given to them: any callables would do."""
    from torch._higher_order_ops.map import map_impl
    from torch._higher_order_ops.scan import scan_op

    return torch.ops.higher_order.cond, torch.ops.higher_order.while_loop, map_impl, scan_op


def is_control_deps(target: Any) -> bool:
    """Whether a call is how AOTAutograd ties a stream's event to data (2.11 to 2.13)."""
    return is_higher_order(target) and getattr(target, "__name__", "") == "control_deps"


@contextlib.contextmanager
def replacements(gm: torch.fx.GraphModule) -> Iterator[dict[torch.fx.Node, str]]:
    """Which node's uses went to which other node, by name, while passes edit a graph (2.11 to
    2.13: FX keeps such hooks for torch.export)."""
    found: dict[torch.fx.Node, str] = {}

    def note(old: torch.fx.Node, new: str, user: torch.fx.Node) -> None:
        found[old] = new

    with gm._set_replace_hook(note):
        yield found


def is_functionalised(target: Any) -> bool:
    """Whether a call's target stands for a custom operator that writes its inputs."""
    higher = torch.ops.higher_order
    return target in (higher.auto_functionalized, higher.auto_functionalized_v2)


# --- torch.compile and export ---


def is_symbolic_tracing() -> bool:
    """Whether `torch.fx.symbolic_trace` is running the code."""
    from torch.fx._symbolic_trace import is_fx_symbolic_tracing

    return is_fx_symbolic_tracing()


def aot_backend(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    inference: Callable[..., Any],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> Callable[..., Any]:
    """A torch.compile backend from compilers of functional ATen graphs."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        decompositions=dict(decompositions),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        keep_inference_input_mutations=True,
    )


def unfaked() -> contextlib.AbstractContextManager[Any]:
    """Run operators on real constants inside a compiler that AOTAutograd called while faking."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def boxed(fn: Flat) -> Flat:
    """Mark a function as taking a list that it may empty, as AOTAutograd wants it."""
    fn._boxed_call = True  # type: ignore[attr-defined]
    return fn


def static_inputs() -> frozenset[int]:
    """Which inputs of the graph being compiled by torch.compile keep their address (weights)."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return frozenset(metadata.static_input_indices or ()) if metadata is not None else frozenset()


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """One compile at a time: tracing swaps a module's tensors and patches torch while it runs."""
    from torch._dynamo.convert_frame import compile_lock

    with compile_lock:
        yield


any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Run operators in the types they are given, whatever the caller's autocast says."""
    if not any_autocast():
        yield
        return
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def size_oblivious(on: bool) -> contextlib.AbstractContextManager[Any]:
    """Trace so that a dynamic size of 0 or 1 is not assumed away."""
    from torch.fx.experimental import _config

    patch: contextlib.AbstractContextManager[Any] = _config.patch(backed_size_oblivious=on)  # type: ignore[attr-defined]
    return patch


# --- Code generation ---


def inductor_options() -> frozenset[str]:
    from torch._inductor import list_options

    return frozenset(list_options())


def mode_options(mode: str) -> dict[str, Any]:
    """What Inductor turns on for a mode of torch.compile, its CUDA graphs left out."""
    from torch._inductor import list_mode_options

    options = list_mode_options().get(mode, {})
    return {k: v for k, v in options.items() if not k.startswith("triton.cudagraph")}


GRAPH_IDS = itertools.count()


def inductor_compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any],
    is_inference: bool,
    is_backward: bool,
    own: Callable[[Any], Any] = lambda constant: constant,
    onednn: bool = False,
) -> Flat:
    """Generate code for a graph decomposed as Inductor wants it; `gm` is changed.

    The same steps that `torch._inductor.compile_fx` takes behind AOTAutograd, from the point where
    the graph is functional and decomposed: its joint passes, freezing where weights are held, then
    `compile_fx_inner`. What is left of the constants after freezing goes through `own`.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx, config
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.utils import BoxedBool

    mode = fake_mode_of(inputs)
    frozen = is_inference and any("weight" in node.meta for node in gm.graph.nodes)
    settings = {"freezing": True, "freezing_discard_parameters": False} if frozen else {}
    with config.patch({**settings, **options}), tracing(TracingContext(mode)), _lazily():
        if is_inference:
            gm = joint_passes(gm, inputs)
        extra: dict[str, Any] = {}
        if frozen:
            gm, extra = freeze(gm, inputs, onednn)
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
                graph_id=next(GRAPH_IDS),
                is_inference=is_inference,
                is_backward=is_backward,
                **extra,
            )
        finally:
            mode.allow_non_fake_inputs = allow
            _forget_modules(loaded)
    # CompiledFxGraph.__call__ only adds a profiler range around this.
    return getattr(code, "current_callable", None) or code


def _forget_modules(first: int) -> None:
    """Inductor keeps every module it wrote, and in them the constants: no weight would be freed."""
    from torch._inductor.codecache import PyCodeCache

    for module in PyCodeCache.modules[first:]:
        if any(isinstance(value, Tensor) for value in vars(module).values()):
            PyCodeCache.modules.remove(module)
            sys.modules.pop(module.__name__, None)


def joint_passes(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    from torch._inductor.compile_fx import _recursive_joint_graph_passes as run
    from torch._inductor.virtualized import V

    with V.set_fake_mode(fake_mode_of(inputs)):
        if "input_device" in inspect.signature(run).parameters:  # torch >= 2.12
            return run(gm, input_device=_device(gm, inputs))
        return run(gm)


def freeze(
    gm: GraphModule, inputs: Sequence[Any], onednn: bool = False
) -> tuple[GraphModule, dict[str, Any]]:
    """Inductor's freezing: packed and folded weights, channels-last convolutions where they pay.

    With `onednn` that library packs the linears, as it does ahead of time, and not MKL.
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


@functools.cache
def is_intel() -> bool:
    """Whether the processor is one that MKL is written for."""
    try:
        with open("/proc/cpuinfo") as file:
            return "GenuineIntel" in file.read()
    except OSError:
        return "GenuineIntel" in platform.processor()


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


# --- TorchScript ---


def script_graph(script: Any, prepare: Callable[[Any, Any], None]) -> Any:
    """A private copy of forward's graph with every call (and fork) inlined and shapes erased;
    `prepare` sees it first, with the module that it is of."""
    graph = script.graph.copy()
    if isinstance(script, torch.jit.ScriptModule):
        prepare(graph, script._c)
    torch._C._jit_pass_inline(graph)
    torch._C._jit_pass_inline_fork_wait(graph)
    torch._C._jit_pass_erase_shape_information(graph)  # a trace's sizes must not become constants
    return graph


def fold_script(graph: Any) -> None:
    """Fold constants that are not tensors, drop dead branches and dead nodes, in place."""
    passes: Any = torch._C  # its stubs leave some passes out
    for _ in range(2):  # the second round sees the branches that the first one opened
        passes._jit_pass_constant_propagation_immutable_types(graph)
        torch._C._jit_pass_peephole(graph, True)  # True: nothing that depends on shapes
        torch._C._jit_pass_dce(graph)


def script_attribute(module: Any, name: str) -> Any:
    """An attribute of a ScriptModule, even one that a Python property of the same name hides."""
    return getattr(module, "_c", module).getattr(name)


def is_script_module(value: Any) -> bool:
    """Whether an attribute is a submodule."""
    return isinstance(value, (torch.jit.ScriptModule, torch._C.ScriptModule))


def script_schema(script: Any) -> Any:
    """The signature of forward; a ScriptModule's has `self` first."""
    function = isinstance(script, torch.jit.ScriptFunction)
    return script.schema if function else script._c._get_method("forward").schema


def parse_schema(text: str) -> Any:
    """The schema object of its text."""
    return torch._C.parse_schema(text)


# --- Operators ---

below_autograd: Any = torch._C._AutoDispatchBelowAutograd
is_alias: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad
in_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active
private_device: Callable[[], str] = torch._C._get_privateuse1_backend_name

# torch.autograd.Function less its detour around functorch: it makes a node at one level of
# torch.func's transforms, which is what an Autograd kernel is called for.
OneLevel: Any = torch.autograd.function._SingleLevelFunction


def one_level() -> contextlib.AbstractContextManager[Any]:
    """Let `OneLevel.apply` run inside torch.func's transforms."""
    from torch._functorch.utils import enable_single_level_autograd_function

    return enable_single_level_autograd_function()


def in_forward_mode() -> bool:
    """Whether forward-mode derivatives (`torch.func.jvp`, `dual_level`) are being computed."""
    return torch.autograd.forward_ad._current_level >= 0


def seeing(see: Callable[[Any], None]) -> contextlib.AbstractContextManager[Any]:
    """Show `see` every operator that is called inside, before it runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            see(func)
            return func(*args, **(kwargs or {}))

    return Seeing()  # type: ignore[no-untyped-call]


def drop_library(library: torch.library.Library) -> None:
    """Take back everything that was registered through a library."""
    library._destroy()  # type: ignore[no-untyped-call]
    forget_dropped()


def forget_dropped() -> None:
    """Take operators that are gone out of the table by which TorchScript knows operators.

    torch leaves them there by their `id`, which the next Python object may have: a list that
    a module holds is then read as an operator, and scripting the module fails.
    """
    from torch.jit import _builtins

    table = _builtins._get_builtin_table()  # type: ignore[no-untyped-call]
    for key, name in list(table.items()):
        namespace, _, op = name.partition("::")
        if namespace not in ("aten", "prim") and op not in vars(getattr(torch.ops, namespace)):
            del table[key]


def name_in_script(value: Any, name: str | None) -> None:
    """Let TorchScript read a Python object as the operator of this name (None: no longer)."""
    from torch.jit import _builtins

    if name is None:
        _builtins._get_builtin_table().pop(id(value), None)  # type: ignore[no-untyped-call]
    else:
        _builtins._register_builtin(value, name)


def below_select() -> Any:
    """What a BackendSelect kernel masks its keys with, to run the next kernel."""
    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def parse_ir(text: str) -> Any:
    """The graph of TorchScript IR text; `RuntimeError` quotes the place where it is wrong."""
    return torch._C.parse_ir(text)


def schemas_of(kind: str) -> list[str]:
    """The overloads of an operator such as `aten::mul`."""
    return [str(schema) for schema in torch._C._jit_get_schemas_for_operator(kind)]


def operator_names() -> set[str]:
    """Every operator's name, without overloads."""
    return {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}


def mark_static(tensor: Tensor, dim: int) -> None:
    """Let torch.compile take each size of a dim for a fixed one (torch 2.11 to 2.13)."""
    import torch._dynamo

    torch._dynamo.mark_static(tensor, dim)


def register_backend(name: str, compiler: Callable[..., Any]) -> None:
    """Let `torch.compile(backend=name)` find a compiler; one of that name stays (2.11 to 2.13)."""
    from torch._dynamo.backends import registry

    if name not in registry._COMPILER_FNS:
        registry.register_backend(compiler, name=name)


def register_device(name: str, module: ModuleType) -> None:
    """Make `module` what `torch.<name>` is; part of torch's interface for devices of others."""
    register: Any = torch._register_device_module  # untyped in torch
    register(name, module)


def drop_fake(name: str) -> None:
    """Forget the fake of an op, so that its Meta kernel decides. Torch 2.4 to 2.13."""
    torch._library.simple_registry.singleton.find(name).fake_impl.kernels.clear()


def foreign_device() -> str:
    """The name of the device that another package brings, which Inductor knows nothing of."""
    return str(torch._C._get_privateuse1_backend_name())
