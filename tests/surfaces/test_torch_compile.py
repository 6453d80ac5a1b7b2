"""The torch.compile door: by name, with mode and options, training, dynamic shapes, reports."""

from __future__ import annotations

import copy
import gc
import sys
from typing import Any

import process
import pytest
import torch
from models import CASES, Cnn, Mlp
from torch import Tensor, nn

import torchgraft as graft

MODES = ["eager", pytest.param("default", marks=pytest.mark.slow)]


def test_the_backend_is_found_with_nothing_to_import() -> None:
    code = (
        "import torch\n"
        "f = torch.compile(lambda x: x + 1, backend='torchgraft', mode='eager')\n"
        "print(f(torch.ones(2)).tolist(), 'torchgraft' in torch.compiler.list_backends())"
    )
    assert process.output([sys.executable, "-c", code]).strip() == "[2.0, 2.0] True"


def test_mode_and_options_reach_the_config() -> None:
    seen: list[graft.Config] = []

    def look(gm: Any, example_inputs: Any, config: graft.Config) -> None:
        seen.append(config)

    x = torch.ones(2)
    torch.compile(torch.sin, backend="torchgraft", options={"mode": "eager", "pre_passes": [look]})(
        x
    )
    config = graft.Config(pre_passes=[look], freeze=False)
    torch.compile(torch.cos, backend=graft.backend(config), mode="eager")(x)
    assert [(c.mode, c.freeze) for c in seen] == [("eager", True), ("eager", False)]
    assert config.mode == "default"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "egaer"}, "unknown mode 'egaer'. Did you mean 'eager'"),
        ({"options": {"mod": "eager"}}, "unknown option 'mod'. Did you mean 'mode'"),
        ({"options": {"inductor": {"max_autotun": True}}}, "Did you mean 'max_autotune'"),
    ],
)
def test_a_wrong_argument_says_what_is_right(arguments: Any, message: str) -> None:
    run = torch.compile(lambda x: x + 1, backend="torchgraft", **arguments)
    with pytest.raises(Exception, match=message):
        run(torch.ones(2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["mlp", "cnn", "attention"])
def test_training_matches_eager_step_by_step(case: str, mode: str) -> None:
    model, args = CASES[case]()
    model.train()
    twin = copy.deepcopy(model)
    run = torch.compile(model, backend="torchgraft", mode=mode)
    for module, call in ((model, run), (twin, twin)):
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            call(*args).square().mean().backward()
            optimiser.step()
    torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()))
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    kinds = [report.name.split()[-1] for report in graft.reports()[-2:]]
    assert kinds == ["forward", "backward"]


@pytest.mark.parametrize("mode", MODES)
def test_dynamic_shapes_compile_once(mode: str) -> None:
    model = Mlp()
    programs: list[Any] = []
    backend = graft.backend(graft.Config(mode=mode), on_program=programs.append)
    run = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for rows in (3, 5, 17):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(run(x), model(x))
    assert len(programs) == 1


@pytest.mark.parametrize("mode", MODES)
def test_dynamic_training_with_sizes_in_the_program(mode: str) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (x.reshape(x.shape[0] * 2, -1) @ w / x.shape[0]).sum()

    run = torch.compile(fn, backend="torchgraft", mode=mode, dynamic=True)
    for rows in (3, 6):
        x, w = torch.randn(rows, 8), torch.randn(4, 3, requires_grad=True)
        run(x, w).backward()
        got, w.grad = w.grad, None
        fn(x, w).backward()
        torch.testing.assert_close(got, w.grad)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_training_saves_what_the_backward_graph_was_traced_with(dynamic: bool) -> None:
    """A fusion lays the rotated heads out otherwise, and the generator takes a `cat` with nothing
    in front for a copy: the backward graph reads both."""

    def fn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.unflatten(-1, (4, 8)).transpose(1, 2)
        turned = torch.cat((-x[..., 4:], x[..., :4]), -1)
        rotated = x * cos + turned * sin
        keys = torch.cat((torch.tensor([]), x), -2)
        return (rotated.exp() * keys.exp()).sum()

    programs: list[Any] = []
    run = torch.compile(fn, backend=graft.backend(on_program=programs.append), dynamic=dynamic)
    for length in (7, 9):
        x = torch.randn(2, length, 32, requires_grad=True)
        args = (x, torch.randn(1, 1, length, 8), torch.randn(1, 1, length, 8))
        wanted = torch.autograd.grad(fn(*args), x)
        torch.testing.assert_close(torch.autograd.grad(run(*args), x), wanted)
    assert programs[0].report.matches == {"rotary": 1}


@pytest.mark.parametrize("mode", MODES)
def test_graph_breaks_leave_several_programs(mode: str) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin() + 0.5
        if y.sum() > 0:
            return y * 2
        return y - 1

    run = torch.compile(fn, backend="torchgraft", mode=mode)
    for x in (torch.ones(4), -torch.ones(4)):
        torch.testing.assert_close(run(x), fn(x))
    assert [len(r.nodes) for r in graft.reports()[-3:]] == [4, 1, 1]


