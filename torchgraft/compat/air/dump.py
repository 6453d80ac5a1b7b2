"""What `debug.*` and `dump_config` write: graphs, tensors, and a table of operators."""

from __future__ import annotations

import csv
import os
import re
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from torchgraft import _torch
from torchgraft.compat.air.config import CompilerConfig
from torchgraft.compat.watch import watch
from torchgraft.fx import edit
from torchgraft.fx.edit import target_name
from torchgraft.inspect import dump as graphs
from torchgraft.inspect import netron
from torchgraft.program import Program


class Dumps:
    """The dumps of one compile. Each compile has its number; nothing is shared between them."""

    def __init__(self, config: CompilerConfig, number: int) -> None:
        self.config, self.number = config, number
        debug, runtime = config.debug, config.dump_config
        self.tensors = bool(debug.data_dump.type.raw) or bool(runtime.enable_dump)
        summary = bool(debug.fx_summary.type.raw) and bool(debug.fx_summary.skip_compile)
        self.eager = bool(debug.run_eagerly) or self.tensors or summary

    def original(self, gm: GraphModule, example_inputs: Sequence[Any], config: Any) -> None:
        """A pass that changes nothing: it writes the graph as it comes."""
        self._graph(gm, "original")

    def finish(self, program: Program) -> None:
        """Write what a finished program has to show, and let it write at its calls."""
        self._graph(program.gm, "optimized")
        if self.config.debug.fx_summary.type.raw:
            self._summary(program)
        if self.tensors:
            program.run = Recorder(program.gm, self.config, self.number)
        else:
            watch(program)

    def _graph(self, gm: GraphModule, stage: str) -> None:
        kind = self.config.debug.graph_dump.type.raw
        if kind is None:
            return
        folder = Path(self.config.debug.graph_dump.path.raw or ".")
        folder.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now(timezone.utc).strftime("%Y%m%d%H%M%S%f")
        name = f"dynamo_{stage}_graph_{self.number}_rank_{rank()}_pid_{os.getpid()}_ts_{stamp}"
        (folder / f"{name}.{kind}").write_text(render(gm, kind), encoding="utf-8")

    def _summary(self, program: Program) -> None:
        path = Path(f"summary_graph_{self.number}_rank_{rank()}_pid_{os.getpid()}.csv")
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["node", "op", "runs", "why", "line"])
            for node in program.report.nodes:
                table.writerow([node.node, node.op, node.runs, node.reason, node.line])


def render(gm: GraphModule, kind: str) -> str:
    """A graph as text: `txt`, `pbtxt` (for TensorBoard and Netron) or `py` (runs again)."""
    if kind == "py":
        return graphs.script(gm, "A graph as TorchAir's users dump it.")
    return netron.pbtxt(gm) if kind == "pbtxt" else f"{edit.text(gm)}\n"


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class Recorder:
    """Runs a graph node by node and writes tensors as `.npy` files."""

    def __init__(self, gm: GraphModule, config: CompilerConfig, number: int) -> None:
        self.gm, self.number, self.step = gm, number, 0
        debug, runtime = config.debug.data_dump, config.dump_config
        self.filter = debug.filter.raw
        by_debug = bool(debug.type.raw)
        self.folder = Path((debug.path.raw or ".") if by_debug else runtime.dump_path.raw)
        self.parts = "all" if by_debug else runtime.dump_mode.raw
        self.steps = "" if by_debug else runtime.dump_step.raw
        self.layers = set() if by_debug else set(runtime.dump_layer.raw.split())

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        step, self.step = self.step, self.step + 1
        interpreter = _Recording(self, step) if self._wanted(step) else Interpreter(self.gm)
        with torch.no_grad():
            result: Sequence[Any] = interpreter.run(*args)
        return result

    def _wanted(self, step: int) -> bool:
        spans = [part.partition("-") for part in self.steps.split("|") if part]
        return not spans or any(int(a) <= step <= int(b or a) for a, _, b in spans)

    def keep(self, step: int, node: Node, part: str, values: Any) -> None:
        """Write the tensors among some values."""
        if self.parts not in ("all", part.lower()) or (
            self.layers and node.name not in self.layers
        ):
            return
        import numpy

        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        home = self.folder / f"worldsize{world}_global_rank{rank()}" / f"graph_{self.number}"
        home = home / str(step)
        home.mkdir(parents=True, exist_ok=True)
        target = re.sub(r"[^\w.]", "_", target_name(node.target))
        leaves = _torch.flatten(values)[0]
        for i, value in enumerate(v for v in leaves if isinstance(v, torch.Tensor)):
            stamp = time.time_ns() // 1000
            held = value.detach().cpu()
            held = held.float() if held.dtype == torch.bfloat16 else held
            numpy.save(home / f"{node.name}-{target}.{part}.{i}.{stamp}.npy", held.numpy())


class _Recording(Interpreter):
    def __init__(self, recorder: Recorder, step: int) -> None:
        super().__init__(recorder.gm)
        self.recorder, self.at = recorder, step

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        wanted = n.op == "call_function" and (
            self.recorder.filter is None or self.recorder.filter(n) is not None
        )
        if wanted:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self.recorder.keep(self.at, n, "INPUT", (args, kwargs))
            self.recorder.keep(self.at, n, "OUTPUT", result)
        return result
