"""Front ends: any program becomes one functional ATen graph with its inputs described.

`nn.Module`, functions and GraphModules go through torch.export; TorchScript becomes a module first
(`fx/script`), an ExportedProgram is taken as it is. torch.compile has its own door (`backend`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import operator
import re
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Interpreter, Node, traceback

from torchgraft import _torch
from torchgraft._torch import groups, sizes
from torchgraft.errors import CannotCapture, Specialised, first_line
from torchgraft.fx import dialect, mark, meta
from torchgraft.fx.decompose import Parts, inline, parts_of
from torchgraft.inputs import Declared
from torchgraft.signature import ConstSpec, Signature, Spec, TensorSpec, span

aten = torch.ops.aten


@dataclasses.dataclass
class Capture:
    """A program as a graph.

    Placeholders are the tensor inputs in order, then the states: tensors that the program reads
    from the module at each call (every weight when not frozen, and buffers it writes).
    """

    gm: GraphModule
    signature: Signature
    states: dict[str, Tensor]  # by name in the state dict, in placeholder order
    weights: dict[str, Weight]  # the frozen ones, by name in the state dict
    constants: dict[str, Any]  # what else the graph's get_attr nodes name
    saved: frozenset[str]  # every name in the state dict (non-persistent buffers have none)
    choice: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of max-autotune


@dataclasses.dataclass(frozen=True)
class Weight:
    """A frozen weight: the attribute of the graph's module, its type (a fake tensor), and where its
    values are."""

    attribute: str
    value: Tensor
    origin: Origin


class Origin:
    """A tensor, which may be somebody else's, and whether it still is what it was."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # which counts writes to the tensor as its own
        self._writes = self._count()

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was written to."""
        return self._count() != self._writes

    def _count(self) -> int:
        return 0 if self.tensor.is_inference() else self.tensor._version


def capture(
    model: Any,
    declared: Declared,
    *,
    freeze: bool,
    keep: Collection[Any] = (),
    own: dialect.Table = MappingProxyType({}),
) -> Capture:
    """Export a module (or a function) for one declared call, in our dialect."""
    module = model if isinstance(model, torch.nn.Module) else _Function(model)
    for name, leaf in zip(
        declared.names, _torch.flatten((declared.args, declared.kwargs))[0], strict=True
    ):
        if isinstance(leaf, Tensor) and leaf.is_nested:
            raise CannotCapture(
                _title(module),
                f"input {name!r} is a nested tensor",
                None,
                "Pad it (torch.nested.to_padded_tensor), or use torch.compile(model, "
                "backend='torchgraft').",
            )
    if isinstance(module, GraphModule) and mark.is_marked(module):
        module = _interpreted(module)
    # A dynamic size, or one computed from it (`x[1:]`), may be 0 or 1; do not assume it is not.
    dynamic = any(low != high for r in declared.ranges if r for low, high in r)
    with _torch.compiling(), _torch.size_oblivious(dynamic), _torch.lazily():
        exported = _export(module, declared)
        captured = from_exported(exported, freeze=freeze, declared=declared, keep=keep, own=own)
    captured.gm.meta["dynamic"] = dynamic
    _check_squeezes(captured.gm)
    return captured


class _Function(torch.nn.Module):
    """A function as a module. torch.export keeps the source lines of code named `forward` only,
    so a Python function runs under that name."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = fn
        self.name = getattr(fn, "__name__", type(fn).__name__)
        if isinstance(fn, types.FunctionType):
            code = fn.__code__.replace(co_name="forward")
            self.forward = copied = types.FunctionType(
                code, fn.__globals__, "forward", fn.__defaults__, fn.__closure__
            )
            copied.__kwdefaults__ = fn.__kwdefaults__
        elif inspect.isbuiltin(fn):  # it has no signature, which torch.export asks for
            self.forward = lambda *args, **kwargs: fn(*args, **kwargs)


