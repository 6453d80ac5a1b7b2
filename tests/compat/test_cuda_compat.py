"""Scripts for the NPU where CUDA stands for it, each as a process of its own. The CPU stands in
where there is no CUDA: the same scripts, slower to start than what they show there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import process
import pytest

from torchgraft.compat import settings

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.slow]),
]
each_device = pytest.mark.parametrize("device", DEVICES)
SCRIPTS_AT = HERE / "scripts"
GENERATED = ("zoo_bert.py", "zoo_halves.py", "aie_quantize.py")
"""Scripts whose code is generated on the CPU, too: for all it would be minutes of a compiler."""

WATCHED = """
import faulthandler, sys
faulthandler.enable()  # a fault in C++ says where

def begin(name):
    print("begins:", name, file=sys.stderr, flush=True)
    faulthandler.dump_traceback_later(300, exit=True)  # as does what hangs

"""
SCRIPTS = f"""{WATCHED}
import runpy, traceback, torch
for path in sys.argv[1:]:
    begin(path)
    try:
        ran = runpy.run_path(path, run_name="__main__")
        torch.testing.assert_close(
            ran["result"], ran["expected"], rtol=1e-2, atol=1e-2, check_device=False
        )
        print("agrees:", path, flush=True)
    except Exception:
        traceback.print_exc()
"""
CAPTURES = f"""{WATCHED}
import traceback, torch, torch_npu
sys.path.insert(0, sys.argv[1])
import captures
for name, check in captures.CHECKS.items():
    begin(name)
    try:
        torch.manual_seed(0)
        check()
        print("captured:", name, flush=True)
    except Exception:
        traceback.print_exc()
"""
NAMES = """
import sys, threading, torch, torch_npu
kind = sys.argv[1]
found = [
    torch.ones(2).npu(), torch.ones(2).npu(0, True), torch.ones(2).to("npu:0"), torch.ones(2).to(0),
    torch.ones(2, device="npu"), torch.ones(2, device=torch.device("npu", 0)),
    torch.ones(2, device=torch.device(type="npu", index=0)), torch.nn.Linear(2, 2).npu().weight,
    torch.nn.Linear(2, 2, device="npu:0").weight, torch.nn.Linear(2, 2).to("npu").weight,
]
thread = threading.Thread(target=lambda: found.append(torch.ones(2, device="npu")))
thread.start(); thread.join()
assert {x.device.type for x in found} == {kind}, found
old = [
    torch.npu.HalfTensor([1, 2]), torch.ones(2).type(torch.npu.HalfTensor),
    torch.ones(2).type("torch.npu.HalfTensor"),
]
assert {(x.device.type, x.dtype) for x in old} == {(kind, torch.float16)}, old
assert isinstance(old[0], torch.npu.HalfTensor) and not isinstance(old[0], torch.npu.FloatTensor)
assert torch.get_device_module("npu") is torch.npu
with torch.random.fork_rng(device_type="npu"):
    drawn = torch.rand(2, device="npu")
assert torch.equal(drawn, torch.rand(2, device="npu"))
from torch_npu.npu.memory import empty_cache
from torch_npu.npu.amp.grad_scaler import GradScaler
assert GradScaler(8.0, dynamic=False).get_scale() == 8 and not torch.npu.is_autocast_enabled()
torch.npu.set_sync_debug_mode(0)
assert torch.npu.get_sync_debug_mode() == 0 and torch.npu.get_allocator_backend() == "native"
cache = torch.zeros(2, 4, device="npu")
torch_npu.scatter_update_(cache, torch.tensor([1, 2], device="npu"), cache.new_ones(2, 2), -1)
assert cache.tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
assert all(x.is_npu for x in found)
npu = torch.npu
with npu.device("npu:0"):
    side, event = npu.Stream("npu:0"), npu.Event()
