"""`torchgraft run`, `--check`, `compat-path`, and `install`: how a script gets at the packages."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import process
import pytest
import torch
from click.testing import CliRunner

import torchgraft as graft
import torchgraft.compat
from torchgraft.cli import main
from torchgraft.compat import check, device
from torchgraft.errors import NotOnThisDevice, WouldShadow
from torchgraft.native import driver

ROOT = Path(__file__).parents[2]


def torchgraft_command(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torchgraft", *args]
    return process.run(command, cwd=cwd, env=environment)


@pytest.mark.feature("torchgraft", "run SCRIPT ARGS: as __main__, its own argv and sys.path")
def test_a_script_runs_as_main(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "script.py").write_text(
        "import sys, torch, torchair, beside\n"
        "assert __name__ == '__main__'\n"
        "x = torch.ones(2, device='npu:0').npu()\n"
        "print(sys.argv[1:], beside.VALUE, x.is_npu, torch.device('npu').type)\n"
        "model = torch.compile(lambda x: x + 1, backend='npu')\n"
        "print(model(x))\n"
        "raise KeyError('mine')\n"
    )
    ran = torchgraft_command(
        "run", "--device", "cpu", "--mode", "eager", "script.py", "a", "--check", cwd=tmp_path
    )
    assert ran.stdout.splitlines() == ["['a', '--check'] 7 True cpu", "tensor([2., 2.])"]
    assert ran.returncode == 1
    said = ran.stderr[ran.stderr.index("Traceback") :]  # torch may have warned before
    assert said.splitlines()[:2] == [
        "Traceback (most recent call last):",
        '  File "script.py", line 7, in <module>',
    ]
    assert ran.stderr.splitlines()[-1] == "KeyError: 'mine'"


@pytest.mark.feature("torchgraft", "compat-path: a test suite with the packages on PYTHONPATH")
def test_a_path_is_enough(tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["compat-path"])
    assert shown.exit_code == 0, shown.output
    (tmp_path / "test_it.py").write_text(
        "import torch_aie, torch\n"
        "def test_it():\n"
        "    assert torch.ones(1).to('npu:0').device.type == 'cpu'\n"
        "    torch.ops.air.scope_exit\n"
    )
    environment = {**os.environ, "PYTHONPATH": shown.output.strip(), device.VARIABLE: "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    ran = process.run(command, cwd=tmp_path, env=environment)
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.feature("torchgraft", "run --check: what will not work, without running")
def test_a_check_finds_what_fails_and_what_does_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torchair as air; from torch_npu.contrib import transfer_to_npu, missing\n"
        "from torchair.llm_datadist import create_npu_tensors\n"
        "from torchair.ge import Const, Nothing\n"
        "raise SystemExit('this must not run')\n"
        "config = air.CompilerConfig()\n"
        "config.ge_config.oo_level = 'O1'\n"
        "config.debug.run_eagerly = True\n"
        "air.npu_format_cast_via_cpu(1)\n"
        "torch.ops.aie.flash_attention(1)\n"
        "air.scope.npu_stream_switch('s')\n"
        "config.mode = 'max-autotun'\n"
        "config.debug.graph_dmup.type = 'py'\n"
        "config.debug.graph_dump.type = chosen\n"
        "torch.npu.NPUGraph().replay()\n"
        "torch.npu.ExternalEvent()\n"
        "torch.ops.npu.npu_mla_prolog(1)\n"
        "torch.npu.synchronise()\n"
    )
    is_available = torch.cuda.is_available
    found = check.check(script)
    assert torch.cuda.is_available is is_available, "nothing is put in the place of CUDA"
    assert [(problem.line, problem.what, problem.fatal) for problem in found] == [
        (1, "torch_npu.contrib.missing", True),
        (2, "torchair.llm_datadist.create_npu_tensors", True),
        (3, "torchair.ge.Nothing", True),
        (6, "ge_config.oo_level", False),
        (8, "torchair.npu_format_cast_via_cpu", True),
        (9, "torch.ops.aie", True),
        (9, "torch.ops.aie.flash_attention", True),
        (11, "mode", True),
        (12, "debug.graph_dmup.type", True),
        (15, "torch.npu.ExternalEvent", True),
        (16, "torch.ops.npu.npu_mla_prolog", True),
        (17, "torch.npu.synchronise", True),
    ]
    shown = CliRunner().invoke(main, ["run", "--check", str(script)])
    assert shown.exit_code == 1
    assert f"{script}:6: ge_config.oo_level: without effect: " in shown.output
    script.write_text("import torchair\n")
    shown = CliRunner().invoke(main, ["run", "--check", str(script)])
    assert (shown.exit_code, shown.output) == (0, "")


def test_a_check_reads_the_arguments_of_calls(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, mindietorch, torch_aie as aie, torchair\n"
        "from torch_aie import export_engine\n"
        "mindietorch.compile(model, inputs=[mindietorch.Input((1, 3), typ=torch.int32)],\n"
        "    precision_policy=mindietorch.PrecisionPolicy.FP16, soc_version=chosen,\n"
        "    socversion='Ascend310P3', optimization_level=5, min_block_size=1)\n"
        "aie.compile(model, inputs=shapes, soc_version='Ascend910B4', **more)\n"
        "aie.compile(model, inputs=shapes, soc_version='Ascend310P3')\n"
        "export_engine(model, method_name='forward', path='x.om', allow_tensor_replace=True)\n"
        "torchair.inference.cache_compile(model.decode, config=config, cache='x')\n"
        "torch.compile(model, backend='mindie', options={'min_block': 1, 'soc_version': soc})\n"
        "torch.compile(model, backend='npugraph_ex', options={'forced': 1, 'capture_limit': 3})\n"
        "torch.compile(model, backend='inductor', options={'shape_padding': True})\n"
        "other.compile(model, anything=1)\n"
    )
    found = check.check(script)
    assert [(problem.line, problem.what, problem.fatal) for problem in found] == [
        (3, "mindietorch.Input(typ=...)", True),
        (4, "mindietorch.compile(soc_version=...)", False),
        (5, "mindietorch.compile(optimization_level=...)", True),
        (5, "mindietorch.compile(socversion=...)", True),
        (6, "torch_aie.compile(soc_version=...)", False),
        (8, "torch_aie.export_engine(allow_tensor_replace=...)", True),
        (9, "torchair.inference.cache_compile(cache=...)", True),
        (10, "torch.compile(options=...)", True),
        (10, "torch.compile(options=...)", False),
        (11, "torch.compile(options=...)", True),
        (11, "torch.compile(options=...)", False),
    ]
    assert (
        found[2].why == "ValueError: optimization_level: expected a whole number from 0 to 2, got 5"
    )
    assert "got an unexpected argument 'socversion'; it takes" in found[3].why
    assert "'min_block'" in found[7].why
    assert found[8].why.startswith("soc_version: the program is compiled for the machine")


def test_an_installed_package_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchair.py").write_text("REAL = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(WouldShadow, match=r"torchair: .*torchair\.py\nRun the script with plain"):
        torchgraft.compat.install()
    with pytest.raises(WouldShadow):
        torchgraft.compat.python_path()
    torchgraft.compat.install(force=True)
    import torchair

    assert not hasattr(torchair, "REAL")
    torchgraft.compat.uninstall()
    sys.modules.pop("torchair", None)
    import torchair as real

    assert real.REAL
    sys.modules.pop("torchair", None)


@pytest.mark.feature(
    "torch_npu", '.npu(), "npu:0", device="npu", torch.device("npu") on cpu or cuda'
)
def test_every_spelling_of_the_device(ascend: Path) -> None:
    for made in (
        torch.ones(2).npu(),
        torch.ones(2).npu(0),
        torch.ones(2).to("npu:0"),
        torch.ones(2, device="npu"),
        torch.tensor([1.0, 1.0], device=torch.device("npu", 0)),
        torch.nn.Linear(2, 2).npu().weight.detach(),
        torch.nn.Linear(2, 2, device="npu:0").weight.detach(),
        torch.nn.Linear(2, 2).to("npu").weight.detach(),
        torch.ones(2).npu(0, True),
        torch.ones(2).to(0),
        torch.ones(2, device=0),
        torch.ones(2, device=torch.device(type="npu", index=0)),
        torch.ones(2).to(torch.device(type="npu")),
        torch.nn.Linear(2, 2).to(0).weight.detach(),
    ):
        assert made.device.type == "cpu"
        assert made.is_npu  # type: ignore[attr-defined]
    torch.save(torch.ones(1), "one.pt")
    assert torch.load("one.pt", map_location="npu:0").device.type == "cpu"

    def inside(x: torch.Tensor) -> torch.Tensor:
        return x.to("npu") + torch.zeros(2, device="npu:0")

    compiled = torch.compile(inside, backend="npu", fullgraph=True)
    assert (compiled(torch.ones(2)) == 1).all()
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(1, device="npu").device.type))
    thread.start()
    thread.join()
    assert found == ["cpu"]


@pytest.mark.feature(
    "torch_npu", "torch.npu: streams, events, synchronize, device_count, memory, seeds"
)
def test_the_module_of_the_device(ascend: Path) -> None:
    npu = torch.npu  # type: ignore[attr-defined]
    stream, start, end = npu.Stream(), npu.Event(enable_timing=True), npu.Event(enable_timing=True)
    with npu.stream(stream):
        assert npu.current_stream() is stream
        start.record()
        end.record(stream)
        with npu.stream(None):
            assert npu.current_stream() is stream
    assert isinstance(stream, npu.Stream)
    assert isinstance(start, npu.Event)
    assert npu.current_stream() is npu.default_stream()
    npu.current_stream().wait_stream(stream)
    torch.ones(2).record_stream(stream)
    assert npu.memory.max_memory_allocated() == 0
    npu.synchronize()
    assert start.elapsed_time(end) >= 0
    assert stream.query()
    assert npu.is_available()
    assert npu.device_count() == 1
    npu.set_device("npu:0")
    with npu.device(0):
        assert npu.get_device_properties().total_memory >= npu.mem_get_info()[0]
    assert npu.npugraph_ex.compile_fx is not None
    assert npu.get_stream_limit(stream)["cube_core_num"] == -1
    assert not hasattr(npu, "make_graphed_callables")
    with pytest.raises(NotOnThisDevice, match=r"graphed_callables needs an NPU. .*npugraph_ex"):
        _ = npu.make_graphed_callables
    with pytest.raises(AttributeError, match="Did you mean 'synchronize'"):
        npu.syncronize()


@pytest.mark.feature("torch_npu", 'torch.autocast("npu"), GradScaler, Generator, pinned memory')
def test_mixed_precision_generators_and_pinned_memory(ascend: Path) -> None:
    x = torch.randn(3, 3)
    with torch.autocast("npu"):
        assert (x @ x).dtype == torch.float16
    with torch.amp.autocast(device_type="npu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    with torch.npu.amp.autocast(enabled=False):  # type: ignore[attr-defined]
        assert (x @ x).dtype == torch.float32

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("npu", dtype=torch.bfloat16):
            return x @ x

    compiled = torch.compile(inside, backend="npu", fullgraph=True)
    assert compiled(x).dtype == torch.bfloat16
    drawn = [
        torch.rand(2, device="npu", generator=torch.Generator("npu").manual_seed(3))
        for _ in range(2)
    ]
    assert torch.equal(*drawn)
    assert isinstance(torch.Generator(device="npu:0"), torch.Generator)
    assert torch.equal(x.pin_memory(), x)
    assert torch.empty(2, pin_memory=True).shape == (2,)


@pytest.mark.feature("torch_npu", "contrib.transfer_to_npu: code that says cuda")
def test_code_that_says_cuda(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import torch, torch_npu\n"
        "from torch_npu.contrib import transfer_to_npu\n"
        "assert torch.cuda.is_available()\n"
        "drawn = []\n"
        "for seed in (torch.manual_seed, torch.cuda.manual_seed, torch.cuda.manual_seed_all):\n"
        "    seed(3)\n"
        "    drawn.append(torch.rand(2, device='cuda').tolist())\n"
        "assert drawn[0] == drawn[1] == drawn[2] and isinstance(torch.seed(), int)\n"
        "model = torch.nn.Linear(2, 2).cuda()\n"
        "torch.save(model.state_dict(), 'model.pt')\n"
        "for where in ('cuda', 'cuda:0', {'cpu': 'cuda:0'}, torch.device('cuda:0')):\n"
        "    found = torch.load('model.pt', map_location=where)['weight']\n"
        "    assert found.is_cuda and torch.equal(found, model.weight)\n"
        "x = torch.ones(3, 2, device='cuda:0').to('cuda')\n"
        "assert x.is_cuda and x.is_npu\n"
        "stream = torch.cuda.Stream()\n"
        "with torch.cuda.stream(stream), torch.autocast('cuda'):\n"
        "    y = model(x)\n"
        "torch.cuda.synchronize()\n"
        "drawn = torch.rand(2, device='cuda', generator=torch.Generator('cuda').manual_seed(1))\n"
        "with stream:\n"
        "    assert torch.cuda.current_stream() is stream\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('nccl', store=dist.HashStore(), rank=0, world_size=1)\n"
        "assert dist.get_backend() == 'hccl'\n"
        "dist.all_reduce(total := torch.ones(2).cuda())\n"
        "dist.destroy_process_group()\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n"
        "    twice = total * 2\n"
        "graph.replay()\n"
        "assert twice.tolist() == [2, 2]\n"
        "scaler = torch.cuda.amp.GradScaler()\n"
        "with torch.cuda.amp.autocast(dtype=torch.bfloat16):\n"
        "    print(y.dtype, model(x).dtype, y.device.type)\n"
    )
    auto: list[list[str]] = [] if torch.cuda.is_available() else [[]]
    for options in [["--device", "cpu"], *auto]:
        ran = torchgraft_command("run", *options, "script.py", cwd=tmp_path)
        assert ran.stdout == "torch.float16 torch.bfloat16 cpu\n", ran.stderr


@pytest.mark.feature("torch_npu", "torch.npu.FloatTensor and the other old constructors")
@pytest.mark.parametrize("kind", ["cpu", "npu"])
def test_tensors_by_their_old_names(tmp_path: Path, kind: str) -> None:
    (tmp_path / "script.py").write_text(
        "import torch, torch_npu, warnings\n"
        "from torch_npu.contrib import transfer_to_npu\n"
        "warnings.simplefilter('ignore')\n"
        "for module, name in ((torch.npu, 'npu'), (torch.cuda, 'cuda')):\n"
        "    sized, held = module.FloatTensor(2, 3), module.LongTensor([2, 3])\n"
        "    assert sized.shape == (2, 3) and sized.is_npu and held.is_npu\n"
        "    assert isinstance(sized, module.FloatTensor)\n"
        "    assert not isinstance(sized, module.HalfTensor)\n"
        "    assert not isinstance(1, module.IntTensor)\n"
        "    assert held.tolist() == [2, 3] and held.dtype == torch.int64\n"
        "    assert module.FloatTensor(held.float()).tolist() == [2, 3]\n"
        "    for kind in (module.HalfTensor, f'torch.{name}.HalfTensor'):\n"
        "        made = torch.ones(2).type(kind)\n"
        "        assert made.dtype == torch.float16 and made.is_npu\n"
        "        torch.set_default_tensor_type(kind)\n"
        "        assert torch.ones(2).dtype == torch.float16 and torch.ones(2).is_npu\n"
        "        torch.set_default_tensor_type(torch.FloatTensor)\n"
        "    assert torch.get_device_module(name) is torch.npu\n"
        "    for arguments in ({'device_type': name}, {}, {'devices': [0]}):\n"
        "        with torch.random.fork_rng(**arguments):\n"
        "            drawn = torch.rand(2, device=name)\n"
        "        assert torch.equal(drawn, torch.rand(2, device=name))\n"
        "model = torch.nn.Linear(2, 2).cuda()\n"
        "x = torch.rand(3, 2).cuda()\n"
        "assert torch.equal(torch.nn.DataParallel(model, device_ids=[0])(x), model(x))\n"
        "print(torch.ones(1).device, torch.ones(1).dtype)\n"
    )
    ran = torchgraft_command("run", "--device", kind, "script.py", cwd=tmp_path)
    assert ran.stdout == "cpu torch.float32\n", ran.stderr


@pytest.mark.feature("torch_npu", 'torch.distributed with backend="hccl"; DDP with device_ids')
@pytest.mark.parametrize("kind", ["cpu", "npu"])
def test_ranks_talk_by_the_name_of_hccl(tmp_path: Path, kind: str) -> None:
    if kind == "npu":
        driver.build("npu")  # which may take minutes, so not while the ranks are waited for
    (tmp_path / "script.py").write_text(
        "import sys, torch, torch_npu\n"
        "import torch.distributed as dist\n"
        "rank = int(sys.argv[1])\n"
        "torch.npu.set_device(rank)\n"
        "dist.init_process_group('hccl', init_method='file://' + sys.argv[2], rank=rank,"
        " world_size=2)\n"
        "x = torch.full((2,), float(rank + 1), device=f'npu:{rank}')\n"
        "dist.all_reduce(x)\n"
        "parts = [torch.zeros(1, device=x.device) for _ in range(2)]\n"
        "dist.all_gather(parts, torch.tensor([rank + 5.0], device=x.device))\n"
        "assert [one.item() for one in parts] == [5.0, 6.0]\n"
        "dist.barrier()\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(2, 2).npu()\n"
        "model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])\n"
        "model(x * (rank + 1)).sum().backward()\n"
        "print(x.tolist(), model.module.weight.grad.tolist(), dist.get_backend())\n"
        "dist.destroy_process_group()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHGRAFT_NPU_DEVICES": "2"}
    command = [sys.executable, "-m", "torchgraft", "run", "--device", kind, "script.py"]
    ranks = [
        process.start([*command, rank, tmp_path / "store"], cwd=tmp_path, env=environment)
        for rank in range(2)
    ]
    for ran in process.finish_all(ranks):
        assert ran.stdout == "[3.0, 3.0] [[4.5, 4.5], [4.5, 4.5]] hccl\n", ran.stderr


def test_processes_of_a_script_find_the_packages(tmp_path: Path) -> None:
    """`torch.multiprocessing.spawn` imports the script anew; others are programs of their own."""
    (tmp_path / "script.py").write_text(
        "import subprocess, sys, torch, torch_npu\n"
        "import torch.multiprocessing as mp\n"
        "def rank(index, path):\n"
        "    with open(path + str(index), 'w') as file:\n"
        "        file.write(str(torch.ones(1).npu().device))\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(rank, args=('rank',), nprocs=2)\n"
        "    subprocess.run([sys.executable, '-c', 'import torchair'], check=True)\n"
    )
    ran = torchgraft_command("run", "--device", "cpu", "script.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert [(tmp_path / f"rank{i}").read_text() for i in range(2)] == ["cpu", "cpu"]


@pytest.mark.feature("torch_npu", "testing: TestCase, run_tests, SupportedDevices")
def test_a_test_case_of_an_operator(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import numpy, torch, torch_npu\n"
        "from torch_npu.testing.testcase import TestCase, run_tests\n"
        "from torch_npu.testing.common_utils import SupportedDevices\n"
        "class TestIt(TestCase):\n"
        "    @SupportedDevices(['Ascend910B'])\n"
        "    def test_it(self):\n"
        "        x = torch.rand(3, dtype=torch.float16)\n"
        "        self.assertRtolEqual(x.npu().cpu(), x * 1.0004)\n"
        "        self.assertRtolEqual(numpy.ones(2), numpy.ones(2))\n"
        "        self.assertEqual(x, x.clone())\n"
        "        self.assertEqual(1, 1)\n"
        "    def test_off(self):\n"
        "        self.assertRtolEqual(torch.ones(2), torch.full((2,), 1.001))\n"
        "if __name__ == '__main__':\n"
        "    run_tests()\n"
    )
    ran = torchgraft_command("run", "--device", "cpu", "script.py", cwd=tmp_path)
    assert "FAIL: test_off" in ran.stderr
    assert "FAILED (failures=1)" in ran.stderr
    assert ran.returncode == 1


@pytest.mark.feature("torch_npu", "fused operators: collectives, paged attention, MLA", "refused")
def test_a_fused_operator_names_what_computes_the_same(ascend: Path) -> None:
    import torch_npu

    with pytest.raises(NotOnThisDevice, match=r"npu_mm_all_reduce_base needs .*torch\.matmul"):
        _ = torch_npu.npu_mm_all_reduce_base
    assert not hasattr(torch_npu, "npu_mm_all_reduce_base"), "libraries ask for operators that way"
    assert hasattr(torch_npu, "npu_grouped_matmul")
    with pytest.raises(NotOnThisDevice, match=r"module\.DropoutWithByteMask needs .*torch\.nn"):
        from torch_npu.contrib.module import DropoutWithByteMask  # noqa: F401
    with pytest.raises(NotOnThisDevice, match="op-plugin on its YAML"):
        _ = torch_npu.npu_of_ones_own
    with pytest.raises(NotOnThisDevice, match=r"npu_mm_all_reduce_base needs .*torch\.matmul"):
        from torch_npu import npu_mm_all_reduce_base  # noqa: F401
    with pytest.raises(ImportError, match=r"torch\.npu\.ExternalEvent needs an NPU"):
        from torch_npu.npu import ExternalEvent  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'no_such_thing'"):
        from torch_npu import no_such_thing  # noqa: F401


def test_the_device_is_given_back(ascend: Path) -> None:
    device.deactivate()
    assert not hasattr(torch, "npu")
    assert not hasattr(torch.Tensor, "npu")
    with pytest.raises(RuntimeError, match="npu"):
        torch.ones(1).to("npu")


@pytest.mark.feature("torch_npu", "torch.npu streams and events inside a compiled model")
def test_streams_of_torch_npu_are_marks_of_the_graph(ascend: Path) -> None:
    npu = torch.npu  # type: ignore[attr-defined]
    outer, event = npu.Stream(), npu.Event()

    def model(x: torch.Tensor) -> torch.Tensor:
        main, inner = npu.current_stream(), npu.Stream()
        inner.wait_stream(main)
        with npu.stream(inner):
            sine = x.sin()
        with npu.stream(outer):
            cosine = x.cos()
            event.record()
        main.wait_stream(inner)
        event.wait()
        return sine + cosine

    before = list(graft.reports())  # programs of other tests may live on
    compiled = torch.compile(model, backend="npugraph_ex", fullgraph=True)
    x = torch.randn(3)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), x.sin() + x.cos())
    made = [report for report in graft.reports() if not any(report is one for one in before)]
    assert sum(any(n.op == "aten.sin.default" for n in r.nodes) for r in made) == 1
    streams = {node.op: node.stream for node in graft.reports()[-1].nodes}
    assert streams["aten.cos.default"] == outer.label
    assert len({streams[f"aten.{op}"] for op in ("sin.default", "cos.default", "add.Tensor")}) == 3
    torch.testing.assert_close(model(x), x.sin() + x.cos())
