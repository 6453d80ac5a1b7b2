"""TorchScript front end: a ScriptModule becomes an nn.Module whose forward is Python source.

The source is generated from the IR, so `torch.export` and `torch.compile` trace it like code that
somebody wrote. TorchScript is deprecated upstream; this file and `script_ops.py` are all there is
to remove.
"""

from __future__ import annotations

import builtins
import itertools
import keyword
import linecache
import math
import re
import sys
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchgraft import _torch
from torchgraft.errors import UnsupportedScript
from torchgraft.fx import script_ops as ops

Value = Any  # torch.Value, Node and Block: pybind classes without stubs worth the name
Node = Any
Block = Any

_serial = itertools.count()
_FOREVER = 2**63 - 1  # the trip count of a while loop


@dataclass(frozen=True)
class Branch:
    """Control flow that is left for run time, and what it hangs on."""

    kind: Literal["if", "loop"]
    line: str
    on: Literal["data", "argument", "shape"]


@dataclass(frozen=True)
class Translated:
    """The module, its source, and the control flow that a tracer will meet in it.

    The module has the ScriptModule's parameter and buffer names and holds the very same tensors.
    A loop that counts to a constant is not in `branches`: it unrolls, whatever the inputs.
    """

    module: nn.Module
    source: str
    branches: tuple[Branch, ...]


def to_module(script: Any) -> Translated:
    """An ordinary module that computes what the ScriptModule (or ScriptFunction) computes.

    `training` and other plain attributes are read now and are constants from here on. Sizes in
    a trace are computed as Python numbers, so what the trace kept dynamic stays dynamic.

    >>> double = torch.jit.trace(lambda x: x + x, torch.ones(1))
    >>> to_module(double).module(torch.ones(1))
    tensor([2.])
    """
    if not hasattr(script, "forward" if isinstance(script, torch.jit.ScriptModule) else "graph"):
        name = getattr(script, "original_name", type(script).__name__)
        raise UnsupportedScript(name, "", "it has no forward; script a module that calls it")
    graph = _torch.script_graph(script)
    root = _Tree(None if isinstance(script, torch.jit.ScriptFunction) else script)
    root.bind(graph)
    _torch.fold_script(graph)
    return _Emitter(graph, root, _torch.script_schema(script)).translate()


def line_of(node: Node) -> str:
    """`file:line` of the user's source, or nothing; safe to put in a comment."""
    for text in node.sourceRange().split("Serialized "):  # of a loaded one, the original is first
        for pattern in (r'File "([^"\n]+)", line (\d+)', r"(?m)^(\S[^\n]*)\((\d+)\): "):
            found = re.search(pattern, text)
            if found:
                return re.sub(r"[^\w./<> -]", "?", found[1], flags=re.ASCII) + ":" + found[2]
    return ""


