"""A compiled program inside a ScriptModule, so that it saves, loads and runs as one.

The module holds the program's recipe as a tensor of bytes: the TorchScript it came from, its inputs
and its config. `torch_aie::run` compiles a recipe when it first meets it in a process; the code
generator's cache makes that cheap on a machine that has compiled it before.
"""

from __future__ import annotations

import hashlib
import io
import json
import threading
import warnings
import zipfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import torchgraft as graft
from torchgraft import _torch
from torchgraft.compat import device as devices
from torchgraft.errors import UnsupportedFile

_SCHEMA = "run(Tensor engine, Tensor[] xs) -> Tensor[]"
_FIELDS = (
    "mode",
    "precision",
    "require_full_compilation",
    "min_block_size",
    "torch_executed_ops",
    "torch_executed_modules",
)
_MOST = 1 << 31


class _Engines:
    """The programs of this process, by the hash of their recipe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._programs: dict[bytes, graft.Compiled] = {}

    def get(self, recipe: bytes) -> graft.Compiled:
        """The program of a recipe, compiled when it is first asked for."""
        key = hashlib.sha256(recipe).digest()
        with self._lock:
            if key not in self._programs:
                self._programs[key] = build(recipe)
            return self._programs[key]

    def clear(self) -> None:
        with self._lock:
            self._programs.clear()


ENGINES = _Engines()


def pack(
    script: torch.jit.ScriptModule, inputs: Sequence[graft.Input], config: graft.Config
) -> bytes:
    """The recipe of a program."""
    held = io.BytesIO()
    torch.jit.save(script, held)
    about = {
        "format": 1,
        "inputs": [_described(one) for one in inputs],
        "config": {name: _plain(getattr(config, name)) for name in _FIELDS},
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in (("about.json", json.dumps(about).encode()), ("m.pt", held.getvalue())):
            archive.writestr(zipfile.ZipInfo(name), data)  # no time in it: equal bytes for equal
    return out.getvalue()


def build(recipe: bytes) -> graft.Compiled:
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script = torch.jit.load(io.BytesIO(model), map_location=device())  # type: ignore[no-untyped-call]
    return graft.compile(script, inputs, config=config)


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
    return value


def device() -> torch.device:
    """Where programs run."""
    return torch.device(devices.kind(), torch.npu.current_device())  # type: ignore[attr-defined]


def _run(engine: Tensor, xs: list[Tensor]) -> list[Tensor]:
    program = ENGINES.get(engine.cpu().numpy().tobytes())
    given = program(*(x.to(device()) for x in xs))  # a tensor that is there is not copied
    return [leaf for leaf in _torch.flatten(given)[0] if isinstance(leaf, Tensor)]


_make: Any = torch.library.Library  # untyped in torch
_LIBRARY: Any = _make("torch_aie", "DEF")  # lives as long as the process
_LIBRARY.define(_SCHEMA)
_LIBRARY.impl("run", _run, "CompositeExplicitAutograd")


def wrap(
    script: torch.jit.ScriptModule, recipe: bytes, casts: Sequence[str]
) -> torch.jit.ScriptModule:
    """A ScriptModule with the arguments and results of `script` that runs the recipe's program.

    `casts` are expressions, one for each argument, with `{}` in its place.
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
    raise TypeError(f"a compiled module gives tensors, and tuples and lists of them, not {kind}")