assert isinstance(side, npu.Stream) and isinstance(event, npu.Event)
x = torch.ones(4, device="npu")
side.wait_stream(npu.current_stream("npu:0"))
with npu.stream(side):
    assert npu.current_stream() == side
    y = x * 3
    event.record(side)
npu.current_stream().wait_event(event)
npu.synchronize("npu:0")
side.synchronize()
assert y.sum().item() == 12 and side.query() and event.query()
assert npu.memory_allocated("npu:0") <= npu.max_memory_allocated(0)
assert npu.memory.memory_reserved() >= npu.memory_allocated()
assert isinstance(npu.memory_stats(), dict) and isinstance(npu.memory_summary(), str)
free, total = npu.mem_get_info("npu:0")
assert 0 < free <= total
npu.empty_cache(); npu.reset_peak_memory_stats(); npu.set_per_process_memory_fraction(0.9)
assert npu.get_device_properties("npu:0").total_memory > 0
assert "in place of an NPU" in npu.get_device_name(), npu.get_device_name()
assert npu.is_available() and npu.device_count() >= 1 and npu.current_device() == 0
assert not hasattr(npu, "get_soc_version")
state = npu.get_rng_state("npu:0")
one = torch.rand(3, device="npu"); npu.set_rng_state(state, "npu:0")
assert torch.equal(one, torch.rand(3, device="npu"))
drawn = [torch.rand(2, device="npu", generator=torch.Generator("npu").manual_seed(3)) for _ in "ab"]
assert torch.equal(*drawn)
with torch.autocast("npu"):
    assert (x[None] @ x[:, None]).dtype == torch.float16
with torch.amp.autocast(device_type="npu", dtype=torch.bfloat16):
    assert (x[None] @ x[:, None]).dtype == torch.bfloat16
pinned = torch.arange(4.0).pin_memory()
assert pinned.is_pinned() == (kind == "cuda")
assert torch.equal(pinned.npu(non_blocking=True).cpu(), torch.arange(4.0))
torch.save({"x": x}, "x.pt")
assert torch.load("x.pt", map_location="npu:0")["x"].device.type == kind
assert torch.load("x.pt", map_location={f"{kind}:0": "npu:0"})["x"].sum() == 4
torch.set_default_device("npu")
assert torch.ones(1).device.type == kind
torch.set_default_device(None)
print("names work")
"""
RANKS = """
import torch, torch_npu
import torch.distributed as dist
torch.npu.set_device(0)
dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
x = torch.full((2,), 3.0, device="npu:0")
dist.all_reduce(x)
dist.barrier()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).npu(), device_ids=[0])
model(x).sum().backward()
print(x.tolist(), model.module.weight.grad.tolist(), dist.get_backend())
dist.destroy_process_group()
"""
COMPILED = """
import torch, torch_npu, torchair
npu, side = torch.npu, torch.npu.Stream()

def model(x, gamma):
    main = npu.current_stream()
    side.wait_stream(main)
    with npu.stream(side):
        y = x @ x
    z = torch_npu.npu_rms_norm(x, gamma)[0] + torch.zeros(4, device="npu")
    main.wait_stream(side)
    return y + z

x, gamma = torch.randn(4, 4).npu(), torch.ones(4, device="npu")
expected = model(x, gamma)
for mode in ("max-autotune", "reduce-overhead"):
    torch.compiler.reset()
    config = torchair.CompilerConfig()
    config.mode = mode
    compiled = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))
    for _ in range(3):
        found = compiled(x, gamma)
    torch.npu.synchronize()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
