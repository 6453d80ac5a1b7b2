"""A compiled program inside a ScriptModule, so that it saves, loads and runs as one.

The module holds the program's package, and loading it compiles nothing. A program that no package
can hold (branches that stay in Python, writes to its inputs) keeps what it is made from instead:
a recipe of the TorchScript, its inputs and its config, which `torch_aie::run` compiles when it
first meets it in a process.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import threading
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

import torchgraft as graft
from torchgraft import _torch
from torchgraft.compat import device as devices
from torchgraft.compile import Compiled
from torchgraft.errors import NotSavable, UnsupportedFile
from torchgraft.package.save import packaged
from torchgraft.package.script import forget_engines, to_script
from torchgraft.signature import TensorSpec

_SCHEMA = "run(Tensor engine, Tensor[] xs) -> Tensor[]"
_FIELDS = (
    "mode",
    "precision",
    "require_full_compilation",
    "min_block_size",
    "torch_executed_ops",
    "torch_executed_modules",
    "inductor",
)
_MOST = 1 << 31
_WIDE = {torch.int32: torch.int64, torch.float32: torch.float64}


def device() -> torch.device:
    """Where programs run."""
    return torch.device(devices.kind(), torch.npu.current_device())  # type: ignore[attr-defined]


def package(
    model: Any, inputs: Sequence[graft.Input] | None, config: graft.Config
) -> tuple[Compiled, bytearray]:
    """A program for the device that is, or stands for, the NPU, and its package."""
    compiled, made = packaged(moved(model, device()), inputs, config)
    return compiled, made.content()


def module(
    script: torch.jit.ScriptModule,
    inputs: Sequence[graft.Input],
    config: graft.Config,
    *,
    narrow: bool,
) -> torch.jit.ScriptModule:
    """A script's program as a ScriptModule; with `narrow`, 64 bits are taken for 32 that were
    declared."""

    def taken(name: str, dtype: torch.dtype) -> str:
        wide = _WIDE.get(dtype) if narrow else None
        return f"({name}.to({dtype}) if {name}.dtype == {wide} else {name})" if wide else name

    def given(name: str, spec: TensorSpec) -> str:
        return f"{taken(name, spec.dtype)}.to('{spec.device.type}')"

    try:
        compiled, content = package(script, inputs, config)
        return to_script(compiled, content, given).eval()
    except NotSavable:
        recipe = _pack(script, inputs, config)
        RECIPES.get(recipe)  # compiled now, and not when it is first called
        return _wrap(script, recipe, [taken("{0}", one.dtype) for one in inputs])


def forget() -> None:
    """Let go of every program that modules hold in this process."""
    RECIPES.clear()
    forget_engines()


def moved(model: Any, where: torch.device) -> Any:
    """The model itself, or a copy of it on another device."""
    if where.type == "cpu":
        return model
    if isinstance(model, torch.jit.ScriptModule):
        made = _loaded(_saved(model), where)
        _rename_devices(made, where)
        return made
    if isinstance(model, ExportedProgram):
        return move_to_device_pass(model, where)
    return copy.deepcopy(model).to(where)


def outputs(script: torch.jit.ScriptModule) -> int | None:
    """How many tensors a script gives; None where only a call can tell, as of a list."""

    def count(kind: Any) -> int | None:
        if kind.kind() == "TensorType":
            return 1
        if kind.kind() != "TupleType":
            return None
        counts = [count(one) for one in kind.elements()]
        return sum(filter(None, counts)) if None not in counts else None

    return count(_torch.script_schema(script).returns[0].type)


def _rename_devices(script: torch.jit.ScriptModule, where: torch.device) -> None:
    """Let what a trace wrote down as made on the CPU (masks, positions) be made on a device."""
    for module in script.modules():
        try:
            graph: Any = module.graph
        except RuntimeError:  # one without a forward, such as a list of modules
            continue
        for node in graph.findAllNodes("prim::Constant"):
            if node.output().type().kind() == "DeviceObjType" and node.s("value") == "cpu":
                node.s_("value", str(where))


def _saved(script: torch.jit.ScriptModule) -> bytes:
    held = io.BytesIO()
    torch.jit.save(script, held)
    return held.getvalue()


def _loaded(model: bytes, where: torch.device) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        made: Any = torch.jit.load(io.BytesIO(model), map_location=where)  # type: ignore[no-untyped-call]
    return made  # type: ignore[no-any-return]


# --- Recipes ---


class _Recipes:
    """The programs of this process, by the hash of their recipe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._programs: dict[bytes, graft.Compiled] = {}

    def get(self, recipe: bytes) -> graft.Compiled:
        """The program of a recipe, compiled when it is first asked for."""
        key = hashlib.sha256(recipe).digest()
        with self._lock:
            if key not in self._programs:
                self._programs[key] = _build(recipe)
            return self._programs[key]

    def clear(self) -> None:
        with self._lock:
            self._programs.clear()


