"""A compiled program as a ScriptModule: the package in a buffer, and an operator that runs it."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchgraft import _torch
from torchgraft.compile import Compiled
from torchgraft.errors import InputMismatch, NotSavable
from torchgraft.package.archive import Archive
from torchgraft.package.load import Loaded, checked
from torchgraft.package.tensors import bytes_of
from torchgraft.run import call
from torchgraft.signature import ConstSpec, Signature, TensorSpec

_ENGINES: Any = WeakTensorKeyDictionary()  # a program lives as long as the buffer that holds it


def _run_engine(inputs: list[Tensor], engine: Tensor) -> list[Tensor]:
    program = _ENGINES.get(engine)
    if program is None:
        program = _ENGINES[engine] = _loaded(engine)
    args, kwargs = _arguments(program, inputs)
    return list(_torch.flatten(program(*args, **kwargs))[0])


_LIBRARY: Any = torch.library.Library("torchgraft", "FRAGMENT")  # type: ignore[no-untyped-call]
if not _torch.schemas_of("torchgraft::run_engine"):  # the C++ runtime may have come first
    _LIBRARY.define("run_engine(Tensor[] inputs, Tensor engine) -> Tensor[]")
    _LIBRARY.impl("run_engine", _run_engine, "CompositeExplicitAutograd")


def _loaded(engine: Tensor) -> Loaded:
    loaded = checked(Archive(bytes_of(engine)), None, None)
    loaded.start()
    return loaded


def _arguments(program: Loaded, inputs: list[Tensor]) -> Any:
    """The call that these tensors make with the gear that takes them."""
    error: InputMismatch | None = None
    for taken in program.captures:
        signature = taken.signature
        given = iter(inputs)
        leaves = [s.value if isinstance(s, ConstSpec) else next(given) for s in signature.specs]
        error = signature.misfit(leaves)
        if error is None or len(program.captures) == 1:
            return _torch.unflatten(leaves, signature.tree)
    return call.fit(
        [c.signature for c in program.captures], *_torch.unflatten(leaves, signature.tree)
    )


def forget_engines() -> None:
    """Let go of the programs that ScriptModules hold; the next call loads its package again."""
    _ENGINES.clear()
    if _torch.schemas_of("torchgraft::forget_engines"):  # the C++ runtime has some
        torch.ops.torchgraft.forget_engines()


def to_script(
    compiled: Compiled,
    content: bytearray | None = None,
    given: Callable[[str, TensorSpec], str] = lambda name, spec: name,
) -> torch.jit.ScriptModule:
    """A ScriptModule whose forward takes and gives what the program does.

    `content` are the bytes of its package, where there is one. `given` writes in TorchScript what
    is passed on for a tensor, from its name.
    """
    signature = compiled.captures[0].signature if compiled.captures else None
    if signature is None:
        raise NotSavable("it has branches that stay in Python", "Save the ScriptModule itself.")
    if any(c.states for c in compiled.captures) or signature.written:
        raise NotSavable(
            "it writes to its inputs or reads tensors of the model at each call",
            "Compile with freeze=True, and give new values back in place of writing them.",
        )
    holder = type("Program", (torch.nn.Module,), {})()  # TorchScript has one forward per class
    content = content or _content(compiled)
    holder.register_buffer("engine", torch.frombuffer(content, dtype=torch.uint8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is what was asked for
        module: Any = torch.jit.script(holder)
    module.define(_source(signature, given))
    return module  # type: ignore[no-any-return]


def _content(compiled: Compiled) -> bytearray:
    with tempfile.TemporaryDirectory() as folder:
        compiled.save(path := Path(folder) / "program.graft")
        return bytearray(path.read_bytes())


def _source(signature: Signature, given: Callable[[str, TensorSpec], str]) -> str:
    """`forward` in TorchScript: the inputs as a list, the results in their structure."""
    args, kwargs = signature.tree.children()
    specs = iter(signature.specs)
    placed = [_Parameter(f"x{i}", child, specs) for i, child in enumerate(args.children())]
    named = [
        _Parameter(str(name), child, specs, renamed=False)
        for name, child in zip(kwargs.context or (), kwargs.children(), strict=True)
    ]
    parameters = [*(p.text for p in placed), *(["*"] if named else []), *(p.text for p in named)]
    names = [tensor for p in (*placed, *named) for tensor in p.tensors]
    of_tensors = [spec for spec in signature.specs if isinstance(spec, TensorSpec)]
    tensors = [given(name, spec) for name, spec in zip(names, of_tensors, strict=True)]
    checks = [p.check for p in (*placed, *named) if p.check]
    numbers = iter(range(signature.out_tree.num_leaves))
    made = _result(signature.out_tree, numbers)
    return "\n".join(
        [
            f"def forward({', '.join(['self', *parameters])}):",
            *checks,
            f"    made = torch.ops.torchgraft.run_engine([{', '.join(tensors)}], self.engine)",
            f"    return {made}\n",
        ]
    )


class _Parameter:
    """A parameter of `forward` with its type, the tensors in it, and a check of a constant."""

    def __init__(self, name: str, tree: Any, specs: Any, renamed: bool = True) -> None:
        self.check = ""
        if tree.is_leaf():
            spec = next(specs)
            name = re.sub(r"\W", "_", spec.name) if renamed else name
            self._leaf(name, spec)
            return
        count = len(tree.children())
        if not all(child.is_leaf() for child in tree.children()):
            raise NotSavable("its inputs are nested more than once", "Flatten them.")
        if not all(isinstance(next(specs), TensorSpec) for _ in range(count)):
            raise NotSavable("a container among its inputs holds a constant", "Leave it out.")
        kinds = {
            list: "List[Tensor]",
            tuple: f"Tuple[{', '.join(['Tensor'] * count)}]",
            dict: "Dict[str, Tensor]",
        }
        if tree.type not in kinds:
            raise NotSavable(f"it takes a {tree.type.__name__}", "Take a tuple, a list or a dict.")
        keys = tree.context if tree.type is dict else range(count)
        self.text = f"{name}: {kinds[tree.type]}"
        self.tensors = [f"{name}[{key!r}]" for key in keys]

    def _leaf(self, name: str, spec: Any) -> None:
        if isinstance(spec, TensorSpec):
            self.text, self.tensors = f"{name}: Tensor", [name]
            return
        if type(spec.value) not in (bool, int, float, str):
            raise NotSavable(f"{spec.name!r} is {spec.value!r}", "Compile without that argument.")
        why = f"the program was compiled for {spec.name} = {spec.value!r}"
        self.text, self.tensors = f"{name}: {type(spec.value).__name__}", []
        self.check = f"    if {name} != {spec.value!r}:\n        raise ValueError({why!r})"


def _result(tree: Any, numbers: Any) -> str:
    if tree.is_leaf():
        return f"made[{next(numbers)}]"
    parts = [_result(child, numbers) for child in tree.children()]
    if tree.type is dict:
        pairs = zip(tree.context, parts, strict=True)
        return f"{{{', '.join(f'{key!r}: {part}' for key, part in pairs)}}}"
    if tree.type is list:
        return f"[{', '.join(parts)}]"
    if tree.type is tuple:
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    raise NotSavable(f"it gives a {tree.type.__name__}", "Give a tuple, a list or a dict.")
