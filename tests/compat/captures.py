"""What a captured graph must do, on whatever device stands for the NPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchgraft.errors import CannotCapture, UnknownName


def npu() -> Any:
    return torch.npu  # type: ignore[attr-defined]


def net() -> torch.nn.Module:
    layers = [torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)]
    return torch.nn.Sequential(*layers).to("npu")


def it_runs_again_on_the_same_memory() -> None:
    model, x = net(), torch.zeros(3, 4, device="npu")
    cache = torch.zeros(5, 2, device="npu")
    counter = torch.zeros((), dtype=torch.int64, device="npu")
    graph = npu().NPUGraph()
    with torch.no_grad(), npu().graph(graph):
        assert npu().is_current_stream_capturing()
        y = model(x)
        cache[:3] = y
        view = cache.t()
        counter += 1
    assert not npu().is_current_stream_capturing()
    assert counter.item() == 0, "capturing has no effect"
    assert not cache.cpu().any()
    assert y.cpu().isnan().all(), "nothing has run"
    for times in range(1, 4):
        given = torch.randn(3, 4)
        x.copy_(given)
        graph.replay()
        expected = copy.deepcopy(model).cpu()(given).detach()
        torch.testing.assert_close(y.cpu(), expected)
        torch.testing.assert_close(view[:, :3].cpu(), expected.t())
        assert counter.item() == times


def training_steps_are_captured() -> None:
    def step(model: torch.nn.Module, optimizer: Any, x: Tensor, wanted: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = (model(x) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    model, wanted, x = net(), torch.randn(3, 2), torch.zeros(3, 4, device="npu")
    plain = copy.deepcopy(model).cpu()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    there = wanted.to("npu")
    side = npu().Stream()
    side.wait_stream(npu().current_stream())
    with npu().stream(side):
        step(model, optimizers[0], x, there)
    npu().current_stream().wait_stream(side)
    step(plain, optimizers[1], x.cpu(), wanted)
    graph = npu().NPUGraph()
    with npu().graph(graph):
        loss = step(model, optimizers[0], x, there)
    for _ in range(3):
        given = torch.randn(3, 4)
        x.copy_(given)
        graph.replay()
        torch.testing.assert_close(
            loss.detach().cpu(), step(plain, optimizers[1], given, wanted).detach()
        )
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach())


def each_replay_draws_anew() -> None:
    graph, before = npu().NPUGraph(), npu().get_rng_state()
    with npu().graph(graph):
        x = torch.rand(8, device="npu")
    assert torch.equal(npu().get_rng_state(), before)
    graph.replay()
    first = x.cpu().clone()
    graph.replay()
    assert not torch.equal(first, x.cpu())


def tensors_of_inference_mode_are_captured() -> None:
    graph = npu().NPUGraph()
    with torch.inference_mode():
        x = torch.zeros(2, device="npu")
        with npu().graph(graph, stream=npu().Stream(), pool=npu().graph_pool_handle()):
            y = x + 1
            x.add_(1)
    graph.replay()
    graph.replay()
    assert (x.tolist(), y.tolist()) == ([2.0, 2.0], [2.0, 2.0])


def a_compiled_function_is_captured() -> None:
    compiled = torch.compile(lambda x: (x.sin() + 1) * 2, backend="npugraph_ex")
    x, graph = torch.zeros(4, device="npu"), npu().NPUGraph()
    compiled(x)
    with npu().graph(graph):
        y = compiled(x)
    x.fill_(0.5)
    graph.replay()
    torch.testing.assert_close(y.cpu(), (torch.full((4,), 0.5).sin() + 1) * 2)


def what_waits_for_the_device_is_refused() -> None:
    x = torch.ones(3, device="npu")

    def captured(call: Callable[[], object]) -> None:
        with npu().graph(npu().NPUGraph()):
            x.mul_(2)
            call()

    for call in (lambda: x.sum().item(), lambda: x.nonzero(), lambda: x[x > 0]):
        with pytest.raises(CannotCapture, match="while a graph is captured"):
            captured(call)
        assert not npu().is_current_stream_capturing()
    for move in (
        (lambda: x.cpu(), lambda: torch.ones(3).to("npu")) if x.device.type == "npu" else ()
    ):
        with pytest.raises(CannotCapture, match="between the host and the device"):
            captured(move)
    assert x.tolist() == [1.0] * 3, "what was written is put back"


def a_graph_is_used_in_order() -> None:
    graph = npu().NPUGraph()
    with pytest.raises(RuntimeError, match="replay: nothing was captured"):
        graph.replay()
    with pytest.raises(RuntimeError, match="nothing is being captured"):
        graph.capture_end()
    with pytest.raises(UnknownName, match="'relaxed'"):
        graph.capture_begin(capture_error_mode="relax")
    graph.capture_begin()
    with pytest.raises(RuntimeError, match="captured already"):
        npu().NPUGraph().capture_begin()
    x = torch.ones(2, device="npu") * 3
    graph.capture_end()
    with pytest.raises(RuntimeError, match=r"reset\(\) it first"):
        graph.capture_begin()
    graph.replay()
    assert x.tolist() == [3.0, 3.0]
    graph.reset()
    with pytest.raises(RuntimeError, match="nothing was captured"):
        graph.replay()


def lengths_are_updated_before_or_after_a_replay() -> None:
    import torch_npu

    q, kv = torch.randn(2, 1, 16).to("npu"), torch.randn(2, 5, 16).to("npu")
    attend = torch_npu.npu_fused_infer_attention_score
    graph = npu().NPUGraph()
    with npu().graph(graph, auto_dispatch_capture=True):
        out, _ = attend(q, kv, kv, num_heads=4, actual_seq_lengths_kv=[5, 5])
    for lengths in ([2, 3], [4, 1], [5, 5]):
        first, second = graph.replay, lambda n=lengths: graph.update([{"actual_seq_lengths_kv": n}])
        if lengths[0] == 4:
            first, second = second, first
        first()
        second()
        expected = attend(q, kv, kv, num_heads=4, actual_seq_lengths_kv=lengths)[0]
        torch.testing.assert_close(out.cpu(), expected.cpu())
    with pytest.raises(RuntimeError, match="3 updates for 1 calls"):
        graph.update([{}] * 3)
    graph.update([{"actual_seq_length_kv": [1, 1]}])
    with pytest.raises(UnknownName, match="actual_seq_lengths_kv"):
        graph.replay()


def a_group_of_calls_is_replaced() -> None:
    x, y = torch.ones(2, device="npu"), torch.full((2,), 5.0, device="npu")
    graph, stream = npu().NPUGraph(), npu().current_stream()
    with npu().graph(graph):
        npu().graph_task_group_begin(stream)
        out = (x * 2) + 1
        group = npu().graph_task_group_end(stream)
        after = out * 10
    graph.replay()
    assert (out.tolist(), after.tolist()) == ([3.0, 3.0], [30.0, 30.0])
    npu().graph_task_update_begin(stream, group)
    (y * 3) + 2
    npu().graph_task_update_end(stream)
    assert out.tolist() == [3.0, 3.0], "an update computes nothing"
    graph.replay()
    assert (out.tolist(), after.tolist()) == ([17.0, 17.0], [170.0, 170.0])
    npu().graph_task_update_begin(stream, group)
    y.sin()
    with pytest.raises(RuntimeError, match=r"the group is of aten\.mul\.Tensor, aten\.add\.Tensor"):
        npu().graph_task_update_end(stream)


def attention_into_given_memory_is_updated() -> None:
    """As servers capture it: a task group around `.out`, whose lengths change between replays."""
    import torch_npu

    q, kv = torch.randn(2, 1, 16).to("npu"), torch.randn(2, 5, 16).to("npu")
    out, lse = torch.empty_like(q), torch.empty(1, device="npu")
    attend = torch_npu.npu_fused_infer_attention_score
    same = {"num_heads": 4, "scale": 0.5}
    space = torch_npu._npu_fused_infer_attention_score_get_max_workspace(q, kv, kv, **same)

    def call(lengths: list[int]) -> None:
        attend.out(
            q, kv, kv, actual_seq_lengths_kv=lengths, workspace=space, out=[out, lse], **same
        )

    graph, stream = npu().NPUGraph(), npu().current_stream()
    with npu().graph(graph):
        npu().graph_task_group_begin(stream)
        call([5, 5])
        group = npu().graph_task_group_end(stream)
    for lengths in ([2, 3], [4, 1]):
        npu().graph_task_update_begin(stream, group)
        call(lengths)
        npu().graph_task_update_end(stream)
        graph.replay()
        expected = attend(q, kv, kv, actual_seq_lengths_kv=lengths, **same)[0]
        torch.testing.assert_close(out.cpu(), expected.cpu())


def groups_of_a_product_may_change() -> None:
    import torch_npu

    x, weight = torch.randn(4, 3, device="npu"), torch.randn(2, 3, 5, device="npu")
    counts, graph = torch.tensor([1, 3], device="npu"), npu().NPUGraph()
    with npu().graph(graph):
        [y] = torch_npu.npu_grouped_matmul(
            [x], [weight], group_list=counts, group_list_type=1, split_item=2, group_type=0
        )
    for first in (1, 3, 0):
        counts.copy_(torch.tensor([first, 4 - first]))
        graph.replay()
        expected = torch.cat([x.cpu()[:first] @ weight.cpu()[0], x.cpu()[first:] @ weight.cpu()[1]])
        torch.testing.assert_close(y.cpu(), expected, rtol=1e-4, atol=1e-4)


def a_collective_is_captured() -> None:
    import torch_npu  # noqa: F401  (it knows hccl)
    from torch import distributed

    distributed.init_process_group("hccl", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        x, graph = torch.ones(3, device="npu"), npu().NPUGraph()
        with npu().graph(graph):
            y = x * 2
            distributed.all_reduce(y)
            z = y + 1
        x.fill_(4)
        graph.replay()
        assert (y.tolist(), z.tolist()) == ([8.0] * 3, [9.0] * 3)
        graph.reset()  # before the group goes, which the calls hold
    finally:
        distributed.destroy_process_group()


CHECKS = {
    check.__name__: check
    for check in (
        it_runs_again_on_the_same_memory,
        training_steps_are_captured,
        each_replay_draws_anew,
        tensors_of_inference_mode_are_captured,
        a_compiled_function_is_captured,
        what_waits_for_the_device_is_refused,
        a_graph_is_used_in_order,
        lengths_are_updated_before_or_after_a_replay,
        a_group_of_calls_is_replaced,
        attention_into_given_memory_is_updated,
        groups_of_a_product_may_change,
        a_collective_is_captured,
    )
}
