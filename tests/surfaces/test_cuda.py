"""On a CUDA device: every mode, captured graphs, and what must stay right inside them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import CASES, Mlp
from torch import Tensor, nn

import torchgraft as graft
from torchgraft.codegen import epilogue
from torchgraft.run.cuda import IN_CPP

pytestmark = pytest.mark.cuda

MODES = ["eager", "default", "reduce-overhead", "max-autotune"]


def on_gpu(case: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, args = CASES[case]()
    return model.cuda(), tuple(arg.cuda() for arg in args)


@pytest.fixture(params=["python", "native"], autouse=True)
def executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who replays what was captured."""
    monkeypatch.setenv("TORCHGRAFT_EXECUTOR", request.param)
    return request.param


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_results_agree_with_eager(case: str, mode: str) -> None:
    model, args = on_gpu(case)
    compiled = graft.compile(model, args, mode=mode)
    for _ in range(3):
        fresh = tuple(a.clone() if a.dtype == torch.int64 else torch.randn_like(a) for a in args)
        want = model(*(a.clone() for a in fresh))
        torch.testing.assert_close(compiled(*fresh), want, rtol=1e-3, atol=1e-3)
    captured = mode in ("reduce-overhead", "max-autotune")
    assert not captured or not any("not captured" in note for note in compiled.report.notes)


def test_who_replays_is_said(executor: str) -> None:
    x = torch.randn(4, device="cuda")
    compiled = graft.compile(torch.sin, (x,), mode="reduce-overhead")
    for _ in range(3):
        torch.testing.assert_close(compiled(x), x.sin())
    assert (IN_CPP in compiled.report.notes) == (executor == "native")


