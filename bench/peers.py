"""Who is measured: each peer turns a case into `run(args) -> outputs`, or says why it cannot.

A builder gets the case (already on its device) and a scratch folder that the peers of one model
share, so that the ONNX file and the AOTInductor package are made once. Peers with bound buffers
(ONNX Runtime, OpenVINO) copy the inputs in only when they get another tuple: their best path.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.models import Args, Case

Run = Callable[[Args], Any]
Builder = Callable[[Case, Path], Run]


class Skip(Exception):
    """This peer does not apply here; the message is the reason that the table shows."""


@dataclass(frozen=True)
class Peer:
    """A named builder and the devices it is for."""

    name: str
    build: Builder
    devices: tuple[str, ...] = ("cpu", "cuda")


PEERS: dict[str, Peer] = {}


def _peer(name: str, *devices: str) -> Callable[[Builder], Builder]:
    def add(builder: Builder) -> Builder:
        PEERS[name] = Peer(name, builder, devices or ("cpu", "cuda"))
        return builder

    return add


def names(device: str) -> list[str]:
    """The peers that run on this device type, in the order of the table."""
    return [peer.name for peer in PEERS.values() if device in peer.devices]


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # installed, and broken: not a reason to skip
            raise
        raise Skip(f"{name} is not installed") from error


def _module(case: Case) -> nn.Module:
    if not isinstance(case.model, nn.Module):
        raise Skip("takes modules, not functions")
    return case.model


def _splat(fn: Callable[..., Any]) -> Run:
    return lambda args: fn(*args)


# ---------------------------------------------------------------- PyTorch


@_peer("eager")
def _(case: Case, scratch: Path) -> Run:
    return _splat(case.model)


@_peer("compile")
def _(case: Case, scratch: Path) -> Run:
    return _splat(torch.compile(case.model))


@_peer("compile-reduce", "cuda")
def _(case: Case, scratch: Path) -> Run:
    return _splat(torch.compile(case.model, mode="reduce-overhead"))


@_peer("compile-max")
def _(case: Case, scratch: Path) -> Run:
    return _splat(torch.compile(case.model, mode="max-autotune"))


@_peer("compile-frozen")
def _(case: Case, scratch: Path) -> Run:
    from torch import _inductor as inductor

    # Set for the whole process: Dynamo reads `freezing` itself, so as an option of
    # torch.compile it leaves the weights as inputs and freezes nothing (torch 2.11 to 2.13).
    inductor.config.freezing = True
    if case.args[0].is_cuda:
        return _splat(torch.compile(case.model, mode="reduce-overhead"))
    inductor.config.max_autotune = True
    return _splat(torch.compile(case.model))


def _package(case: Case, scratch: Path) -> Any:
    """The AOTInductor package of this case, loaded; made if no peer made it yet."""
    from torch import _inductor as inductor

    path = scratch / "model.pt2"
    if not path.exists():
        exported = torch.export.export(_module(case), case.args)
        inductor.aoti_compile_and_package(exported, package_path=str(path))
    return inductor.aoti_load_package(str(path))


@_peer("aoti")
def _(case: Case, scratch: Path) -> Run:
    return _splat(_package(case, scratch))


@_peer("aoti-boxed")
def _(case: Case, scratch: Path) -> Run:
    boxed = _package(case, scratch).loader.boxed_run
    return lambda args: boxed(list(args))


@_peer("script")
def _(case: Case, scratch: Path) -> Run:
    traced = torch.jit.trace(_module(case), case.args, check_trace=False)
    return _splat(torch.jit.freeze(traced.eval()))


# ---------------------------------------------------------------- other runtimes


def _onnx(case: Case, scratch: Path) -> str:
    """The path of this case's ONNX file, exported if no peer did so yet."""
    _import("onnxscript")
    path = scratch / "model.onnx"
    if not path.exists():
        torch.onnx.export(_module(case), case.args, str(path), dynamo=True, verbose=False)
    return str(path)