RECIPES = _Recipes()


def _pack(
    script: torch.jit.ScriptModule, inputs: Sequence[graft.Input], config: graft.Config
) -> bytes:
    """The recipe of a program."""
    about = {
        "format": 1,
        "inputs": [_described(one) for one in inputs],
        "config": {name: _plain(getattr(config, name)) for name in _FIELDS},
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in (("about.json", json.dumps(about).encode()), ("m.pt", _saved(script))):
            archive.writestr(zipfile.ZipInfo(name), data)  # no time in it: equal bytes for equal
    return out.getvalue()


def _build(recipe: bytes) -> graft.Compiled:
    """Compile a recipe for the device that is, or stands for, the NPU."""
    try:
        with zipfile.ZipFile(io.BytesIO(recipe)) as archive:
            if sum(info.file_size for info in archive.infolist()) > _MOST:
                raise ValueError("it claims to be larger than 2 GiB")
            about = json.loads(archive.read("about.json"))
            model = archive.read("m.pt")
        config = graft.Config.of(about["config"])
        inputs = tuple(_input(row, device()) for row in about["inputs"])
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
        why = f"its engine cannot be read ({error})"
        raise UnsupportedFile("the module", why, "Compile and save it again.") from error
    return graft.compile(_loaded(model, device()), inputs, config=config)


def _described(one: graft.Input) -> dict[str, Any]:
    dtype = str(one.dtype).removeprefix("torch.")
    return {"dtype": dtype, "gears": one.gears, "ranges": one.ranges}


def _input(row: dict[str, Any], device: torch.device) -> graft.Input:
    dtype = getattr(torch, row["dtype"])
    if row["gears"]:
        return graft.Input(gears=row["gears"], dtype=dtype, device=device)
    low = [span[0] for span in row["ranges"]]
    high = [span[1] for span in row["ranges"]]
    return graft.Input(min_shape=low, max_shape=high, dtype=dtype, device=device)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [one if isinstance(one, str) else str(one) for one in value]
    return dict(value) if isinstance(value, Mapping) else value


def _run(engine: Tensor, xs: list[Tensor]) -> list[Tensor]:
    program = RECIPES.get(engine.cpu().numpy().tobytes())
    given = program(*(x.to(device()) for x in xs))  # a tensor that is there is not copied
    return [leaf for leaf in _torch.flatten(given)[0] if isinstance(leaf, Tensor)]


_make: Any = torch.library.Library  # untyped in torch
_LIBRARY: Any = _make("torch_aie", "DEF")  # lives as long as the process
_LIBRARY.define(_SCHEMA)
_LIBRARY.impl("run", _run, "CompositeExplicitAutograd")


def _wrap(
    script: torch.jit.ScriptModule, recipe: bytes, casts: Sequence[str]
) -> torch.jit.ScriptModule:
    """A ScriptModule with the arguments and results of `script` that runs the recipe's program.

    `casts` are expressions, one for each argument, with `{0}` in its place.
    """
    schema = _torch.script_schema(script)
    names = [argument.name for argument in schema.arguments if argument.name != "self"]
    names = names[: len(casts)]
    given = ", ".join(f"{name}: Tensor" for name in names)
    passed = ", ".join(cast.format(name) for name, cast in zip(names, casts, strict=True))
    fresh = iter(range(10**6))
    result, kind = _result(schema.returns[0].type, fresh)
    source = (
        f"def forward(self, {given}) -> {kind}:\n"
        f"    results = torch.ops.torch_aie.run(self.engine, [{passed}])\n"
        f"    return {result}\n"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return _module(recipe, source).eval()


def _module(recipe: bytes, source: str) -> torch.jit.ScriptModule:
    """A module of one method; its class is its own, since TorchScript compiles a class once."""

    class Engine(torch.jit.ScriptModule):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("engine", torch.frombuffer(bytearray(recipe), dtype=torch.uint8))
            self.define(source)

    return Engine()


def _result(kind: Any, fresh: Any) -> tuple[str, str]:
    """The expression that puts results together as the script did, and its type."""
    name = kind.kind()
    if name == "TensorType":
        return f"results[{next(fresh)}]", "Tensor"
    if name == "TupleType":
        parts = [_result(one, fresh) for one in kind.elements()]
        made, kinds = zip(*parts, strict=True)
        return f"({', '.join(made)},)", f"Tuple[{', '.join(kinds)}]"
    if name == "ListType":
        return "results", "List[Tensor]"
    raise TypeError(
        f"a module with branches gives tensors, and tuples and lists of them, not {kind}"
    )
