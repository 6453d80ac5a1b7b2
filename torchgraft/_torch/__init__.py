"""The only folder that imports private torch: one function per need, torch 2.11 to 2.13.

Everything else in torchgraft speaks public torch. When a torch release moves one of these, this
is the one place to mend; each function says what it gives, not how torch spells it. Inductor has a
file of its own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
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


def dump_tree(spec: Any) -> str:
    """torch's text of the structure of registered classes."""
    return pytree.treespec_dumps(spec)


def parse_tree(text: str) -> Any:
    """An object of the structure of a text, with `*` for leaves. The classes are those that are
    registered already; an enum would import its module, so it is refused."""
    if "__enum__" in text:
        raise ValueError("an enum")
    spec = pytree.treespec_loads(text)
    return pytree.tree_unflatten(["*"] * spec.num_leaves, spec)


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


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor's values can be read: none of a trace can, nor those of a meta tensor."""
    from torch._subclasses.fake_tensor import is_fake

    return not (tensor.is_meta or is_fake(tensor))


@contextlib.contextmanager
def faking(mode: Any) -> Iterator[None]:
    """Run operators on fake tensors, real constants allowed, no new symbols recorded.

    By the decompositions that torch has in Python: those in C++ (`upsample_nearest2d.vec`) ask for
    sizes as numbers, and a dynamic one would become fixed.
    """
    from torch._dispatch.python import enable_python_dispatcher

    allow, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    fresh = (
        mode.shape_env.ignore_fresh_unbacked_symbols()
        if mode.shape_env is not None
        else contextlib.nullcontext()
    )
    try:
        with mode, fresh, torch.no_grad(), enable_python_dispatcher():
            yield
    finally:
        mode.allow_non_fake_inputs = allow


def symbols_of(value: Any) -> set[Any]:
    """The free symbols (sympy) in a tensor's sizes and strides, or in a symbolic number."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    return set(free_symbols(value)) if isinstance(value, (Tensor, *SYMBOLIC)) else set()


def unbacked(value: Any) -> set[Any]:
    """The symbols of sizes in a value that only data tells."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return set(free_unbacked_symbols(value)) if isinstance(value, (Tensor, *SYMBOLIC)) else set()


def has_unbacked(value: Any) -> bool:
    """Whether a size depends on data (`nonzero`, `item`), so that it is known only when run."""
    return bool(unbacked(value))


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


def is_size(mode: Any, number: Any) -> bool:
    """Whether an integer, which may be symbolic, is never negative."""
    if isinstance(number, int):
        return number >= 0
    return bool(mode.shape_env.bound_sympy(expression(number)).lower >= 0)


@functools.cache
def size_functions() -> dict[str, Any]:
    """The functions that an expression of sizes is made of, by the names that a file has."""
    import sympy  # type: ignore[import-untyped]
    from torch.utils._sympy import functions as own

    plain = (sympy.Add, sympy.Mul, sympy.Pow, sympy.And, sympy.Or, sympy.Not, sympy.Rational)
    found: dict[str, Any] = {function.__name__: function for function in plain}
    found |= {"Eq": sympy.Eq, "Ne": sympy.Ne, "Lt": sympy.Lt, "Le": sympy.Le}
    found |= {"Gt": sympy.Gt, "Ge": sympy.Ge, "Max": own.Max, "Min": own.Min}
    whole = (own.Mod, own.PythonMod, own.FloorDiv, own.CleanDiv, own.CeilDiv, own.IntTrueDiv)
    return found | {function.__name__: function for function in (*whole, own.PowByNatural)}


def size_symbol(name: str) -> Any:
    import sympy

    return sympy.Symbol(name, integer=True, nonnegative=True)


def fake(
    mode: Any, shape: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A fake tensor whose sizes may be expressions."""
    sizes, steps = ([_number(mode.shape_env, part) for part in both] for both in (shape, stride))
    with mode, quiet_guards(mode):
        return torch.empty_strided(sizes, steps, dtype=dtype, device=device)


def _number(env: Any, expr: Any) -> Any:
    """A symbolic size that is known by its expression only."""
    from torch.utils._sympy.value_ranges import ValueRanges

    if isinstance(expr, int):
        return expr
    for symbol in expr.free_symbols:
        env.var_to_range.setdefault(symbol, ValueRanges(0, 2**31))
    hint = int(expr.subs(dict.fromkeys(expr.free_symbols, 2)))
    return env.create_symintnode(expr, hint=hint)


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


def lazily(on: bool = True) -> contextlib.AbstractContextManager[None]:
    """Make `graph_module`s only, whoever makes them."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(on)


def retrace(
    fn: Callable[..., Any], inputs: Sequence[Any], table: Mapping[Any, Callable[..., Any]]
) -> GraphModule:
    """Trace `fn` on fake inputs, decomposing by `table`; `meta["original_aten"]` is what a node is
    part of."""
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = fake_mode_of(inputs)
    origin = torch.fx.traceback.preserve_node_meta()
    with faking(mode), lazily(), origin:
        return make_fx(fn, decomposition_table=dict(table))(*inputs)


def trace(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    mode: Any,
    table: Mapping[Any, Callable[..., Any]],
) -> GraphModule:
    """`retrace` of code that somebody wrote: writes in place become new values, and composite
    operators are taken apart as AOTAutograd does it."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    with faking(mode), _silent("torch._subclasses.fake_tensor"):
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
    """Whether Inductor calls ATen's kernel for an operator and writes none (2.11 to 2.13).

    Not whether it ever did so in this process, which is what its set of fallbacks says.
    """
    from torch._inductor import lowering

    lowered = lowering.lowerings.get(target)
    if lowered is None:
        return target not in inductor_decompositions()
    return getattr(lowered, "_is_fallback_handler", False)


def is_composite(target: Any) -> bool:
    """Whether an operator is made of others before autograd sees it (`linear`, `matmul`, …)."""
    try:
        return is_op(target) and target._can_decompose()
    except RuntimeError:  # one of TorchScript's own (`sub.int`), or one whose library is gone
        return False


def is_packet(target: Any) -> bool:
    """Whether a target is an operator with its overload left open."""
    return isinstance(target, torch._ops.OpOverloadPacket)


def parts_of_custom_op(value: Any) -> tuple[Any, ...] | None:
    """The name, schema, body and fake of what `torch.library.custom_op` made; None: it did not."""
    from torch._library.custom_ops import CustomOpDef

    if not isinstance(value, CustomOpDef):
        return None
    return (value._qualname, value._schema, value._init_fn, value._abstract_fn)


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