def _interpreted(gm: GraphModule) -> GraphModule:
    """The same module run node by node: what a trace makes of a node then keeps its marks."""
    signature = inspect.signature(gm.forward)

    def forward(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        with traceback.preserve_node_meta():
            return Interpreter(self).run(*given.args)

    me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    full = signature.replace(parameters=[me, *signature.parameters.values()])
    forward.__signature__ = full  # type: ignore[attr-defined]
    twin = copy.copy(gm)
    twin.__class__ = type(type(gm).__name__, (type(twin),), {"forward": forward})
    return twin


def _export(module: torch.nn.Module, declared: Declared) -> ExportedProgram:
    def export(strict: bool) -> ExportedProgram:
        if strict:
            import torchgraft.comm.trace  # noqa: F401 (what broadcast, send and recv mean)
        # Put off, what Dynamo traces would keep torch's own `broadcast` (torch 2.13).
        with torch.no_grad(), warnings.catch_warnings(), _torch.lazily(not strict):
            warnings.simplefilter("ignore")
            return torch.export.export(
                module,
                declared.args,
                declared.kwargs,
                dynamic_shapes=declared.dynamic,
                strict=strict,
            )

    groups.export_shards()
    try:
        exported = export(strict=False)
        if any(getattr(n.target, "namespace", "") == "c10d" for n in exported.graph.nodes):
            return export(strict=True)  # Dynamo knows more collectives, such as `send`
        if any(n.op == "get_attr" for n in exported.graph.nodes):
            with traceback.preserve_node_meta():  # else branches lose the blocks in them
                exported = export(strict=False)
            mark.forget_foreign(exported.graph_module)
        return exported
    except Exception as error:
        if "ScriptObject" in str(error):  # here, too: `broadcast`
            with contextlib.suppress(Exception):
                return export(strict=True)
        raise _cannot(_title(module), error, declared) from error


def _title(module: torch.nn.Module) -> str:
    return module.name if isinstance(module, _Function) else type(module).__name__


_NOT_USERS = ("torch", "torchgraft", "sympy", "typing_extensions")


def _cannot(program: str, error: Exception, declared: Declared) -> CannotCapture:
    trace = error.__traceback__
    line = None
    while trace is not None:
        code = trace.tb_frame.f_code
        module = str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]
        if module not in _NOT_USERS and not code.co_filename.startswith("<"):
            line = f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    fix = (
        "Use torch.compile(model, backend='torchgraft'), which keeps such code in Python, or "
        "write the branch with torch.cond / torch.where."
        if "data-dependent" in str(error) or "DataDependent" in type(error).__name__
        else "See the chained exception; torch.compile(model, backend='torchgraft') takes more "
        "programs, because it may leave part of one in Python."
    )
    if "size of tensor" in str(error) and (traced := declared.traced_sizes()):
        fix = (
            f"It was traced with {traced}. Where a program ties sizes together, declare sizes to "
            f"trace with that fit: graft.Input(min_shape=..., max_shape=..., example=...)."
        )
    if "not a known type" in str(error):
        fix = (
            "Tell torch what the class holds: torch.export.register_dataclass. For the cache of a "
            "Hugging Face model, pass use_cache=False, or call "
            "transformers.integrations.executorch.register_dynamic_cache_export_support() first."
        )
    if "group cannot be None" in str(error) or "process group has not been init" in str(error):
        fix = "Start it with torchrun and call torch.distributed.init_process_group() first."
    return CannotCapture(program, first_line(error), line, fix)


def from_exported(
    exported: ExportedProgram,
    *,
    freeze: bool,
    declared: Declared | None = None,
    keep: Collection[Any] = (),
    own: dialect.Table = MappingProxyType({}),
) -> Capture:
    """An exported program as a Capture: in our dialect, weights and mutations made explicit.

    Operators in `keep` are not decomposed, those in `own` by these functions.
    """
    # A composite operator to keep may lie inside another one, where only torch.export can keep it.
    nested = any(map(_torch.is_composite, keep))
    shards = {name: groups.shard_of(held) for name, held in exported.state_dict.items()}
    sharded = {name: shard for name, shard in shards.items() if shard is not None}
    whole = nested or sharded
    parts = None if whole else parts_of(exported.graph, dialect.decompositions(keep, own))
    if parts is None:
        with warnings.catch_warnings(), sizes.unguarded(exported):
            warnings.simplefilter("ignore")
            exported = exported.run_decompositions(dialect.export_decompositions(keep, own))
    return _Unlift(exported, freeze, declared, parts or {}, sharded).run()


_SHARD = re.compile(r"(^|.*\.)parametrizations\.(\w+)\.original0")