counts = torch.tensor([1, 3], device="npu")
weight = torch.randn(2, 4, 6).npu()
[y] = torch_npu.npu_grouped_matmul(
    [x], [weight], group_list=counts, group_list_type=1, split_item=2, group_type=0
)
torch.testing.assert_close(y, torch.cat([x[:1] @ weight[0], x[1:] @ weight[1]]))
print("compiled")
"""


def run(
    folder: Path, device: str, text: str, *args: str, mode: str | None = None
) -> subprocess.CompletedProcess[str]:
    """A script with `torchgraft run`, from these sources."""
    (folder / "script.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if mode is not None:
        environment[settings.MODE] = mode
    command = [sys.executable, "-m", "torchgraft", "run", "--device", device, "script.py", *args]
    return process.run(command, cwd=folder, env=environment)


def said(ran: subprocess.CompletedProcess[str]) -> str:
    """What is known of a run that ended early."""
    return f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"


@each_device
def test_scripts_of_the_model_zoos(tmp_path: Path, device: str) -> None:
    paths = sorted(str(path) for kind in ("zoo", "aie") for path in SCRIPTS_AT.glob(f"{kind}_*.py"))
    assert len(paths) == 8
    generated = [path for path in paths if device != "cpu" or Path(path).name in GENERATED]
    for mode, some in ((None, generated), ("eager", [p for p in paths if p not in generated])):
        if some:
            ran = run(tmp_path, device, SCRIPTS, *some, mode=mode)
            assert ran.stdout.splitlines() == [f"agrees: {path}" for path in some], said(ran)


@each_device
@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_a_pass_with_streams(tmp_path: Path, device: str, mode: str) -> None:
    path = str(SCRIPTS_AT / "air_streams.py")
    ran = run(tmp_path, device, _with_mode(mode), path)
    assert f"agrees: {path}" in ran.stdout, said(ran)
    assert "before [post_grad_custom_pre_pass]" in ran.stdout
    [trace] = (tmp_path / "prof").glob("*.json")
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    assert any("stream_1" in str(event.get("args")) for event in events)
    if device == "cuda":
        assert any(event.get("cat") == "kernel" for event in events), "the profiler sees the GPU"


def _with_mode(mode: str) -> str:
    """The driver, for a script that takes its mode as an argument."""
    return SCRIPTS.replace("    try:", f"    sys.argv = [path, {mode!r}]\n    try:", 1)


@each_device
def test_a_training_loop(tmp_path: Path, device: str) -> None:
    path = str(SCRIPTS_AT / "npu_training.py")
    ran = run(tmp_path, device, SCRIPTS, path)
    assert ran.stdout.splitlines() == [
        "falls True",
        "time True True",
        "peak True",
        "kind True True True",
        "random True",
        f"agrees: {path}",
    ], said(ran)


@each_device
def test_scripts_as_the_documentation_has_them(tmp_path: Path, device: str) -> None:
    paths = [str(HERE / "scripts" / name) for name in ("air_cache.py", "npu_attention.py")]
    ran = run(tmp_path, device, SCRIPTS, *paths)
    assert ran.stdout.splitlines() == [
        f"agrees: {paths[0]}",
        "torch.float16 True",
        f"agrees: {paths[1]}",
    ], said(ran)
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert len(list((tmp_path / "trace").glob("*.json"))) == 1


@pytest.mark.feature("torch_npu", "torch.npu on CUDA: torch.cuda, by the NPU's names")
@each_device
def test_names_of_the_device(tmp_path: Path, device: str) -> None:
    ran = run(tmp_path, device, NAMES, device)
    assert ran.stdout == "names work\n", said(ran)


@each_device
def test_captured_graphs(tmp_path: Path, device: str) -> None:
    import captures

    ran = run(tmp_path, device, CAPTURES, str(HERE))
    assert ran.stdout.splitlines() == [f"captured: {name}" for name in captures.CHECKS], said(ran)


@each_device
def test_one_rank(tmp_path: Path, device: str) -> None:
    ran = run(tmp_path, device, RANKS)
    assert ran.stdout == "[3.0, 3.0] [[3.0, 3.0], [3.0, 3.0]] hccl\n", said(ran)


@each_device
def test_a_compiled_model_with_streams_and_fused_operators(tmp_path: Path, device: str) -> None:
    ran = run(tmp_path, device, COMPILED)
    assert ran.stdout == "compiled\n", said(ran)