@pytest.mark.parametrize("mode", MODES)
def test_mutated_and_aliased_values(mode: str) -> None:
    def fn(x: Tensor) -> Any:
        x.mul_(2)
        return x.view(-1), x, x[0] + 1

    run = torch.compile(fn, backend="torchgraft", mode=mode)
    ours, theirs = torch.ones(2, 3), torch.ones(2, 3)
    got = run(ours)
    torch.testing.assert_close(got, fn(theirs))
    torch.testing.assert_close(ours, theirs)
    assert got[1] is ours
    assert got[0].data_ptr() == ours.data_ptr()


def test_reports_are_bounded_and_weakly_held() -> None:
    run = torch.compile(Mlp(), backend="torchgraft", mode="eager")
    with torch.no_grad():
        run(torch.randn(2, 8))
    name = graft.reports()[-1].name
    assert [node.runs for node in graft.reports()[-1].nodes] == ["aten"] * 7
    del run
    torch.compiler.reset()
    gc.collect()
    assert name not in {report.name for report in graft.reports()}


def test_two_configs_live_side_by_side() -> None:
    def swap(gm: Any, example_inputs: Any, config: graft.Config) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
            node.target = torch.ops.aten.mul.Tensor

    def fn(x: Tensor) -> Tensor:
        return x + 3

    plain = torch.compile(fn, backend=graft.backend(graft.Config(mode="eager")))
    swapped = torch.compile(
        fn, backend=graft.backend(graft.Config(mode="eager", pre_passes=[swap]))
    )
    x = torch.ones(1)
    assert (plain(x).item(), swapped(x).item(), plain(x).item()) == (4.0, 3.0, 4.0)


# --- Operators of others ---


@pytest.fixture(scope="module")
def custom() -> Any:
    @torch.library.custom_op("graft_test::shift", mutates_args=())
    def shift(x: Tensor, by: float) -> Tensor:
        return x + by

    @shift.register_fake
    def _(x: Tensor, by: float) -> Tensor:
        return torch.empty_like(x)

    @torch.library.custom_op("graft_test::bump_", mutates_args={"x"})
    def bump(x: Tensor) -> None:
        x.add_(1)

    return shift


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("door", ["graft.compile", "torch.compile"])
def test_custom_operators_are_launched_as_themselves(custom: Any, mode: str, door: str) -> None:
    def fn(x: Tensor) -> Tensor:
        y = torch.ops.graft_test.shift(x.sin() * 2, 0.5)
        z = (x.cos() + 1).relu()  # independent of the custom operator: must not split
        torch.ops.graft_test.bump_(y)
        return (y + z).exp()

    x = torch.randn(4)
    if door == "graft.compile":
        run: Any = graft.compile(fn, (x,), mode=mode)
    else:
        run = torch.compile(fn, backend="torchgraft", mode=mode)
    torch.testing.assert_close(run(x), fn(x))
    report = graft.reports()[-1]
    if mode == "default":
        assert len(report.regions) == 2
        kernels = [node.op for node in report.nodes if node.runs == "kernel"]
        assert kernels[0] == "graft_test.shift.default"
        assert kernels[1].startswith("auto_functionalized")  # bump_, on a copy


@pytest.mark.slow
def test_without_a_compiler_programs_run_on_aten(tmp_path: Any) -> None:
    code = (
        "import torch, torchgraft as graft\n"
        "x = torch.ones(3)\n"
        "c = graft.compile(torch.nn.ReLU(), (x,))\n"
        "d = graft.compile(torch.nn.Sigmoid(), (x,))\n"
        "print(c(x).tolist(), c.report.fallbacks[0].reason)"
    )
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path), "CXX": "nowhere-g++"}
    done = process.run([sys.executable, "-c", code], env=env)
    assert done.stdout.strip() == "[1.0, 1.0, 1.0] no C++ compiler on this machine"
    assert done.stderr.count("no C++ compiler found") == 1


def test_batch_norm_in_training_mode_writes_its_statistics_once() -> None:
    model, twin = Cnn().train(), Cnn().train()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(4, 3, 8, 8)
    run = torch.compile(model, backend="torchgraft", mode="eager")
    run(x).sum().backward()
    twin(x).sum().backward()
    torch.testing.assert_close(model.norm.running_var, twin.norm.running_var)
    assert model.norm.num_batches_tracked == 1


def test_a_module_with_hooks_and_a_submodule_called_twice() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model.append(model[0])
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    x = torch.randn(2, 4)
    want = model(x).detach()
    torch.testing.assert_close(graft.compile(model, (x,), mode="eager")(x), want)
    run = torch.compile(model, backend="torchgraft", mode="eager")
    torch.testing.assert_close(run(x).detach(), want)
