"""Streams are threads: what is not ordered may happen in any order, and the adversary shows it."""

from __future__ import annotations

import threading

import pytest
import torch

from torchgraft.compat import simulated
from torchgraft.errors import BadValue, GraftError

pytestmark = pytest.mark.feature(
    "torch_npu", "simulated device: asynchronous streams, events, the adversary"
)

SEEDS = range(12)


def two_streams(wait: bool) -> list[float]:
    """A producer on a side stream, a consumer on the current one."""
    side = torch.npu.Stream()
    x = torch.zeros(64, device="npu")
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x.add_(1).mul_(3)
    if wait:
        torch.npu.current_stream().wait_stream(side)
    y = x + 1
    return y.unique().tolist()


def test_a_wait_holds_under_every_seed() -> None:
    for seed in SEEDS:
        with simulated.adversary(seed):
            assert two_streams(wait=True) == [4.0]


def test_a_missing_wait_shows() -> None:
    found = []
    for seed in SEEDS:
        with simulated.adversary(seed):
            found.append(two_streams(wait=False))
        torch.npu.synchronize()
    assert [1.0] in found  # nothing of the side stream had run


def test_a_consumer_that_is_too_early_shows() -> None:
    found = []
    for seed in SEEDS:
        with simulated.adversary(seed):
            side = torch.npu.Stream()
            x = torch.zeros(64, device="npu")
            torch.npu.synchronize()
            x.add_(5)
            with torch.npu.stream(side):  # and does not wait
                y = x * 2
            side.synchronize()
            with torch.npu.stream(side):
                found.append(y.unique().tolist())
        torch.npu.synchronize()
    assert [0.0] in found


def test_the_adversary_is_the_same_twice() -> None:
    def run() -> list[list[float]]:
        made = []
        for seed in SEEDS:
            with simulated.adversary(seed):
                side = torch.npu.Stream(stream_id=7, device_index=0, device_type=20)
                torch.npu.synchronize()
                x = torch.zeros(8, device="npu")
                torch.npu.synchronize()
                with torch.npu.stream(side):
                    x.add_(1)
                made.append(x.cpu().tolist())
            torch.npu.synchronize()
        return made

    assert all(len(set(map(str, run()))) <= 2 for _ in range(2))


def test_work_is_done_after_the_call_has_returned() -> None:
    release = threading.Event()
    lib = torch.library.Library("npu_streams", "DEF")
    lib.define("hold(Tensor x) -> Tensor")
    lib.impl("hold", lambda x: (release.wait(60), x + 1)[1], "CPU")
    lib.impl("hold", lambda x: torch.empty_like(x), "Meta")
    x = torch.ones(2, device="npu")
    torch.npu.synchronize()
    y = torch.ops.npu_streams.hold(x) * 3
    event = torch.npu.current_stream().record_event()
    assert not torch.npu.current_stream().query()
    assert not event.query()
    release.set()
    event.synchronize()
    assert event.query()
    assert y.tolist() == [6, 6]


def test_the_current_stream_is_per_thread_and_per_device() -> None:
    side = torch.npu.Stream()
    seen = []
    with torch.npu.stream(side):
        assert torch.npu.current_stream() == side
        thread = threading.Thread(target=lambda: seen.append(torch.npu.current_stream()))
        thread.start()
        thread.join()
        with torch.npu.stream(None):
            assert torch.npu.current_stream() == side
        with torch.npu.stream(torch.npu.default_stream()):
            assert torch.npu.current_stream() == torch.npu.default_stream()
    assert seen == [torch.npu.default_stream()] == [torch.npu.current_stream()]
    assert isinstance(torch.npu.current_stream(), torch.npu.Stream)


def test_events() -> None:
    first, second = (torch.npu.Event(enable_timing=True) for _ in range(2))
    assert isinstance(first, torch.npu.Event)
    assert first.query()  # never recorded
    first.record()
    x = torch.randn(256, 256, device="npu")
    for _ in range(4):
        x = x @ x
    second.record()
    second.synchronize()
    assert first.elapsed_time(second) > 0
    with pytest.raises(GraftError, match="interprocess"):
        torch.npu.Event(interprocess=True)


def test_an_event_is_the_moment_that_was_recorded_last() -> None:
    for seed in SEEDS:
        with simulated.adversary(seed):
            side, event = torch.npu.Stream(), torch.npu.Event()
            x = torch.zeros(4, device="npu")
            side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                x.add_(1)
                event.record()
                x.add_(1)
                event.record()
            event.wait()
            assert x.tolist() == [2] * 4


def test_a_failure_comes_at_the_next_wait_and_once() -> None:
    x = torch.ones(3, device="npu")
    bad = x[torch.tensor([9], device="npu")]
    assert bad.shape == (1,)
    with pytest.raises(
        RuntimeError, match=r"aten::index failed on npu:0, stream 0.*index 9 is out"
    ):
        torch.npu.synchronize()
    torch.npu.synchronize()
    assert x.tolist() == [1, 1, 1]


def test_shapes_that_do_not_fit_are_told_at_once() -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.ones(3, device="npu") + torch.ones(4, device="npu")


def test_memory_in_use_elsewhere_is_not_given_again() -> None:
    """With record_stream a freed tensor waits for the other stream; without, it is written over."""

    def run(record: bool) -> list[float]:
        torch.npu.empty_cache()  # so that what is freed is what is given next
        side = torch.npu.Stream()
        out = torch.zeros(512, device="npu")
        x = torch.full((512,), 5.0, device="npu")
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            out.add_(x)
            if record:
                x.record_stream(side)
        del x
        other = torch.full((512,), -1.0, device="npu")
        torch.npu.synchronize()
        assert other[0].item() == -1
        return out.unique().tolist()

    wrong = []
    for seed in SEEDS:
        with simulated.adversary(seed):
            assert run(record=True) == [5.0]
            wrong.append(run(record=False))
    assert [-1.0] in wrong


def test_results_do_not_depend_on_the_adversary() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).npu()
    x = torch.randn(4, 8, device="npu")
    expected = model(x).cpu()
    for seed in SEEDS:
        with simulated.adversary(seed):
            assert torch.equal(model(x).cpu(), expected)


def test_a_seed_must_be_a_number() -> None:
    with pytest.raises(BadValue), simulated.adversary(-1):
        pass


def test_many_threads() -> None:
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.npu.stream(torch.npu.Stream()):
                x = torch.full((32, 32), float(seed), device="npu")
                for _ in range(20):
                    x = (x * 2 + 1 - x) @ torch.eye(32, device="npu")
                assert x.unique().tolist() == [seed + 20.0]
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failed


def test_what_is_no_stream_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a torch.npu.Stream, got 3"), torch.npu.stream(3):
        pass
    with pytest.raises(TypeError, match=r"expected a torch.npu.Stream, got 3"):
        torch.npu.set_stream(3)
