"""What a captured CUDA graph takes and gives, as far as it can be told without a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchgraft._torch import cuda as private
from torchgraft.report import Report
from torchgraft.run import cuda


def test_a_twin_has_the_layout_and_the_gaps() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    for tensor in (whole, whole.t(), whole[1:, ::2], whole[0].expand(3, 6), whole[:0]):
        twin = cuda._twin(tensor)
        torch.testing.assert_close(twin, tensor)
        assert twin.stride() == tensor.stride()
        assert twin.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


def test_outputs_that_share_memory_are_made_as_one_tensor() -> None:
    base, other = torch.arange(12.0).reshape(3, 4), torch.arange(4.0)
    outputs = [base[1:], other, base.t(), 7, other, torch.empty(0)]
    parts = cuda._parts(outputs, {})
    assert [part.size for part in parts] == [48, 16]
    assert [part.origin for part in parts] == [base.data_ptr(), other.data_ptr()]
    results = list(outputs)
    for part in parts:
        part.make(results)
    assert results[3] == 7
    assert results[1] is results[4]
    assert results[1] is not other
    results[2].fill_(3.0)
    assert (results[0] == 3).all()
    for made, output in zip(results, outputs, strict=True):
        if isinstance(output, torch.Tensor):
            assert (made.shape, made.stride()) == (output.shape, output.stride())


def test_an_output_that_is_a_view_of_an_input_is_one_of_the_callers() -> None:
    own, theirs = torch.zeros(3, 4), torch.arange(24.0).reshape(6, 4)[2:5]
    outputs = [own, own[1], own.t(), torch.ones(2)]
    views = cuda._views([own, 5], outputs)
    assert views == {0: 0, 1: 0, 2: 0}
    same = [cuda._same_view(outputs[i], own, theirs) for i in views]
    assert same[0] is theirs
    torch.testing.assert_close(same[1], theirs[1])
    torch.testing.assert_close(same[2], theirs.t())
    assert all(
        view.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr() for view in same
    )


def test_a_slice_that_is_written_has_a_graph_for_each_shape() -> None:
    """The address of the first rows of a cache is the same, however many there are."""
    cache = torch.zeros(4, 6)
    program = cuda.Captured(
        lambda args: args, report=Report("", "", ""), written=frozenset([0]), static=frozenset([1])
    )
    keys = [program._key([cache[:, :n], cache]) for n in (3, 4, 3)]
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]


class Device:
    """What torch's allocator and graphs do at the end of a capture."""

    def __init__(self, valid: bool) -> None:
        self.valid, self.open, self.uses = valid, False, 0

    def begin(self, **_: Any) -> None:
        self.open, self.uses = True, self.uses + 1

    def end(self) -> None:
        if not self.valid:
            self.valid = True  # of the captures to come
            raise RuntimeError("operation failed due to a previous error during capture")
        self.leave(0, (0, 1))

    def leave(self, device: int, pool: tuple[int, int]) -> None:
        if not self.open:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.open = False

    def release(self, device: int, pool: tuple[int, int]) -> None:
        self.uses -= 1


@pytest.mark.parametrize("valid", [True, False])
def test_the_pool_of_a_failed_capture_is_given_back_once(
    valid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the graph, where the capture could be ended; a second time would end the process."""
    device, others = Device(valid), Device(True)
    for name, call in (("endAllocateToPool", device.leave), ("releasePool", device.release)):
        monkeypatch.setattr(torch._C, f"_cuda_{name}", call, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    empty = SimpleNamespace(capture_begin=others.begin, capture_end=others.end)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: empty)
    graph: Any = SimpleNamespace(capture_begin=device.begin, capture_end=device.end)
    with pytest.raises(ValueError, match="mine"), private.capturing(graph):
        raise ValueError("mine")
    assert not device.open
    assert device.uses == (1 if valid else 0), "a graph that was captured gives it back itself"
    assert others.uses == (0 if valid else 1), "the generator is told by an empty capture"