def walk(block: Block) -> Iterator[Node]:
    """Every node, outer ones first."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from walk(inner)


def is_name(text: str) -> bool:
    """Whether the IR's name can stand in Python source, and reaches nothing of Python's own."""
    return (
        text.isascii()
        and text.isidentifier()
        and not keyword.iskeyword(text)
        and not (text.startswith("__") and text.endswith("__"))
    )


def is_tensor(value: Value) -> bool:
    """A tensor, or an optional one."""
    kind = value.type()
    kind = kind.getElementType() if kind.kind() == "OptionalType" else kind
    return bool(kind.kind() == "TensorType")


def constant(value: Value) -> bool:
    """Whether the graph itself holds the value."""
    return bool(value.node().kind() == "prim::Constant")


class _Tree:
    """The modules, parameters and buffers, under the names that the ScriptModule gave them."""

    def __init__(self, script: Any) -> None:
        self.script = script
        self.paths: dict[int, tuple[str, ...]] = {}  # of values that are modules
        self.written: set[tuple[tuple[str, ...] | None, str]] = set()
        self.held: set[tuple[tuple[str, ...], str]] = set()
        self.name = re.sub(r"\W", "_", getattr(script, "original_name", "") or "Script")
        self.root = nn.Module()
        if script is None:
            return
        for path, module in script.named_modules(remove_duplicate=False):
            scope = path.split(".") if path else []
            self.at(tuple(scope)).training = getattr(module, "training", False)
        for path, tensor in script.named_parameters(remove_duplicate=False):
            if not tensor.is_leaf:  # deepcopy of a ScriptModule leaves such parameters
                tensor = nn.Parameter(tensor.detach(), tensor.requires_grad)
            elif not isinstance(tensor, nn.Parameter):
                tensor.__class__ = nn.Parameter  # a loaded one is a bare Tensor in Python
            *scope, leaf = path.split(".")
            self.at(tuple(scope)).register_parameter(self.leaf(leaf), tensor)
        for path, tensor in script.named_buffers(remove_duplicate=False):
            *scope, leaf = path.split(".")
            self.at(tuple(scope)).register_buffer(self.leaf(leaf), tensor)

    @staticmethod
    def leaf(name: str) -> str:
        """The name, unless it would hide something that nn.Module needs."""
        if hasattr(nn.Module(), name) or name.startswith("__"):
            raise UnsupportedScript("attribute", "", f"the name {name!r} is taken by nn.Module")
        return name

    def at(self, path: tuple[str, ...]) -> nn.Module:
        """The module of a path, made if it is not there yet."""
        module = self.root
        for name in path:
            if name not in module._modules:
                module.add_module(self.leaf(name), nn.Module())
            module = module.get_submodule(name)
        return module

    def original(self, path: tuple[str, ...]) -> Any:
        """The ScriptModule of a path."""
        module = self.script
        for name in path:
            module = _torch.script_attribute(module, name)
        return module

    def bind(self, graph: Any) -> None:
        """Find what each module-valued value is, and make constants of plain attributes."""
        if self.script is not None:
            self.paths[next(graph.inputs()).unique()] = ()
        nodes = list(walk(graph))
        for node in nodes:
            if node.kind() == "prim::GetAttr" and node.input().unique() in self.paths:
                path = (*self.paths[node.input().unique()], node.s("name"))
                if _torch.is_script_module(self.value(node)):
                    self.paths[node.output().unique()] = path
            elif node.kind() == "prim::SetAttr":
                owner = self.paths.get(next(node.inputs()).unique())
                if owner is not None:
                    self.written.add((owner, node.s("name")))
        for node in nodes:
            if node.kind() == "prim::GetAttr" and node.input().unique() in self.paths:
                value = self.value(node)
                plain = value is None or isinstance(value, (bool, int, float, str, torch.device))
                if plain and not self.is_written(node):
                    with graph.insert_point_guard(node):
                        node.output().replaceAllUsesWith(graph.insertConstant(value))
                    node.destroy()

    def is_written(self, node: Node) -> bool:
        """Whether the attribute that a node reads is also assigned somewhere."""
        return (self.paths.get(node.input().unique()), node.s("name")) in self.written

    def value(self, node: Node) -> Any:
        """What a GetAttr reads now."""
        owner = self.original(self.paths[node.input().unique()])
        return _torch.script_attribute(owner, node.s("name"))

    def hold(self, path: tuple[str, ...], name: str) -> Any:
        """Keep an attribute that is neither parameter nor buffer; what it is."""
        module = self.at(path)
        value = _torch.script_attribute(self.original(path), name)
        if name in module._parameters or name in module._buffers or (path, name) in self.held:
            return value
        self.held.add((path, name))
        if isinstance(value, Tensor):
            module.register_buffer(self.leaf(name), value, persistent=False)
        else:
            setattr(module, name if name == "training" else self.leaf(name), value)
        return value

    def find(self, tensor: Tensor) -> tuple[str, ...]:
        """The path of a tensor that an attribute holds in a list, as nn.LSTM does its weights."""
        named = itertools.chain(self.root.named_parameters(), self.root.named_buffers())
        for path, held in named:
            if held is tensor or (
                held.dtype == tensor.dtype
                and held.shape == tensor.shape
                and held.numel() > 0
                and held.data_ptr() == tensor.data_ptr() != 0
                and held.stride() == tensor.stride()
            ):
                return tuple(path.split("."))
        names = map("_constant{}".format, itertools.count())
        name = next(name for name in names if not hasattr(self.root, name))
        self.root.register_buffer(name, tensor, persistent=False)
        return (name,)


class _Depends:
    """What each value hangs on: tensor data, an argument, or shapes only."""

    def __init__(self, graph: Any, tree: _Tree) -> None:
        self.of: dict[int, frozenset[str]] = {}
        self.tree = tree
        for value in graph.inputs():
            if value.unique() not in tree.paths:
                plain = "Tensor" not in value.type().annotation_str
                self.of[value.unique()] = frozenset({"argument" if plain else "data"})
        self.block(graph, frozenset())

    def __call__(self, *values: Value) -> frozenset[str]:
        return frozenset().union(*(self.of.get(v.unique(), frozenset()) for v in values))

    def add(self, value: Value, on: frozenset[str]) -> None:
        self.of[value.unique()] = self(value) | on

    def block(self, block: Block, around: frozenset[str]) -> None:
        for node in block.nodes():
            self.node(node, around)

    def node(self, node: Node, around: frozenset[str]) -> None:
        kind, inputs, outputs = node.kind(), list(node.inputs()), list(node.outputs())
        if kind == "prim::If":
            on = self(inputs[0])
            for inner in node.blocks():
                self.block(inner, around | on)
                for out, value in zip(outputs, inner.outputs(), strict=True):
                    self.add(out, self(value) | on)
        elif kind == "prim::Loop":
            (inner,) = node.blocks()
            carried = list(inner.inputs())[1:]
            for _ in range(2):  # once more, for what goes round
                condition, *results = inner.outputs()
                on = self(inputs[0], inputs[1], condition)
                self.add(next(iter(inner.inputs())), on)
                for into, first, last, out in zip(
                    carried, inputs[2:], results, outputs, strict=True
                ):
                    self.add(into, self(first, last) | on)
                    self.add(out, self(first, last) | on)
                self.block(inner, around | on)
        else:
            on = self.plain(kind, inputs, outputs)
            for out in outputs:
                self.add(out, on)
            if inputs and kind in _MUTATES:
                self.add(inputs[0], self(*inputs) | around)

    def plain(self, kind: str, inputs: list[Value], outputs: list[Value]) -> frozenset[str]:
        on = self(*inputs)
        if kind in (*ops.METADATA, "aten::len") and inputs and is_tensor(inputs[0]):
            return frozenset({"shape"}) | self(*inputs[1:])
        if kind in ("aten::__is__", "aten::__isnot__", "aten::len"):
            return frozenset("argument" if o == "data" else o for o in on)
        if kind == "prim::GetAttr" and is_tensor(outputs[0]):
            return on | {"data"}
        if kind == "prim::GetAttr" and self.tree.is_written(outputs[0].node()):
            return on | {"argument"}  # state, which is there before the call as arguments are
        number = kind in ("prim::NumToTensor", *ops.NUMBERS)
        if any(is_tensor(out) for out in outputs) and not number:
            return on | {"data"}
        return on


_MUTATES = {
    *("aten::append", "aten::extend", "aten::insert", "aten::_set_item", "aten::add_"),
    *("aten::update", "aten::pop", "aten::Delete", "aten::clear", "prim::SetAttr"),
}


_HINTS = {"ListConstruct": "items", "TupleConstruct": "pack", "DictConstruct": "table"}


class _Emitter:
    """Writes the source, node by node."""

    def __init__(self, graph: Any, tree: _Tree, schema: Any) -> None:
        self.graph, self.tree, self.schema = graph, tree, schema
        self.depends = _Depends(graph, tree)
        self.names: dict[int, str] = {}  # the expression (always an atom) of each value
        self.numbers: dict[int, torch.dtype] = {}  # 0-dim tensors that are Python numbers here
        self.namespace: dict[str, Any] = dict(ops.NAMESPACE)
        self.taken = {*self.namespace, *ops.BUILTINS, *keyword.kwlist}
        self.lines: list[str] = []
        self.depth = 1
        self.branches: list[Branch] = []

    def translate(self) -> Translated:
        outside, inside = self.signature()
        self.nodes(self.graph)
        (result,) = self.graph.outputs()
        if not self.lines or not self.lines[-1].startswith("    raise "):
            self.emit(f"return {self.tensor(result)}")
        body = "\n".join(self.lines) + "\n"
        source = f"def forward({', '.join(['self', *outside])}):\n{body}"
        if inside:  # an argument hides a name that the body needs
            run = self.name("run")
            source = (
                f"def forward({', '.join(['self', *outside])}):\n"
                f"    return {run}({', '.join(['self', *inside])})\n\n\n"
                f"def {run}({', '.join(['self', *inside.values()])}):\n{body}"
            )
        file = f"<torchgraft script {self.tree.name} {next(_serial)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec"), self.namespace)
        forward = self.namespace.pop("forward")
        self.tree.root.__class__ = type(self.tree.name, (nn.Module,), {"forward": forward})
        return Translated(self.tree.root, source, tuple(self.branches))

    def signature(self) -> tuple[list[str], dict[str, str]]:
        """The parameters of forward, and what the body calls them if it cannot use their names."""
        values, arguments = list(self.graph.inputs()), list(self.schema.arguments)
        if self.tree.script is not None:
            values, arguments = values[1:], arguments[1:]
        outside, inside = [], {}
        for index, (value, argument) in enumerate(zip(values, arguments, strict=True)):
            given = argument.name if is_name(argument.name) else f"argument{index}"
            given = given if given != "self" and given not in inside else f"{given}_{index}"
            inside[given] = self.names[value.unique()] = self.name(given)
            default = argument.has_default_value()
            outside.append(f"{given}={self.literal(argument.default_value)}" if default else given)
        self.taken.update(inside, dir(builtins))
        return outside, inside if any(k != v for k, v in inside.items()) else {}

    # Names and expressions

    def name(self, hint: str) -> str:
        """A fresh variable name close to the hint."""
        stem = re.sub(r"\W", "_", hint, flags=re.ASCII).strip("_") or "v"
        stem = stem if not stem[0].isdigit() else f"v{stem}"
        name = stem
        for n in itertools.count(1):
            if name not in self.taken:
                break
            name = f"{stem}_{n}"
        self.taken.add(name)
        return name

    def define(self, value: Value) -> str:
        """Name a value after its name in the IR, or after the operator that makes it."""
        hint = value.debugName()
        if re.fullmatch(r"[\d.]*", hint):
            kind = value.node().kind().split("::")[-1]
            hint = _HINTS.get(kind, kind.lower())
        self.names[value.unique()] = self.name(hint)
        return self.names[value.unique()]

    def keep(self, hint: str, value: Any) -> str:
        """The name of an object that generated code may use."""
        name = self.name(hint)
        self.namespace[name] = value
        return name

    def literal(self, value: Any) -> str:
        """The value as source: only numbers, strings and torch's own enums are ever spelt out."""
        if isinstance(value, float) and not math.isfinite(value):
            return "math.nan" if math.isnan(value) else "-math.inf" if value < 0 else "math.inf"
        if value is None or type(value) in (bool, int, float, str):
            return repr(value)
        if isinstance(value, torch.dtype):
            return str(value)
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if type(value) is list:
            return f"[{', '.join(map(self.literal, value))}]"
        if type(value) is tuple:
            return pack([self.literal(v) for v in value])
        if type(value) is dict:
            pairs = (f"{self.literal(k)}: {self.literal(v)}" for k, v in value.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, Tensor):
            return self.path(self.tree.find(value))
        return self.keep("object", value)

    def ref(self, value: Value) -> str:
        """The expression of a value; a number where a trace wraps one in a tensor."""
        if value.unique() not in self.names:
            assert constant(value), value
            self.names[value.unique()] = self.literal(value.toIValue())
        return self.names[value.unique()]

    def tensor(self, value: Value) -> str:
        """The expression of a value, which is a tensor if its type says so."""
        if is_tensor(value) and value.unique() in self.numbers:
            dtype = self.numbers[value.unique()]
            return f"torch.scalar_tensor({self.ref(value)}, dtype={dtype})"
        if is_tensor(value) and constant(value):
            number = value.toIValue()  # a Python number where the constant came from one
            if isinstance(number, (bool, int, float, complex)):
                return (
                    f"torch.tensor({self.literal(number)}, dtype={value.node().t('value').dtype})"
                )
        return self.ref(value)

    def attribute(self, owner: str, name: str) -> str:
        return f"{owner}.{name}" if is_name(name) else f"getattr({owner}, {name!r})"

    def path(self, path: tuple[str, ...]) -> str:
        expression = "self"
        for name in path:
            expression = self.attribute(expression, name)
        return expression

    # Statements

    def emit(self, text: str, node: Node = None) -> None:
        line = line_of(node) if node is not None else ""
        comment = f"  # {line.rsplit('/', 1)[-1]}" if line else ""
        self.lines.append("    " * self.depth + text + comment)

    def refuse(self, node: Node, why: str) -> UnsupportedScript:
        return UnsupportedScript(node.kind(), line_of(node), why)

    def nodes(self, block: Block) -> bool:
        """Emit a block's nodes; False when it ends in a raise."""
        depth = self.depth
        for node in block.nodes():
            self.node(node)
            if node.kind() == "prim::RaiseException":
                self.depth = depth
                return False
        self.depth = depth
        return True

    def node(self, node: Node) -> None:
        kind = node.kind()
        handler = getattr(self, kind.replace("prim::", "on_"), None)
        if handler is not None:
            handler(node)
        elif not self.number(node) and not self.python(node):
            self.operator(node)

    def assign(self, node: Node, text: str) -> None:
        names = [self.define(out) for out in node.outputs()]
        self.emit(f"{', '.join(names)} = {text}" if names else text, node)

    def alias(self, node: Node, text: str) -> None:
        self.names[node.output().unique()] = text

    # Operators

    def overload(self, node: Node) -> Any:
        """The schema, or None for nodes that have none."""
        text = node.schema()
        return None if text == "(no schema)" else _torch.parse_schema(text)

    def python(self, node: Node) -> bool:
        """Emit the node as Python, if the table knows it."""
        kind, schema = node.kind(), self.overload(node)
        inputs = list(node.inputs())
        full = f"{kind}.{schema.overload_name}" if schema is not None else kind
        template = ops.ALWAYS.get(full) or ops.ALWAYS.get(kind)
        if template is None and not any(is_tensor(value) for value in inputs):
            template = ops.SCALAR.get(full) or ops.SCALAR.get(kind)
        if template is None:
            return False
        text = expand(template, [self.tensor(value) for value in inputs])
        if kind == "prim::dtype":
            self.alias(node, text)
        elif kind in ops.STATEMENTS:
            self.emit(text, node)
            for out in node.outputs():
                self.names[out.unique()] = self.ref(inputs[0])
        elif not any(out.uses() for out in node.outputs()):
            self.emit(text, node)
        else:
            self.assign(node, text)
        return True

    def number(self, node: Node) -> bool:
        """Emit arithmetic on wrapped sizes as arithmetic on numbers; False where it is not that.

        Each result has the dtype and, for float32, the rounding that the tensors would have had.
        """
        inputs, name = list(node.inputs()), node.kind().split("::")[-1]
        dtypes = [self.numbers[v.unique()] for v in inputs if v.unique() in self.numbers]
        if not dtypes:
            return False
        if name in ops.READS:
            template = ops.READS[name]
            if template == "to_int({0})" and dtypes[0] == torch.int64:
                template = "{0}"
        else:
            mode = inputs[-1].toIValue() if name == "div" and len(inputs) == 3 else None
            template = ops.NUMBERS.get(f"{node.kind()}.{mode}" if mode else node.kind(), "")
            dtype = self.dtype_of(node) if template and not changed(node.output()) else None
            if dtype not in (torch.int64, torch.float32, torch.float64):
                return False
            self.numbers[node.output().unique()] = dtype
            if dtype == torch.float32 and (template != "{0}" or dtype != dtypes[0]):
                template = f"single({template})"
            elif name == "to" and dtype == torch.int64 != dtypes[0]:
                template = f"to_int({template})"
        if template == "{0}":
            self.alias(node, self.ref(inputs[0]))
        else:
            terms = (v if scalar(v) is None else scalar(v) for v in inputs)
            self.assign(node, expand(template, [self.term(v) for v in terms]))
        return True

    def term(self, operand: Any) -> str:
        plain = operand is None or isinstance(operand, (bool, int, float, complex))
        return self.literal(operand) if plain else self.ref(operand)

    def dtype_of(self, node: Node) -> torch.dtype | None:
        """What torch gives for 0-dim operands of these dtypes: it is asked, on ones."""
        kind, operands = node.kind(), []
        for index, value in enumerate(node.inputs()):
            if value.unique() in self.numbers:
                operands.append(torch.ones((), dtype=self.numbers[value.unique()]))
            elif not constant(value) or (is_tensor(value) and scalar(value) is None):
                return None
            else:
                freed = index == 1 and kind in _FREES and is_tensor(value)
                operands.append(scalar(value) if freed else value.toIValue())
        if kind in ("aten::add", "aten::sub", "aten::rsub") and operands[2:] not in ([], [1]):
            return None
        if any(isinstance(o, torch.device) and o.type != "cpu" for o in operands):
            return None
        schema = self.overload(node)
        named = {a.name: o for a, o in zip(schema.arguments, operands, strict=True) if a.kwarg_only}
        packet = getattr(torch.ops.aten, schema.name.split("::")[1])
        function = getattr(packet, schema.overload_name or "default")
        try:
            result: Tensor = function(*operands[: len(operands) - len(named)], **named)
        except (RuntimeError, TypeError):
            return None
        return result.dtype

    def operator(self, node: Node) -> None:
        """Emit a call of the exact overload."""
        schema = self.overload(node)
        if schema is None or node.inputsSize() != len(schema.arguments):
            raise self.refuse(node, "it is no operator, and there is no Python for it")
        space, name = schema.name.split("::")
        overload = schema.overload_name or "default"
        try:
            function = getattr(getattr(getattr(torch.ops, space), name), overload)
        except AttributeError:
            raise self.refuse(node, "no such operator is loaded") from None
        if not isinstance(function, type(torch.ops.aten.add.Tensor)):
            raise self.refuse(node, "that is no operator")
        call = f"torch.ops.{space}.{name}.{overload}"
        if not all(p.isidentifier() and not keyword.iskeyword(p) for p in (space, name, overload)):
            call = self.keep(name, function)
        arguments = [
            (argument, self.argument(value, argument, name, index))
            for index, (value, argument) in enumerate(
                zip(node.inputs(), schema.arguments, strict=True)
            )
        ]
        while arguments and self.is_default(*arguments[-1]):
            arguments.pop()
        texts = [
            f"{argument.name}={text}" if argument.kwarg_only else text
            for argument, text in arguments
            if not (argument.kwarg_only and self.is_default(argument, text))
        ]
        text = f"{call}({', '.join(texts)})"
        self.assign(node, text)

    def is_default(self, argument: Any, text: str) -> bool:
        if not argument.has_default_value():
            return False
        value = argument.default_value
        return not isinstance(value, Tensor) and self.literal(value) == text

    def argument(self, value: Value, argument: Any, name: str, index: int) -> str:
        """One argument: numbers for wrapped numbers, and dtypes for the IR's numbers of dtypes."""
        enum = re.fullmatch(
            r"(?:Optional\[)?(ScalarType|Layout|MemoryFormat)\]?", str(argument.real_type)
        )
        if enum:
            return self.enum(value, enum[1])
        if is_tensor(value) and name in ops.TAKES_NUMBERS:
            if index == 1 and self.numbers.get(value.unique()) == torch.int64:
                return self.ref(value)
            number = scalar(value)
            wrapped = number is not None and not isinstance(value.toIValue(), Tensor)
            if wrapped or (number is not None and index == 1 and f"aten::{name}" in _FREES):
                return self.literal(number)
        return self.tensor(value)

    def enum(self, value: Value, kind: str) -> str:
        if constant(value):
            number = value.toIValue()
            table = ops.ENUMS[kind]
            if number is None or (isinstance(number, int) and number in table):
                return str(None if number is None else table[number])
            raise self.refuse(value.node(), f"{number!r} is no {kind}")
        if value.node().kind() == "prim::dtype" and kind == "ScalarType":
            return f"{self.ref(value.node().input())}.dtype"
        return f"{kind.lower()}_of.get({self.ref(value)})"

    # Structure: one method per prim node

    def on_Constant(self, node: Node) -> None:
        pass  # spelt where it is used

    def on_Uninitialized(self, node: Node) -> None:
        self.alias(node, "None")

    def on_unchecked_cast(self, node: Node) -> None:
        self.alias(node, self.ref(node.input()))
        if node.input().unique() in self.numbers:
            self.numbers[node.output().unique()] = self.numbers[node.input().unique()]

    on_unchecked_unwrap_optional = on_unchecked_cast

    def on_GetAttr(self, node: Node) -> None:
        owner, name = node.input().unique(), node.s("name")
        if owner not in self.tree.paths:
            if not is_name(name):
                raise self.refuse(node, f"{name!r} is not a name")
            self.assign(node, f"{self.ref(node.input())}.{name}")
            return
        if node.output().unique() in self.tree.paths:
            return
        path = self.tree.paths[owner]
        value = self.tree.hold(path, name)
        text = self.path((*path, name))
        fixed = not any(use.user.kind() in _MUTATES for use in node.output().uses())
        if isinstance(value, (list, tuple, dict)) and fixed and holds_tensors(value):
            text = self.literal(value)  # spelt out, so that a tracer sees parameters, not constants
        if self.tree.is_written(node):
            text = self.path((*path, name))
            self.assign(node, text)
        else:
            self.alias(node, text)

    def on_SetAttr(self, node: Node) -> None:
        owner, value = node.inputs()
        name = node.s("name")
        if not is_name(name):
            raise self.refuse(node, f"{name!r} is not a name")
        if owner.unique() in self.tree.paths:
            path = self.tree.paths[owner.unique()]
            self.tree.hold(path, name)
            self.emit(f"{self.path(path)}.{name} = {self.tensor(value)}", node)
        else:
            self.emit(f"{self.ref(owner)}.{name} = {self.tensor(value)}", node)

    def on_CreateObject(self, node: Node) -> None:
        self.assign(node, "Record()")

    def on_Enter(self, node: Node) -> None:
        name = node.input().type().annotation_str.rsplit(".", 1)[-1]
        if name == "no_grad":
            self.emit("with torch.no_grad():", node)
            self.depth += 1
            self.emit("pass")
        elif name != "record_function":
            raise self.refuse(node, f"`with {name}` is not supported")

    def on_Exit(self, node: Node) -> None:
        if node.input().type().annotation_str.endswith(".no_grad"):
            self.depth -= 1

    def on_TupleConstruct(self, node: Node) -> None:
        items = [self.tensor(value) for value in node.inputs()]
        made = named(node.output().type())
        if made is not None:
            self.assign(node, f"{self.keep(made.__name__, made)}({', '.join(items)})")
        else:
            self.assign(node, pack(items))

    def on_ListConstruct(self, node: Node) -> None:
        self.assign(node, f"[{', '.join(self.tensor(value) for value in node.inputs())}]")

    def on_DictConstruct(self, node: Node) -> None:
        flat = [self.tensor(value) for value in node.inputs()]
        pairs = (f"{key}: {value}" for key, value in zip(flat[::2], flat[1::2], strict=True))
        self.assign(node, f"{{{', '.join(pairs)}}}")

    def on_TupleUnpack(self, node: Node) -> None:
        names = [self.define(out) for out in node.outputs()]
        if names:
            self.emit(f"{unpack(names)} = {self.ref(node.input())}", node)

    on_ListUnpack = on_TupleUnpack

    def on_TupleSlice(self, node: Node) -> None:
        self.assign(node, f"{self.ref(node.input())}[{node.i('beg')}:{node.i('end')}]")

    def on_ConstantChunk(self, node: Node) -> None:
        names = [self.define(out) for out in node.outputs()]
        chunks = f"{self.ref(node.input())}.chunk({node.i('chunks')}, {node.i('dim')})"
        self.emit(f"{unpack(names)} = {chunks}", node)

    def on_NumToTensor(self, node: Node) -> None:
        value, out = node.input(), node.output()
        dtypes = {"IntType": torch.int64, "FloatType": torch.float64}
        dtype = dtypes.get(value.type().kind())
        if dtype is None or changed(out):
            kept = f", dtype={dtype}" if dtype is not None else ""
            self.assign(node, f"torch.tensor({self.ref(value)}{kept})")
        else:
            self.numbers[out.unique()] = dtype
            self.alias(node, self.ref(value))

    def on_isinstance(self, node: Node) -> None:
        kinds = [kind.kind() for kind in node.tys("types")]
        if not all(kind in ops.KINDS for kind in kinds):
            raise self.refuse(node, f"a check for {', '.join(kinds)}")
        names = "".join(f", {kind!r}" for kind in kinds)
        self.assign(node, f"is_a({self.ref(node.input())}{names})")

    def on_RaiseException(self, node: Node) -> None:
        message, *given = node.inputs()
        name = given[0].toIValue() if given and constant(given[0]) else None
        error = ops.EXCEPTIONS.get(str(name).rsplit(".", 1)[-1], RuntimeError).__name__
        self.emit(f"raise {error}({self.ref(message)})", node)

    def branch(self, kind: Literal["if", "loop"], node: Node, *values: Value) -> None:
        on = self.depends(*values)
        worst = next((o for o in ("data", "argument", "shape") if o in on), None)
        if worst is not None:
            self.branches.append(Branch(kind, line_of(node), worst))

    def body(self, block: Block, results: list[tuple[str, Value]]) -> None:
        """Emit an indented block that ends by assigning its results."""
        self.depth += 1
        start = len(self.lines)
        if self.nodes(block):
            pairs = [(name, self.tensor(value)) for name, value in results]
            pairs = [(name, text) for name, text in pairs if name != text]
            if pairs:
                names, texts = zip(*pairs, strict=True)
                self.emit(f"{', '.join(names)} = {', '.join(texts)}")
        if len(self.lines) == start:
            self.emit("pass")
        self.depth -= 1

    def on_If(self, node: Node) -> None:
        outs, (yes, no) = list(node.outputs()), node.blocks()
        condition = node.input()
        if constant(condition):
            live = yes if condition.toIValue() else no
            self.nodes(live)
            for out, value in zip(outs, live.outputs(), strict=True):
                self.names[out.unique()] = self.tensor(value)
            return
        self.branch("if", node, condition)
        names = [self.define(out) for out in outs]
        self.emit(f"if {self.ref(condition)}:", node)
        self.body(yes, list(zip(names, yes.outputs(), strict=True)))
        self.emit("else:")
        self.body(no, list(zip(names, no.outputs(), strict=True)))

    def on_Loop(self, node: Node) -> None:
        trips, first, *initial = node.inputs()
        (block,) = node.blocks()
        index, *carried = block.inputs()
        again, *results = block.outputs()
        endless = constant(trips) and trips.toIValue() == _FOREVER
        counted = constant(first) and first.toIValue() and constant(again) and again.toIValue()
        self.branch("loop", node, trips, first, again)
        names = [self.define(out) for out in node.outputs()]
        for name, value in zip(names, initial, strict=True):
            self.emit(f"{name} = {self.tensor(value)}")
        for value, name in zip(carried, names, strict=True):
            self.names[value.unique()] = name
        ends = list(zip(names, results, strict=True))
        count = self.define(index)
        if not counted:
            going = self.name("going")
            self.emit(f"{going} = {self.ref(first)}")
            ends.append((going, again))
        if endless and not counted:
            self.emit(f"{count} = -1")
            self.emit(f"while {going}:", node)
            self.lines.append("    " * (self.depth + 1) + f"{count} += 1")
        else:
            self.emit(f"for {count} in range({self.ref(trips)}):", node)
            if not counted:
                self.lines.append("    " * (self.depth + 1) + f"if not {going}:")
                self.lines.append("    " * (self.depth + 2) + "break")
        self.body(block, ends)


