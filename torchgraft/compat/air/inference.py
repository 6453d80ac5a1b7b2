"""`torchair.inference`: compile one method and keep it."""

from __future__ import annotations

import functools
import hashlib
import os
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.fx import GraphModule

import torchgraft as graft
from torchgraft.compat.air import gears
from torchgraft.compat.air.backend import get_npu_backend, native
from torchgraft.compat.air.config import CompilerConfig
from torchgraft.compat.air.dump import Dumps, rank
from torchgraft.compat.notes import without_effect
from torchgraft.program import Program


def cache_compile(
    func: Callable[..., Any],
    *,
    config: CompilerConfig | None = None,
    dynamic: bool = True,
    cache_dir: str | None = None,
    global_rank: int | None = None,
    tp_rank: int | None = None,
    pp_rank: int | None = None,
    backend: str | None = None,
    ge_cache: bool = False,
    custom_decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Compile a method of a module when it is first called, as one graph.

    Generated code is kept by the code generator, by the content of the graph, so that code which
    has changed is never taken for what it was. `readable_cache` shows what was compiled, which is
    under `cache_dir` (or `$TORCHAIR_CACHE_HOME`, or `./.torchair_cache`).
    """
    module = getattr(func, "__self__", None)
    if not isinstance(func, types.MethodType) or not isinstance(module, torch.nn.Module):
        raise ValueError(
            f"cache_compile: expected a method of a torch.nn.Module, such as model.prefill, "
            f"got {func!r}"
        )
    if ge_cache:
        without_effect("cache_compile.", {"ge_cache": "there is no graph engine to cache for"})
    held = config if config is not None else CompilerConfig()
    get_npu_backend(compiler_config=held)  # says what has no effect
    home = Path(cache_dir or os.environ.get("TORCHAIR_CACHE_HOME") or ".torchair_cache")
    kind = "dynamic" if dynamic else "static"
    parts = [f"{type(module).__name__}_{kind}", f"rank{global_rank or rank()}"]
    home = home.joinpath(*parts, func.__name__)

    def keep(program: Program) -> None:
        if program.gm.meta.get("kind") == "backward":
            raise RuntimeError("Backward cache compilation is not supported yet")
        dumps.finish(program)
        shown = f"{program.report}\n{graft.Graph(program.gm, (), graft.Config())}\n{program.plan}\n"
        digest = hashlib.sha256(str(program.plan).encode()).hexdigest()[:16]
        home.mkdir(parents=True, exist_ok=True)
        (home / f"compiled_module_{digest}").write_text(shown, encoding="utf-8")
        (home / "compiled_module").write_text(shown, encoding="utf-8")

    dumps = Dumps(held, 0)
    made = graft.backend(native(held, dumps, custom_decompositions or {}), on_program=keep)

    def backend_of_gears(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        gears.expect(gm, held)
        return made(gm, example_inputs)  # type: ignore[no-any-return]

    compiled = torch.compile(func, backend=backend_of_gears, dynamic=dynamic, fullgraph=True)
    return functools.wraps(func)(lambda *args, **kwargs: compiled(*args, **kwargs))


def readable_cache(
    cache_bin: str | os.PathLike[str], print_output: bool = True, file: str | None = None
) -> str:
    """What `cache_compile` compiled, as text; it is printed and, with `file`, written there."""
    if not os.path.isfile(cache_bin):
        raise ValueError(f"readable_cache: {os.fspath(cache_bin)!r} is no file of a cache")
    shown = Path(cache_bin).read_text(encoding="utf-8")
    if print_output:
        print(shown)
    if file is not None:
        out: TextIO
        with open(file, "w", encoding="utf-8") as out:
            out.write(shown)
    return shown