def test_one_row_calls_no_library() -> None:
    """A step of decoding: one query, a cache with one new slot, products of one row."""
    torch.manual_seed(0)
    into, out = nn.Linear(64, 192), nn.Linear(64, 64)
    model = nn.ModuleList([into, out]).half().cuda().requires_grad_(False)

    def step(x: Tensor, keys: Tensor, values: Tensor, slot: Tensor) -> tuple[Tensor, ...]:
        q, k, v = model[0](x).view(1, 3, 4, 16).transpose(1, 2).unbind(2)
        keys = keys.index_copy(2, slot, k[:, :, None])
        values = values.index_copy(2, slot, v[:, :, None])
        seen = (torch.arange(32, device="cuda") <= slot).view(1, 1, 1, 32)
        y = F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=seen)
        return model[1](y.reshape(1, 64)).relu(), keys, values

    x = torch.randn(1, 64).half().cuda()
    keys, values = torch.randn(2, 1, 4, 32, 16).half().cuda()
    args = (x, keys, values, torch.tensor([7], device="cuda"))
    compiled = graft.compile(step, args)
    torch.testing.assert_close(compiled(*args), step(*args), rtol=1e-2, atol=1e-2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        compiled(*args)
        torch.cuda.synchronize()
    kernels = {event.name for event in seen.events() if event.device_type.name == "CUDA"}
    assert kernels
    assert all(name.startswith(("triton_", "Mem")) for name in kernels), kernels


def launched(compiled: Any, *args: Tensor) -> list[str]:
    """What a call runs on the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        compiled(*args)
        torch.cuda.synchronize()
    return [event.name for event in seen.events() if event.device_type.name == "CUDA"]


def is_copy(name: str) -> bool:
    return name.lower().startswith("mem")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_small_layers_of_one_row_are_one_kernel(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 64, bias=False), nn.GELU(), nn.Linear(64, 7),
        nn.SiLU(), nn.Linear(7, 16), nn.GELU(approximate="tanh"), nn.Linear(16, 100), nn.Tanh(),
    ).to("cuda", dtype)  # fmt: skip
    exact = copy.deepcopy(model).double()
    x = torch.randn(1, 24, device="cuda", dtype=dtype)
    compiled = graft.compile(model, (x,), mode="reduce-overhead")
    for _ in range(3):
        x = torch.randn_like(x)
        want = exact(x.double())
        off, eagers = ((y.double() - want).norm().item() for y in (compiled(x), model(x)))
        assert off <= 2 * eagers
    assert [name for name in launched(compiled, x) if not is_copy(name)] == ["layers"]


def test_generated_kernels_use_the_callers_memory(executor: str) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x.sin() + y).softmax(-1), y * 2

    memory = torch.randn(2, 65, device="cuda")
    x, y = memory[0, :64], torch.randn(64, device="cuda")
    compiled = graft.compile(fn, (x, y), mode="reduce-overhead")
    kept = []
    # Elsewhere; where generated code cannot read many numbers at a time; and back again.
    for given in (x, x.clone(), memory[0, 1:], memory[1, 1:], x):
        result = compiled(given, y)
        kept.append((result, [one.clone() for one in result]))
        torch.testing.assert_close(result, fn(given, y))
        y = torch.randn_like(y)
    for result, same in kept:
        torch.testing.assert_close(list(result), same, rtol=0, atol=0)
    copies = [name for name in launched(compiled, x, y) if is_copy(name)]
    assert bool(copies) == (executor == "python")


def test_memory_that_many_kernels_or_a_library_use_is_copied() -> None:
    """Among them what was freed before an output came to lie there."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, device="cuda").requires_grad_(False)

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        large = (x @ x.t()).softmax(-1)
        small = large.sum(0).softmax(0)
        for _ in range(4):
            small = (small * x.sum(0).softmax(0)).cumsum(0).softmax(0)
        return small, layer(x), x.amax(0) - y, small.flip(0)

    for _ in range(2):
        x, y = torch.randn(64, 64, device="cuda"), torch.randn(64, device="cuda")
        compiled = graft.compile(fn, (x, y), mode="reduce-overhead")
        for _ in range(3):
            x, y = torch.randn_like(x), torch.randn_like(y)
            torch.testing.assert_close(compiled(x, y), fn(x, y), rtol=1e-3, atol=1e-4)


def test_a_captured_program_gives_fresh_outputs() -> None:
    model, (x,) = on_gpu("mlp")
    compiled = graft.compile(model, (x,), mode="reduce-overhead")
    one = compiled(x)
    kept = one.clone()
    compiled(torch.randn_like(x))
    assert torch.equal(one, kept)


def test_a_captured_program_writes_inputs_and_buffers_once_a_call() -> None:
    class Count(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            x.mul_(2)
            return x, x.view(-1), x + self.calls

    model = Count().cuda()
    twin = copy.deepcopy(model)
    x = torch.ones(2, 3, device="cuda")
    compiled = graft.compile(model, (x.clone(),), mode="reduce-overhead")
    for _ in range(3):
        ours, theirs = x.clone(), x.clone()
        got, want = compiled(ours), twin(theirs)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(ours, theirs)
        assert got[1].data_ptr() == ours.data_ptr()
    assert model.calls == 3


def test_random_operators_follow_the_seed_under_capture() -> None:
    x = torch.ones(256, device="cuda")
    run = graft.compile(lambda x: torch.rand_like(x) + x, (x,), mode="reduce-overhead")

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return run(x)

    first = drawn(3)
    assert not torch.equal(first, run(x))
    assert torch.equal(first, drawn(3))


def test_a_weight_that_moved_is_captured_again() -> None:
    model = Mlp().cuda()
    x = torch.randn(2, 8, device="cuda")
    run = torch.compile(model, backend=graft.backend(), mode="reduce-overhead")
    with torch.no_grad():
        run(x)
        model.up.weight.mul_(2)
        torch.testing.assert_close(run(x), model(x), rtol=1e-3, atol=1e-3)
        model.up.weight.data = torch.randn_like(model.up.weight)
        torch.testing.assert_close(run(x), model(x), rtol=1e-3, atol=1e-3)


def test_each_shape_of_a_range_gets_its_own_graph() -> None:
    model = Mlp().cuda()
    spec = graft.Input(min_shape=(2, 8), max_shape=(64, 8))
    compiled = graft.compile(model, (spec,), mode="reduce-overhead")
    for rows in (2, 40, 7, 40, 64):
        x = torch.randn(rows, 8, device="cuda")
        torch.testing.assert_close(compiled(x), model(x).detach(), rtol=1e-3, atol=1e-3)


def test_what_cannot_be_captured_runs_and_says_why() -> None:
    def fn(x: Tensor) -> Tensor:
        return x[x > 0] * 2

    x = torch.randn(64, device="cuda")
    compiled = graft.compile(fn, (x,), mode="reduce-overhead")
    torch.testing.assert_close(compiled(x), fn(x))
    torch.testing.assert_close(compiled(-x), fn(-x))
    assert any("not captured" in note for note in compiled.report.notes)


def test_a_failed_capture_leaves_nothing_behind() -> None:
    @torch.library.custom_op("cuda_captures::looks", mutates_args=())
    def looks(x: Tensor) -> Tensor:
        return x * float(x.sum())  # the host waits for the device

    @looks.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    x, stream = torch.randn(64, device="cuda"), torch.cuda.current_stream()
    compiled = graft.compile(lambda x: looks(x) + 1, (x,), mode="reduce-overhead")
    torch.testing.assert_close(compiled(x), x * x.sum() + 1)
    assert any("not captured" in note for note in compiled.report.notes)
    assert torch.cuda.current_stream() == stream
    torch.randn(8, device="cuda")
    again = graft.compile(lambda x: torch.rand_like(x) + x, (x,), mode="reduce-overhead")
    assert not torch.equal(again(x), again(x))


def test_captured_calls_on_several_streams_do_not_mix() -> None:
    """Each call gets inputs of its own, late ones, and no stream waits for another."""
    args = tuple(torch.randn(256, 256, device="cuda") for _ in range(2))
    compiled = graft.compile(Chains(), args, mode="reduce-overhead")
    compiled(*args)
    streams = [torch.cuda.Stream() for _ in range(3)]
    asked = [tuple(torch.randn_like(a) for a in args) for _ in range(30)]
    torch.cuda.synchronize()
    results = []
    for number, given in enumerate(asked):
        with torch.cuda.stream(streams[number % 3]):
            torch.cuda._sleep(100_000 * (number % 4))
            results.append(compiled(*(a + 0 for a in given)))
    torch.cuda.synchronize()
    for given, result in zip(asked, results, strict=True):
        torch.testing.assert_close(result, Chains()(*given), rtol=1e-3, atol=1e-3)


def test_outputs_that_share_memory_still_do_and_odd_layouts_are_kept() -> None:
    def fn(x: Tensor, wide: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return y, y[1:], y.t(), wide[:, ::2] + 1, (x + 1).expand(2, 3, 4)

    x, wide = torch.randn(3, 4, device="cuda"), torch.randn(4, 4, device="cuda").expand(2, 4, 4)[0]
    compiled = graft.compile(fn, (x, wide), mode="reduce-overhead")
    for _ in range(3):
        x = torch.randn_like(x)
        got, want = compiled(x, wide), fn(x, wide)
        torch.testing.assert_close(got, want)
        assert [g.stride() for g in got] == [w.stride() for w in want]
        got[0].zero_()
        assert not got[1].any()
        assert not got[2].any()


def test_an_input_with_gaps_is_written_and_nothing_between_is() -> None:
    def fn(x: Tensor) -> Tensor:
        x.add_(1)
        return x.sum()

    whole = torch.zeros(4, 8, device="cuda")
    compiled = graft.compile(fn, (whole[:, ::2],), mode="reduce-overhead")
    for number in range(1, 4):
        whole[:, 1::2] = 7 * number  # must survive
        assert compiled(whole[:, ::2]) == 16 * number
        assert (whole[:, 1::2] == 7 * number).all()


def test_a_captured_program_may_be_called_with_and_without_inference_mode() -> None:
    model, (x,) = on_gpu("mlp")
    compiled = graft.compile(model, (x,), mode="reduce-overhead")
    with torch.inference_mode():
        assert compiled(x).is_inference()
    weight = torch.ones((), device="cuda", requires_grad=True)
    (compiled(x) * weight).sum().backward()
    torch.testing.assert_close(weight.grad, compiled(x).sum())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_training(mode: str) -> None:
    model, args = on_gpu("cnn")
    model.train()
    twin = copy.deepcopy(model)
    run = torch.compile(model, backend=graft.backend(), mode=mode)
    for module, call in ((model, run), (twin, twin)):
        optimiser = torch.optim.SGD(module.parameters(), lr=0.01)
        for _ in range(4):
            optimiser.zero_grad()
            call(*args).square().mean().backward()
            optimiser.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name], rtol=1e-3, atol=1e-3, msg=name)


def test_the_callers_stream_is_respected() -> None:
    model = Mlp().cuda()
    x = torch.randn(2, 8, device="cuda")
    compiled = graft.compile(model, (x,), mode="reduce-overhead")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        late = torch.randn(2, 8, device="cuda")
        out = compiled(late)
    side.synchronize()
    torch.testing.assert_close(out, model(late).detach(), rtol=1e-3, atol=1e-3)


def test_a_cpu_tensor_for_a_cuda_program_is_named() -> None:
    model, (x,) = on_gpu("mlp")
    compiled = graft.compile(model, (x,), mode="eager")
    with pytest.raises(graft.GraftError, match=r"'x': declared device cuda:0, got cpu"):
        compiled(x.cpu())


class Residual(nn.Module):
    """Convolutions whose sums and relus cuDNN can compute, and one (of a single channel) more."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(8, 96, 3, padding=1), nn.BatchNorm2d(96)
        self.blocks = nn.ModuleList(nn.Conv2d(96, 96, 3, padding=1) for _ in range(6))
        self.last = nn.Conv2d(96, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        for block in self.blocks:
            x = (block(x) + x).relu()
        return self.last(x).relu()


@torch.no_grad()
def test_cudnn_computes_what_follows_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    joined, join = [], epilogue._replace
    monkeypatch.setattr(epilogue, "_replace", lambda *args: (joined.append(args[1]), join(*args)))
    model = Residual().eval()
    nn.init.uniform_(model.norm.running_var, 0.5, 1.5)
    x = torch.randn(1, 8, 24, 24)
    want = model.double()(x.double())
    compiled = graft.compile(model.half().cuda(), (x.half().cuda(),), mode="reduce-overhead")
    torch.testing.assert_close(compiled(x.half().cuda()).cpu().double(), want, rtol=2e-2, atol=2e-2)
    assert joined.count(epilogue.convolution_relu()) >= 7
    assert not any("not captured" in note for note in compiled.report.notes)


# --- Streams ---


class Chains(nn.Module):
    """Two chains of products that do not need each other. By the same factor each time: a power of
    a matrix would make much of the last bit, in which kernels differ."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        by, scale = (x, y), x.shape[0] ** -0.5
        with graft.stream("side"):
            for _ in range(8):
                x = torch.mm(x, by[0] * scale).tanh()
        for _ in range(8):
            y = torch.mm(y, by[1] * scale).tanh()
        return x + y


@pytest.mark.parametrize("mode", MODES)
def test_streams_give_the_results_of_one(mode: str) -> None:
    args = tuple(torch.randn(256, 256, device="cuda") for _ in range(2))
    compiled = graft.compile(Chains(), args, mode=mode)
    assert compiled.plan.streams == ["main", "side"]
    assert not any("not captured" in note for note in compiled.report.notes)
    for _ in range(20):
        fresh = tuple(torch.randn_like(a) for a in args)
        torch.testing.assert_close(compiled(*fresh), Chains()(*fresh), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", ["eager", "default", "reduce-overhead"])
def test_a_slow_producer_is_waited_for(mode: str) -> None:
    """A custom operator that sleeps on the device before it writes: a race would show."""

    @torch.library.custom_op("cuda_streams::late", mutates_args=())
    def late(x: Tensor) -> Tensor:
        torch.cuda._sleep(2_000_000)
        return x * 2

    @late.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        with graft.stream("side"):
            y = late(x)
        z = late(x.sin())
        with graft.stream("other"):
            both = y + z
        return both, (y * z).sum()

    x = torch.randn(1 << 20, device="cuda")
    compiled = graft.compile(model, (x,), mode=mode)
    for _ in range(10):
        x = torch.randn_like(x)
        want = (2 * x + 2 * x.sin(), (4 * x * x.sin()).sum())
        torch.testing.assert_close(compiled(x), want, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("mode", ["eager", "reduce-overhead"])
def test_independent_chains_overlap(mode: str) -> None:
    """Two chains of 2048² products: while one stream has not ended, the other has begun."""
    args = tuple(torch.randn(2048, 2048, device="cuda", dtype=torch.half) for _ in range(2))
    compiled = graft.compile(Chains(), args, mode=mode)
    spans = compiled.profile(args).timeline.spans
    main, side = (
        [span for span in spans if span.stream == stream and span.kernel != spans[-1].kernel]
        for stream in ("main", "side")
    )
    assert min(s.start for s in side) < max(s.end for s in main)
    assert min(s.start for s in main) < max(s.end for s in side)


def test_calls_on_different_streams_do_not_share_memory_too_early() -> None:
    args = tuple(torch.randn(512, 512, device="cuda") for _ in range(2))
    compiled = graft.compile(Chains(), args)
    want = Chains()(*args)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for number in range(30):
        with torch.cuda.stream(streams[number % 3]):
            results.append(compiled(*args))
    torch.cuda.synchronize()
    for result in results:
        torch.testing.assert_close(result, want, rtol=1e-3, atol=1e-3)


def test_outputs_of_a_captured_graph_may_be_its_own() -> None:
    model, (x,) = on_gpu("mlp")
    compiled = graft.compile(model, (x,), mode="reduce-overhead", alias_outputs=True)
    first = compiled(x)
    second = compiled(torch.zeros_like(x))
    assert first.data_ptr() == second.data_ptr()


def test_an_exception_leaves_no_stream_hanging() -> None:
    @torch.library.custom_op("cuda_streams::fails", mutates_args=())
    def fails(x: Tensor) -> Tensor:
        raise ValueError("on the side")

    @fails.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def model(x: Tensor) -> Tensor:
        with graft.stream("side"):
            y = fails(x.sin())
        return y + x

    x = torch.randn(8, device="cuda")
    compiled = graft.compile(model, (x,))
    with pytest.raises(ValueError, match="on the side"):
        compiled(x)
    torch.cuda.synchronize()


class Towers(nn.Module):
    """Towers of different widths: nothing to merge, so streams are what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 8))
            for w in (64, 96, 128, 160)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([tower(x) for tower in self.towers], 1)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_branches_go_to_streams_by_themselves(mode: str) -> None:
    model, x = Towers().cuda(), torch.randn(16, 64, device="cuda")
    compiled = graft.compile(model, (x,), mode=mode)
    assert (len(compiled.plan.streams) > 1) is (mode == "reduce-overhead")
    assert not any("not captured" in note for note in compiled.report.notes)
    with torch.no_grad():
        for _ in range(20):
            x = torch.randn_like(x)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)


def test_autotune_times_streams_and_keeps_one_way() -> None:
    model, x = Towers().cuda(), torch.randn(16, 64, device="cuda")
    compiled = graft.compile(model, (x,), mode="max-autotune", autotune_seconds=120)
    tried = {t.name: t.kept for t in compiled.report.trials if t.what == "the program"}
    assert "one stream" in tried
    assert sum(tried.values()) == 1
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)
