"""The torch.compile door: `backend="torchgraft"`, or `backend=graft.backend(Config(...))`."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from torchgraft import _torch
from torchgraft._torch import groups
from torchgraft._torch.marks import each_call_kept
from torchgraft.config import Config
from torchgraft.convert.define import candidates
from torchgraft.fx import dialect, label, meta
from torchgraft.link import Role
from torchgraft.program import Program, build

_NUMBERS = itertools.count()


def backend(
    config: Config | None = None, *, on_program: Callable[[Program], object] | None = None
) -> Callable[..., Any]:
    """A backend for torch.compile; forward and backward both go through the pipeline.

    `on_program` is called with every program as it is compiled.

    >>> import torch, torchgraft as graft
    >>> f = torch.compile(torch.sin, backend=graft.backend(graft.Config(mode="eager")))
    >>> f(torch.zeros(2))
    tensor([0., 0.])
    """
    _learn()
    return functools.partial(_compile, config=config, on_program=on_program)


def __getattr__(name: str) -> Any:
    """`torchgraft`, which is what torch.compile asks this module for, before it traces anything."""
    if name != "torchgraft":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _learn()
    return _compile


def _learn() -> None:
    """Let torch.compile know what broadcast, send and recv mean. Not when this is imported: it
    imports Dynamo, which takes a second."""
    if torch.distributed.is_available():
        import torchgraft.comm.trace  # noqa: F401


def _compile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    config: Config | None = None,
    on_program: Callable[[Program], object] | None = None,
) -> Callable[..., Any]:
    """What torch.compile calls. `mode` and `options` (fields of Config) come from its arguments."""
    fields = dict(options or {})
    if mode is not None:
        fields["mode"] = mode
    config = Config.given(config).replace(**fields)
    name = f"torch.compile {next(_NUMBERS)}"
    compiler = functools.partial(compile_graph, config=config, name=name, on_program=on_program)
    aot = _torch.aot_backend(
        forward=functools.partial(compiler, is_inference=False),
        backward=functools.partial(compiler, is_inference=False, is_backward=True),
        inference=compiler,
        decompositions=dialect.decompositions(candidates(config), config.decompositions),
    )
    with each_call_kept() if label.foretell(gm) else contextlib.nullcontext():
        compiled: Callable[..., Any] = aot(gm, example_inputs)
    return compiled


def compile_graph(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    config: Config,
    name: str,
    on_program: Callable[[Program], object] | None = None,
    is_inference: bool = True,
    is_backward: bool = False,
) -> _torch.Flat:
    """Compile a graph of AOTAutograd; what comes back takes a list of its inputs."""
    gm.meta["fake_mode"] = _torch.fake_mode_of(inputs)
    kind = "inference" if is_inference else "backward" if is_backward else "forward"
    gm.meta["kind"] = kind  # for a pass that treats them differently
    if (frame := groups.compiled_frame()) is not None:
        gm.meta["frame"] = (f"{frame[0]} {kind}", frame[1])
    static = _torch.static_inputs() if not is_backward else frozenset()
    role = Role("torch.compile", is_inference, is_backward, static)
    with _torch.unfaked():
        for node in gm.graph.find_nodes(op="get_attr"):
            if "val" not in node.meta:
                node.meta["val"] = meta.compute(gm, node)
        dialect.canonicalise(gm)
        program = build(gm, config, role, f"{name} {kind}")
    if on_program is not None:
        on_program(program)

    def run(args: list[Any]) -> Sequence[Any]:
        return program.run(args)

    return _torch.boxed(run)
