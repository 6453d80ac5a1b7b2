"""`get_npu_backend` and `get_compiler`: TorchAir's doors, over `graft.backend`."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch.fx import GraphModule

import torchgraft as graft
from torchgraft.backend import compile_graph
from torchgraft.compat import notes, settings
from torchgraft.compat.air import convert, dump, gears, ops, scope
from torchgraft.compat.air.config import (
    CompilerConfig,
    NpuGraphExConfig,
    as_torchair,
    from_options,
    with_options,
)
from torchgraft.compat.air.log import logger
from torchgraft.errors import NotOnThisDevice
from torchgraft.passes.pattern.define import Pattern
from torchgraft.passes.registry import current
from torchgraft.program import Program

MODES = {
    "max-autotune": "default",
    "reduce-overhead": "reduce-overhead",
    "npugraph_ex": "reduce-overhead",
}
"""TorchAir's modes choose between two runtimes of the NPU; what a program computes is the same."""
_NUMBERS = itertools.count()


def get_npu_backend(
    *,
    compiler_config: CompilerConfig | None = None,
    custom_decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """A backend for torch.compile."""
    config = compiler_config if compiler_config is not None else CompilerConfig()
    if not isinstance(config, CompilerConfig):
        raise TypeError(f"compiler_config: expected a CompilerConfig, got {config!r}")
    _check(config)
    return functools.partial(
        npu_backend, compiler_config=config, decompositions=dict(custom_decompositions or {})
    )


def npu_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    compiler_config: CompilerConfig | None = None,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """What torch.compile calls. `options` are those of npugraph_ex, for this compile only."""
    config = compiler_config if compiler_config is not None else CompilerConfig()
    if options:
        config = with_options(config, options)
    gears.expect(gm, config)
    dumps = dump.Dumps(config, next(_NUMBERS))
    made = graft.backend(native(config, dumps, decompositions or {}), on_program=dumps.finish)
    compiled: Callable[..., Any] = made(gm, example_inputs)
    return compiled


def npugraph_ex_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    compiler_config: NpuGraphExConfig | None = None,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """The backend `npugraph_ex`: flat options, the same pipeline."""
    given = from_options(options or {}, compiler_config)
    notes.without_effect("npugraph_ex.", given.idle())
    config = as_torchair(given)
    return npu_backend(gm, example_inputs, compiler_config=config, decompositions=decompositions)


def npugraph_ex_door(
    *,
    compiler_config: NpuGraphExConfig | None = None,
    custom_decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """`npugraph_ex.get_npu_backend`."""
    config = compiler_config if compiler_config is not None else NpuGraphExConfig()
    if not isinstance(config, NpuGraphExConfig):
        raise TypeError(f"compiler_config: expected npugraph_ex's CompilerConfig, got {config!r}")
    return functools.partial(
        npugraph_ex_backend,
        compiler_config=config,
        decompositions=dict(custom_decompositions or {}),
    )


def compile_fx(
    gm: GraphModule,
    example_inputs: Sequence[Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """A graph of Dynamo, compiled; without example inputs, at its first call and for that."""
    if example_inputs is not None:
        return npugraph_ex_backend(gm, example_inputs, options=options)
    from_options(options or {})  # a name that is wrong is said now
    made: list[Callable[..., Any]] = []

    def first(*args: Any) -> Any:
        if not made:
            made.append(npugraph_ex_backend(gm, args, options=options))
        return made[0](*args)

    return first


class Compiled:
    """A compiled graph of AOTAutograd. Call it with the graph's inputs."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __call__(self, *args: Any) -> Any:
        return self.program.run(list(args))

    def get_code(self) -> str:
        """The plan that runs, as text."""
        return str(self.program.plan)

    def dump_artifacts(self) -> NoReturn:
        """What TorchAir keeps of a compiled graph, which its runtime alone can load."""
        raise NotOnThisDevice("dump_artifacts", "Use graft.compile(model, ...).save(path).")

    def load_artifacts(self, artifacts: Any) -> NoReturn:
        raise NotOnThisDevice("load_artifacts", "Use graft.load(path).")


def get_compiler(
    compiler_config: CompilerConfig | NpuGraphExConfig | None = None,
) -> Callable[..., Compiled]:
    """A compiler of graphs, such as `aot_module_simplified(fw_compiler=...)` takes."""
    config = compiler_config if compiler_config is not None else CompilerConfig()
    if isinstance(config, NpuGraphExConfig):
        config = as_torchair(config)
    _check(config)

    def compiler(gm: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        number = next(_NUMBERS)
        dumps = dump.Dumps(config, number)
        found: list[Program] = []
        compile_graph(
            gm,
            example_inputs,
            config=native(config, dumps, {}),
            name=f"torchair {number}",
            on_program=found.append,
        )
        dumps.finish(found[0])
        return Compiled(found[0])

    return compiler


def native(
    config: CompilerConfig, dumps: dump.Dumps, decompositions: Mapping[Any, Callable[..., Any]]
) -> graft.Config:
    """The same as a config of torchgraft."""
    pre = [scope.notes, ops.events, dumps.original, _told(config, "post_grad_custom_pre_pass")]
    post = [_told(config, "post_grad_custom_post_pass"), convert.automatic]
    return graft.Config(
        mode="eager" if dumps.eager else settings.mode(MODES[config.mode.value]),
        pre_passes=tuple(one for one in pre if one is not None),
        post_passes=tuple(one for one in post if one is not None),
        decompositions=decompositions,
        registry=None if config.experimental_config.pattern_fusion_pass else _without_patterns(),
    )


def _told(config: CompilerConfig, name: str) -> Callable[..., Any] | None:
    """The pass of an option, given TorchAir's config, with the graph in the log around it."""
    fn = getattr(config, name).raw
    if fn is None:
        return None

    @functools.wraps(fn)
    def run(gm: GraphModule, example_inputs: Sequence[Any], _: Any) -> None:
        kind = "backward" if gm.meta.get("kind") == "backward" else "forward"
        logger.debug("[%s] before [%s] execution, graph is %s", kind, name, gm.graph)
        fn(gm, example_inputs, config)
        ops.use_air(gm)
        logger.debug("[%s] after [%s] execution, graph is %s", kind, name, gm.graph)

    return run


def _without_patterns() -> graft.Registry:
    kept = graft.Registry()
    for entry in current():
        if not isinstance(entry, Pattern):
            kept.register(entry)
    for one in current().converters:
        kept.converters.add(one)
    return kept


def _check(config: CompilerConfig) -> None:
    if config.mode.value == "reduce-overhead":
        warnings.warn(
            'mode "reduce-overhead" is deprecated: use backend="npugraph_ex"',
            DeprecationWarning,
            stacklevel=3,
        )
    kind = config.debug.graph_dump.type.raw
    if config.mode.value != "max-autotune" and kind not in (None, "py"):
        raise NotImplementedError(
            f"Graph dump for aclGraph only support 'py' type, got {kind!r}: use it, or "
            f'config.mode = "max-autotune"'
        )
    notes.without_effect("CompilerConfig.", config.idle())