_FREES = {"aten::add", "aten::sub", "aten::mul", "aten::div"}
"""Where the JIT's own optimiser turns a 0-dim constant operand into a number (CanonicalizeOps)."""


def scalar(value: Value) -> Any:
    """The number that a constant 0-dim tensor holds, or None."""
    if not constant(value) or not is_tensor(value):
        return None
    held = value.toIValue()
    if isinstance(held, Tensor):
        return held.item() if held.dim() == 0 else None
    return held


def changed(value: Value) -> bool:
    """Whether some operator writes to a tensor in place."""
    kinds = (use.user.kind() for use in value.uses() if use.offset == 0)
    return any(kind.endswith("_") and not kind.endswith("__") for kind in kinds)


def holds_tensors(value: Any) -> bool:
    """Whether a container has a tensor in it, at any depth."""
    items = value.values() if isinstance(value, dict) else value
    return any(
        isinstance(item, Tensor) or (isinstance(item, (list, tuple, dict)) and holds_tensors(item))
        for item in items
    )


def pack(items: list[str]) -> str:
    """A tuple's source."""
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def unpack(names: list[str]) -> str:
    """The left side of an assignment that takes a sequence apart."""
    return f"({names[0]},)" if len(names) == 1 else ", ".join(names)


def expand(template: str, texts: list[str]) -> str:
    """Fill a template with atoms; a negative number gets its parentheses."""

    def one(match: re.Match[str]) -> str:
        index = int(match[2] or 0)
        if match[1]:
            return ", ".join(texts[index:])
        alone = template[: match.start()].endswith(("(", "[", ", "))
        return f"({texts[index]})" if texts[index].startswith("-") and not alone else texts[index]

    return re.sub(r"\{(\*?)(\d*)\}", one, template)


def named(kind: Any) -> Any:
    """The NamedTuple class of a tuple type: the user's own where it is loaded, else a twin."""
    text = kind.str()
    if not text.startswith("NamedTuple("):
        return None
    flat = text[len("NamedTuple(") : -1]
    while flat != (flat := re.sub(r"\([^()]*\)|\[[^\[\]]*\]", "", flat)):
        pass
    fields = [part.split(":")[0].strip() for part in flat.split(",")]
    if len(fields) != len(kind.elements()) or not all(
        is_name(field) and not field.startswith("_") for field in fields
    ):
        return None
    parts = [p for p in kind.annotation_str.split(".")[1:] if not p.startswith("___torch_mangle")]
    module = sys.modules.get(".".join(parts[:-1]) or "__main__")
    found = getattr(module, parts[-1], None) if parts else None
    known = isinstance(found, type) and issubclass(found, tuple)
    if known and getattr(found, "_fields", None) == tuple(fields):
        return found
    title = parts[-1] if parts and is_name(parts[-1]) else "Result"
    return namedtuple(title, fields)