def _bound(case: Case, bind: Callable[[list[Tensor], list[Tensor]], Callable[[], object]]) -> Run:
    """Fixed buffers for inputs and outputs; `bind` attaches them and gives what runs once."""
    inputs = [t.contiguous().clone() for t in case.args]
    with torch.inference_mode():
        produced = case.model(*case.args)
    produced = list(produced) if isinstance(produced, Sequence) else [produced]
    outputs = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in produced]
    go, held = bind(inputs, outputs), None

    def run(args: Args) -> list[Tensor]:
        nonlocal held
        if args is not held:
            for buffer, value in zip(inputs, args, strict=True):
                buffer.copy_(value)
            held = args
        go()
        return outputs

    return run


@_peer("ort", "cpu")
def _(case: Case, scratch: Path) -> Run:
    ort = _import("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = ort.InferenceSession(
        _onnx(case, scratch), options, providers=["CPUExecutionProvider"]
    )

    def bind(inputs: list[Tensor], outputs: list[Tensor]) -> Callable[[], object]:
        binding = session.io_binding()
        for spec, t in zip(session.get_inputs(), inputs, strict=True):
            array = t.numpy()
            binding.bind_input(spec.name, "cpu", 0, array.dtype, tuple(t.shape), t.data_ptr())
        for spec, t in zip(session.get_outputs(), outputs, strict=True):
            dtype = t.numpy().dtype
            binding.bind_output(spec.name, "cpu", 0, dtype, tuple(t.shape), t.data_ptr())
        return lambda: session.run_with_iobinding(binding)

    return _bound(case, bind)


@_peer("openvino", "cpu")
def _(case: Case, scratch: Path) -> Run:
    openvino = _import("openvino")
    compiled = openvino.Core().compile_model(
        _onnx(case, scratch),
        "CPU",
        {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
            # Otherwise it computes in bfloat16 where the processor has it.
            "INFERENCE_PRECISION_HINT": "f32",
        },
    )

    def bind(inputs: list[Tensor], outputs: list[Tensor]) -> Callable[[], object]:
        request = compiled.create_infer_request()
        for i, t in enumerate(inputs):
            request.set_input_tensor(i, openvino.Tensor(t.numpy(), shared_memory=True))
        for i, t in enumerate(outputs):
            request.set_output_tensor(i, openvino.Tensor(t.numpy(), shared_memory=True))
        return request.infer

    return _bound(case, bind)


# ---------------------------------------------------------------- ours


class _Ours:
    """A compiled program, and what can be said of it besides its time."""

    def __init__(self, case: Case, mode: str) -> None:
        graft = _import("torchgraft")
        self.compiled = graft.compile(case.model, inputs=case.args, mode=mode)
        self.args = case.args

    def __call__(self, args: Args) -> Any:
        return self.compiled(*args)

    def facts(self) -> dict[str, Any]:
        """Launches, streams and waits of the plan, and the floor: the time that its bytes and
        operations take at the rates measured here, one launch a region."""
        from torchgraft.fx.cost import main_dtype, measure
        from torchgraft.inspect.cost import costs
        from torchgraft.plan import Wait

        plan = self.compiled.plan
        program, values = self.compiled.program_for(self.args)
        device = next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))
        computed = (node.meta.get("val") for node in program.gm.graph.nodes)  # inputs may be ids
        machine = measure(device, main_dtype(computed))
        return {
            "launches": len(plan.launches),
            "streams": len(plan.streams),
            "waits": sum(isinstance(step, Wait) for step in plan.steps),
            "floor µs": round(sum(map(machine.seconds, costs(program))) * 1e6, 1),
        }


def _graft(case: Case, mode: str) -> Run:
    return _Ours(case, mode)


@_peer("graft")
def _(case: Case, scratch: Path) -> Run:
    return _graft(case, "default")


@_peer("graft-reduce", "cuda")
def _(case: Case, scratch: Path) -> Run:
    return _graft(case, "reduce-overhead")


@_peer("graft-max")
def _(case: Case, scratch: Path) -> Run:
    return _graft(case, "max-autotune")


@_peer("graft-backend")
def _(case: Case, scratch: Path) -> Run:
    _import("torchgraft")
    return _splat(torch.compile(case.model, backend="torchgraft"))
