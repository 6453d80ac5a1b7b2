"""Large constants lie in huge pages, are the same values, and are given back."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchgraft as graft
from torchgraft.codegen import inductor
from torchgraft.run import pages
from torchgraft.run.pages import LEAST, PAGE, ROOM, Pages

needs_pages = pytest.mark.skipif(not pages.has_huge(), reason="no huge pages on this system")
LARGE = LEAST // 4


def mapped(tensor: Tensor) -> int | None:
    """How many bytes of huge pages the mapping has that a tensor lies in."""
    address, found = tensor.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(span[1], 16) <= address < int(span[2], 16)
        elif found and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return None


@needs_pages
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64])
def test_a_large_tensor_is_copied_with_its_strides(dtype: torch.dtype) -> None:
    size = 2 * PAGE // dtype.itemsize
    tensor = torch.arange(size).to(dtype).view(64, -1).t()
    copy = Pages().settle(tensor)
    assert copy.data_ptr() != tensor.data_ptr()
    assert (copy.stride(), copy.storage_offset(), copy.dtype) == (tensor.stride(), 0, dtype)
    assert torch.equal(copy, tensor)
    assert mapped(copy)


@needs_pages
def test_tensors_lie_behind_each_other_until_there_is_no_room() -> None:
    place = Pages()
    tensors = [torch.full((LARGE + 1,), float(i)) for i in range(3)]
    copies = [place.settle(tensor) for tensor in tensors]
    first = copies[0].data_ptr()
    assert first % PAGE == 0
    step = copies[1].data_ptr() - first
    assert LEAST < step < LEAST + 128
    assert copies[2].data_ptr() == first + 2 * step
    whole = place.settle(torch.ones((ROOM + PAGE) // 4))
    assert whole.data_ptr() % PAGE == 0
    assert whole.sum() == (ROOM + PAGE) // 4
    assert [copy.unique().tolist() for copy in copies] == [[0.0], [1.0], [2.0]]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(LARGE - 1),
        torch.zeros(1).expand(4 * LARGE),
        torch.zeros(4 * LARGE)[::2],
        torch.zeros(2 * LARGE).as_strided((2, LARGE), (0, 2)),
        torch.zeros(4 * LARGE, device="meta"),
        torch.zeros(512, LARGE // 128).to_sparse(),
        torch.zeros(LARGE, dtype=torch.complex64).conj(),
    ],
    ids=["small", "one value", "gaps", "overlap", "no memory", "sparse", "conjugate"],
)
def test_others_stay_where_they_are(tensor: Tensor) -> None:
    assert Pages().settle(tensor) is tensor


def test_systems_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "has_huge", lambda: False)
    tensor = torch.zeros(LARGE)
    assert Pages().settle(tensor) is tensor


@needs_pages
def test_memory_is_given_back_with_the_last_tensor() -> None:
    def resident() -> int:
        [found] = re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found) >> 10

    place = Pages()
    before, copies = resident(), [place.settle(torch.ones(4 * PAGE)) for _ in range(8)]
    assert resident() - before > 200
    place, copies[1:] = Pages(), []
    assert copies[0].sum() == 4 * PAGE
    copies.clear()
    gc.collect()
    assert resident() - before < 50


@pytest.mark.parametrize("huge", [True, False])
def test_weights_that_fit_no_cache_are_for_generated_code_in_huge_pages(
    huge: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "has_huge", lambda: huge)
    assert inductor._by_generator([(1, int(2 * inductor.CACHED))])
    assert inductor._by_generator([(1, int(3 * inductor.CACHED))]) == huge


@needs_pages
@pytest.mark.parametrize("rows", [1, 3])
def test_a_program_whose_weights_fit_no_cache(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With such pages its products are generated code, which reads faster than a library does."""
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).eval()
    x = torch.randn(rows, 512)
    monkeypatch.setattr(inductor, "CACHED", 1e5)
    compiled = graft.compile(model, (x,))
    wanted = model(x)
    torch.testing.assert_close(compiled(x), wanted)
    with torch.no_grad():
        model[0].weight.zero_()
    torch.testing.assert_close(compiled(x), wanted)  # it is frozen
    compiled.load_state_dict(model.state_dict())
    torch.testing.assert_close(compiled(x), model(x))


@needs_pages
@pytest.mark.slow
def test_a_package_with_large_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).eval()
    x = torch.randn(1, 512)
    graft.compile(model, (x,)).save(tmp_path / "large.graft")
    torch.testing.assert_close(graft.load(tmp_path / "large.graft")(x), model(x))