class _Unlift:
    """Copies an exported graph: weights become constants or states, mutations become `copy_`."""

    def __init__(
        self,
        exported: ExportedProgram,
        freeze: bool,
        declared: Declared | None,
        parts: Parts,
        shards: Mapping[str, Tensor],
    ) -> None:
        self.shards = shards  # this rank's part of each weight that is a DTensor
        self.exported, self.freeze, self.declared, self.parts = exported, freeze, declared, parts
        self.signature = exported.graph_signature
        self.root = torch.nn.Module()
        self.graph = Graph()
        self.env: dict[Node, Any] = {}
        self.states: dict[str, Tensor] = {}
        self.weights: dict[str, Weight] = {}
        self.constants: dict[str, Any] = {}
        self.state_nodes: dict[str, Node] = {}
        placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
        self.inputs = list(zip(placeholders, self.signature.input_specs, strict=True))
        user = [n.name for n, s in self.inputs if s.kind is InputKind.USER_INPUT]
        self.names = declared.names if declared is not None else tuple(user)
        self.written = {
            spec.target
            for spec in self.signature.output_specs
            if spec.kind is not OutputKind.USER_OUTPUT
        }

    def run(self) -> Capture:
        specs = self._user_inputs()
        self._weights()
        for node in self.exported.graph.nodes:
            if node.target is torch.ops.higher_order.with_effects:
                self._effect(node)
            elif node.op == "call_function" and node not in self.env:
                self.env[node] = self.graph.node_copy(node, self.env.__getitem__)
            elif node.op == "get_attr":  # a branch of cond, while_loop, …
                self._hold(node.target, getattr(self.exported.graph_module, node.target))
                self.env[node] = self.graph.node_copy(node, self.env.__getitem__)
        self.graph.output(tuple(self._outputs()))
        gm = _torch.graph_module(self.root, self.graph)
        values = [n.meta.get("val") for n in self.exported.graph.nodes]
        gm.meta["fake_mode"] = mode = _torch.fake_mode_of(
            v for v in values if isinstance(v, Tensor)
        )
        for node in gm.graph.nodes:
            if node.op == "get_attr" and "val" not in node.meta:
                node.meta["val"] = meta.compute(gm, node)
        # The weights are the module's own still; what is left of them in the end is copied.
        weights = [getattr(self.root, weight.attribute) for weight in self.weights.values()]
        gm.meta["borrowed"] = meta.addresses(weights)
        inline(gm, {self.env[node]: part for node, part in self.parts.items()}, mode)
        gm.graph.eliminate_dead_code()
        held = {str(node.target): node for node in gm.graph.find_nodes(op="get_attr")}
        self.constants |= {  # what decompositions made
            name: getattr(gm, name) for name, node in held.items() if "weight" not in node.meta
        }
        dialect.canonicalise(gm)
        if self.declared is not None:
            check_dynamic(specs, self.declared.ranges, gm)
        symbols = {s for v in values for s in _torch.symbols_of(v)}
        signature = Signature(
            tuple(specs),
            self.exported.call_spec.in_spec,
            self.exported.call_spec.out_spec,
            {str(s): _torch.symbol_range(mode, s) for s in symbols},
        )
        saved = frozenset(map(self._name, self.exported.state_dict))
        return Capture(gm, signature, self.states, self.weights, self.constants, saved)

    def _user_inputs(self) -> list[Spec]:
        specs: list[Spec] = []
        user = [(n, s) for n, s in self.inputs if s.kind is InputKind.USER_INPUT]
        for name, (node, spec) in zip(self.names, user, strict=True):
            value = node.meta.get("val")
            if not isinstance(value, Tensor):
                self.env[node] = value
                specs.append(ConstSpec(name, value))
                continue
            self._placeholder(node)
            sizes = tuple(_torch.expression(s) for s in value.shape)
            static = all(isinstance(s, int) for s in sizes)
            stride = tuple(value.stride()) if static and not value.is_contiguous() else None
            written = spec.arg.name in self.written
            format = _torch.format_of(value) if not static else torch.contiguous_format
            kind = (value.dtype, value.device, stride, written, format, value.layout)
            specs.append(TensorSpec(name, sizes, *kind))
        return specs

    def _weights(self) -> None:
        for node, spec in self.inputs:
            if spec.kind in (InputKind.USER_INPUT, InputKind.TOKEN):
                continue
            if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                raise CannotCapture(
                    "the program",
                    f"input {node.name!r} is a {spec.kind.name.lower()}",
                    None,
                    "Objects cannot be compiled ahead of time; use "
                    "torch.compile(model, backend='torchgraft').",
                )
            target = str(spec.target)
            name = self._name(target)
            tensor = self._held(target).detach()
            constant = spec.kind is InputKind.CONSTANT_TENSOR
            if target in self.written or not (self.freeze or constant):
                self.state_nodes[target] = self._placeholder(node)
                self.states[name] = tensor
                continue
            constant = constant or target not in self.exported.state_dict  # a non-persistent buffer
            if constant:
                attribute = f"_constant_{node.name}"
                self._hold(attribute, tensor.clone())
            else:
                attribute = f"_weight{len(self.weights)}"
                self.root.register_buffer(attribute, tensor)
                origin = Origin(self._held(target))
                self.weights[name] = Weight(attribute, node.meta["val"], origin)
            copied = self.graph.create_node("get_attr", attribute, name=node.name)
            copied.meta = {"val": node.meta["val"], **({} if constant else {"weight": name})}
            self.env[node] = copied

    def _effect(self, node: Node) -> None:
        """`with_effects(token, op, …)` is the call itself: our graphs keep the order of effects."""
        given: Any = torch.fx.node.map_arg(node.args, self.env.get)
        _, op, *args = given
        call = self.graph.call_function(op, tuple(args), node.kwargs)
        call.meta = {**node.meta, "val": node.meta["val"][1:]}
        single = len(op._schema.returns) == 1
        for part in node.users:
            index: Any = part.args[1]
            if index and single:
                self.env[part] = call
                call.meta["val"] = part.meta["val"]
            elif index:
                self.env[part] = self.graph.call_function(operator.getitem, (call, index - 1))
                self.env[part].meta = dict(part.meta)
            else:
                self.env[part] = None

    def _hold(self, attribute: str, value: Any) -> None:
        self.constants[attribute] = value
        if isinstance(value, Tensor):
            self.root.register_buffer(attribute, value)
        else:
            setattr(self.root, attribute, value)

    def _name(self, target: str) -> str:
        """A weight's name in the model; torch.export renames those that are DTensors."""
        plain = _SHARD.sub(r"\1\2", target)
        return plain if plain in self.shards else target

    def _held(self, name: str) -> Tensor:
        if (shard := self.shards.get(self._name(name))) is not None:
            return shard
        held: Tensor | None = self.exported.state_dict.get(name)
        if held is None:
            held = self.exported.constants[name]
        assert held is not None
        return held

    def _placeholder(self, node: Node) -> Node:
        copied = self.graph.node_copy(node, self.env.__getitem__)
        self.env[node] = copied
        return copied

    def _outputs(self) -> Iterator[Any]:
        """The user's outputs; what was computed for written inputs is copied into them."""
        *_, output = self.exported.graph.nodes
        by_name = {n.name: self.env[n] for n, _ in self.inputs if n in self.env}
        rebased: dict[Node, Node] = {}
        for value, spec in zip(output.args[0], self.signature.output_specs, strict=True):
            if spec.kind in (OutputKind.USER_OUTPUT, OutputKind.TOKEN):
                continue
            target = self.state_nodes.get(str(spec.target)) or by_name[str(spec.target)]
            source = self.env[value]
            if source.meta["val"].shape != target.meta["val"].shape:
                raise CannotCapture(
                    "the program",
                    f"input {target.name!r} changes its shape in place (t_, resize_, …)",
                    meta.source_line(source),
                    "Give the new tensor back instead.",
                )
            copy = self.graph.call_function(aten.copy_.default, (target, source))
            copy.meta["val"] = target.meta["val"]
            rebased[source] = target
        for value, spec in zip(output.args[0], self.signature.output_specs, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                yield self._rebase(self.env[value], rebased) if isinstance(value, Node) else value

    def _rebase(self, node: Node, rebased: dict[Node, Node]) -> Node:
        """What a caller sees of a written input is the input itself, or the same view of it."""
        source = node.args[0] if dialect.is_view(node) and node.args else None
        if node not in rebased and isinstance(source, Node):
            base = self._rebase(source, rebased)
            if base is not source:
                rebased[node] = self.graph.node_copy(node, lambda n: base if n is source else n)
        return rebased.get(node, node)


def check_dynamic(
    specs: Sequence[Spec],
    declared: Sequence[tuple[tuple[int, int | None], ...] | None],
    gm: GraphModule,
) -> None:
    """Raise where a program does not work for all of the sizes that were declared."""
    for spec, ranges in zip(specs, declared, strict=True):
        if ranges is None or not isinstance(spec, TensorSpec):
            continue
        for dim, (size, (low, high)) in enumerate(zip(spec.shape, ranges, strict=True)):
            if low == high:
                continue
            if isinstance(size, int):
                raise Specialised(spec.name, dim, span(low, high), str(size))
            least, most = _torch.symbol_range(gm.meta["fake_mode"], size)
            if least > low or (most is not None and (high is None or most < high)):
                raise Specialised(spec.name, dim, span(low, high), span(least, most))


def _check_squeezes(gm: GraphModule) -> None:
    """Refuse to squeeze a dim that is 1 at some declared sizes only: it was traced as not 1."""
    for node in gm.graph.nodes:
        if node.target not in (aten.squeeze.dims, aten.squeeze.dim, aten.squeeze.default):
            continue
        shape = node.args[0].meta["val"].shape
        dims = node.args[1] if len(node.args) > 1 else range(len(shape))
        for dim in [dims] if isinstance(dims, int) else dims:
            if _torch.may_be(gm.meta["fake_mode"], shape[dim], 1):
                raise CannotCapture(
                    node.name,
                    f"it squeezes dim {dim}, whose size {shape[dim]} may be 1 or not, so the rank "
                    f"of the result is not known",
                    meta.source_line(node),
                    "Declare sizes that leave out 1 (or are 1), use gears=[...], or write x[0].",
                )
