"""What a captured CUDA graph takes and gives, as far as it can be told without a device."""

from __future__ import annotations

import torch

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
