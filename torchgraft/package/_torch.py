"""AOTInductor, which is private to torch: regions as shared libraries. torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from torchgraft import _torch


def aot_compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any],
    path: str,
    folded: Callable[[GraphModule, Node, Tensor], None],
) -> dict[str, Tensor]:
    """`inductor_compile` for inference into a shared library at `path`, which holds no constants.

    Gives the tensors that are to be bound to it, by the library's names. No code depends on their
    values, only on what their types say; `folded` is told how each folded one came about.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx, config
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    mode = _torch.fake_mode_of(inputs)
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
        _watched_folds(folded),
        _watched_constants(constants),
    ):
        gm = _without_values(gm, inputs)
        extra: dict[str, Any] = {}
        if frozen:
            gm, extra = _torch.freeze(gm, inputs)
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
                graph_id=next(_torch.GRAPH_IDS),
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
    gm = _torch.joint_passes(gm, [*inputs, *values[len(inputs) :]])
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


def aot_load(path: str, device: torch.device, constants: Mapping[str, Tensor]) -> _torch.Flat:
    """The function of a library that `aot_compile` made, with its constants bound, not copied."""
    from torch._C import _aoti

    runner: Any
    if device.type == "cuda":
        runner = _aoti.AOTIModelContainerRunnerCuda(path, 1, str(device), "")
    else:
        runner = _aoti.AOTIModelContainerRunnerCpu(path, _CONTEXTS)
    if constants:
        aliases = {name: tensor.detach() for name, tensor in constants.items()}
        runner.update_constant_buffer(aliases, False, True, True)
        weakref.finalize(runner, _empty, list(aliases.values()))
    return runner.run  # type: ignore[no-any-return]


def _empty(aliases: Sequence[Tensor]) -> None:
    """Let go of what constants refer to. A container keeps a handle of each that it never frees
    (`MaybeOwningAtenTensorHandle`, torch 2.11 to 2.13), so that the weights would stay for good."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.no_grad():  # garbage may be collected in a trace
        for alias in aliases:
            if alias.layout == torch.strided:
                alias.set_()  # type: ignore[call-overload]
            else:
                alias.data = torch.zeros(1).to_mkldnn()


_CONTEXTS = 4
"""How many calls of one CPU region run at the same time; the others wait."""


# --- Sizes ---


def is_size(mode: Any, number: Any) -> bool:
    """Whether an integer, which may be symbolic, is never negative."""
    if isinstance(number, int):
        return number >= 0
    return bool(mode.shape_env.bound_sympy(_torch.expression(number)).lower >= 0)


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


# --- Trees ---


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


def fake(
    mode: Any, shape: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A fake tensor whose sizes may be expressions."""
    sizes, steps = ([_number(mode.shape_env, part) for part in both] for both in (shape, stride))
    with mode, _torch.quiet_guards(mode):
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


def inductor_settings() -> str:
    """A hash of Inductor's global settings."""
    from torch._inductor import config

    return str(config.get_hash().hex())
