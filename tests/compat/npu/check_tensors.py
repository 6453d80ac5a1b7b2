"""Tensors on the device: what the host sees of them, views, writes, sizes, copies, files."""

from __future__ import annotations

import copy
import ctypes
import io
import sys

import process
import pytest
import torch

pytestmark = pytest.mark.feature(
    "torch_npu", "simulated device: memory, copies, pinned memory, files, generators"
)


def test_the_host_cannot_reach_device_memory() -> None:
    script = (
        "import torch, ctypes\n"
        "from torchgraft.compat import simulated; simulated.activate()\n"
        "x = torch.ones(4, device='npu'); torch.npu.synchronize()\n"
        "ctypes.string_at(x.data_ptr(), 16)\n"
    )
    done = process.run([sys.executable, "-c", script])
    assert done.returncode == -11
    assert "host code read or wrote memory of an npu" in done.stderr


def test_a_host_pointer_is_not_taken_for_device_memory() -> None:
    buffer = ctypes.create_string_buffer(64)
    host = torch.frombuffer(buffer, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="cannot take a storage of cpu"):
        torch.empty(0, device="npu").set_(host.untyped_storage())


def test_a_tensor_says_where_it_is() -> None:
    x = torch.ones(2, 3).npu()
    assert x.is_npu
    assert x.device == torch.device("npu", 0)
    assert x.npu() is x
    with pytest.raises(TypeError, match="can't convert npu:0"):
        x.numpy()
    assert "device='npu:0'" in repr(x)


VIEWS = {
    "transpose": lambda x: x.t(),
    "slice": lambda x: x[1:, ::2],
    "select": lambda x: x[2],
    "view": lambda x: x.view(2, 12),
    "reshape": lambda x: x.t().reshape(3, 8),
    "expand": lambda x: x[:, :1].expand(4, 5),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "as_strided": lambda x: x.as_strided((3, 2), (2, 5), 1),
    "diagonal": lambda x: x.diagonal(1),
    "unbind": lambda x: x.unbind(1)[3],
    "split": lambda x: x.split(2)[1],
    "chunk": lambda x: x.chunk(3, 1)[2],
    "squeeze": lambda x: x[None].squeeze(0),
    "movedim": lambda x: x.view(2, 2, 6).movedim(0, 2),
    "narrow": lambda x: x.narrow(1, 2, 3),
    "dtype": lambda x: x.view(torch.int32),
    "complex": lambda x: torch.view_as_complex(x.view(4, 3, 2)),
    "real": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2))),
    "permute": lambda x: x.view(2, 2, 6).permute(2, 0, 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_shares_memory(name: str) -> None:
    host = torch.arange(24.0).view(4, 6)
    there = host.clone().npu()
    expected, view = VIEWS[name](host), VIEWS[name](there)
    assert view.device.type == "npu"
    assert (view.shape, view.stride(), view.storage_offset()) == (
        expected.shape, expected.stride(), expected.storage_offset(),
    )  # fmt: skip
    assert torch.equal(view.cpu(), expected)
    if name != "expand":
        same = view.untyped_storage().data_ptr() == there.untyped_storage().data_ptr()
        assert same == (name != "reshape")
        VIEWS[name](host).zero_()
        view.zero_()
        assert torch.equal(there.cpu(), host)


def test_writing_in_place() -> None:
    x, y = torch.randn(4, 4), torch.randn(4)
    a = x.clone().npu()
    x.add_(y).mul_(2)[1:, 2] = 7
    a.add_(y.npu()).mul_(2)[1:, 2] = 7
    x.index_put_((torch.tensor([0, 2]),), torch.tensor(3.0))
    a.index_put_((torch.tensor([0, 2]),), torch.tensor(3.0))
    x.masked_fill_(x > 3, -1)
    a.masked_fill_(a > 3, -1)
    assert torch.equal(a.cpu(), x)


def test_out_takes_the_size_of_the_result() -> None:
    x = torch.arange(6.0).npu()
    out = torch.empty(0, device="npu")
    assert torch.mul(x, 2, out=out) is out
    assert torch.equal(out.cpu(), torch.arange(6.0) * 2)
    found = torch.empty(0, dtype=torch.int64, device="npu")
    torch.nonzero(x > 3, out=found)  # its size depends on values
    assert found.flatten().tolist() == [4, 5]


def test_resizing_keeps_what_was_there() -> None:
    x = torch.arange(4.0).npu()
    x.resize_(2, 4)
    assert x.shape == (2, 4)
    assert x[0].tolist() == [0, 1, 2, 3]
    x.resize_(2)
    assert x.tolist() == [0, 1]
    storage = torch.arange(4.0).npu().untyped_storage()
    storage.resize_(8)
    assert torch.empty(0, device="npu").set_(storage, 0, (2,)).tolist() == [0, 1]
    y = torch.empty(0, device="npu")
    assert y.set_(x).data_ptr() == x.data_ptr()
    assert y.set_().numel() == 0


def test_lazy_marks_survive_a_copy() -> None:
    x = torch.randn(5, dtype=torch.complex64)
    assert torch.equal(x.npu().conj().cpu(), x.conj())
    assert torch.equal(x.conj().npu().cpu(), x.conj())
    assert torch.equal(x.npu().conj().imag.cpu(), x.conj().imag)
    assert torch.allclose((x.npu().conj() * 2).cpu(), x.conj() * 2)


def test_an_operator_that_takes_lazy_marks_leaves_its_input() -> None:
    x, y = (torch.randn(4, 4, dtype=torch.complex64) for _ in range(2))
    a, b = x.npu(), y.npu()
    torch.testing.assert_close((a.mH @ b).cpu(), x.mH @ y)
    assert torch.equal(a.cpu(), x)
    factors, pivots = torch.linalg.lu_factor(x)  # the kernel marks what it returns
    found = torch.linalg.lu_solve(factors.npu(), pivots.npu(), b, left=False)
    expected = torch.linalg.lu_solve(factors, pivots, y, left=False)
    torch.testing.assert_close(found.cpu(), expected.resolve_conj())


def test_copies_change_dtype_and_layout() -> None:
    x = torch.randn(3, 5)
    assert torch.equal(x.to("npu", torch.float64).cpu(), x.double())
    assert torch.equal(x.t().npu().half().cpu(), x.t().half())
    y = torch.zeros(5, 3)
    y.t()[1:].copy_(x.npu()[1:])
    assert torch.equal(y.t()[1:], x[1:])
    z = torch.zeros(2, 5, device="npu")
    z.copy_(x[0])  # of the host, and broadcast
    assert torch.equal(z.cpu(), x[0].expand(2, 5))


def test_a_pinned_tensor_is_copied_later() -> None:
    from torchgraft.compat import simulated

    x = torch.ones(8).pin_memory()
    assert x.is_pinned()
    assert not torch.ones(8).is_pinned()
    for seed in range(8):
        with simulated.adversary(seed):
            x.fill_(1)
            late = x.to("npu", non_blocking=True)
            now = torch.full((8,), 1.0).to("npu", non_blocking=True)
            x.fill_(2)  # a race: it may be seen
            back = torch.empty(8).pin_memory()
            back.copy_(late, non_blocking=True)
            torch.npu.synchronize()
            assert set(back.tolist()) <= {1.0, 2.0}
            assert now.tolist() == [1.0] * 8


def test_host_tensors_are_not_mixed_in() -> None:
    x = torch.ones(3, device="npu")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x + torch.ones(3)
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3]  # a number is taken along
    assert x[torch.tensor([0, 2])].tolist() == [1, 1]  # and so are indices


def test_files() -> None:
    x = torch.randn(3, 4).npu()
    for where, expected in ((None, "npu"), ("cpu", "cpu"), ("npu:0", "npu")):
        file = io.BytesIO()
        torch.save({"x": x, "view": x[1]}, file)
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert loaded["x"].device.type == expected
        assert torch.equal(loaded["x"].cpu(), x.cpu())
        assert loaded["view"].data_ptr() == loaded["x"][1].data_ptr()
    file = io.BytesIO()
    torch.save(torch.nn.Linear(2, 2).state_dict(), file)
    file.seek(0)
    assert torch.load(file, map_location="npu")["weight"].is_npu


def test_modules_move() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).npu()
    assert all(one.is_npu for one in model.state_dict().values())
    twin = copy.deepcopy(model)
    assert twin[0].weight.data_ptr() != model[0].weight.data_ptr()
    assert model.cpu()[0].weight.device.type == "cpu"


def test_random_numbers() -> None:
    torch.manual_seed(5)
    first = torch.randn(100, device="npu"), torch.nn.functional.dropout(torch.ones(100).npu(), 0.5)
    state = torch.npu.get_rng_state()
    after = torch.rand(10, device="npu")
    torch.manual_seed(5)
    again = torch.randn(100, device="npu"), torch.nn.functional.dropout(torch.ones(100).npu(), 0.5)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.rand(10, device="npu"), after)
    own = torch.Generator("npu").manual_seed(1)
    other = torch.Generator("npu").manual_seed(1)
    drawn = torch.randperm(50, generator=own, device="npu")
    assert torch.equal(drawn, torch.randperm(50, generator=other, device="npu"))
    with pytest.raises(RuntimeError, match="'npu' device type for generator"):
        torch.ones(3, device="npu").normal_(generator=torch.Generator())
    with torch.random.fork_rng(device_type="npu"):
        torch.rand(1, device="npu")
    assert set(again[1].tolist()) == {0.0, 2.0}


def test_memory_is_counted() -> None:
    torch.npu.synchronize()
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    x = torch.empty(1 << 20, device="npu")
    assert torch.npu.memory_allocated() - before == 4 << 20
    del x
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() - before == 4 << 20
    assert torch.npu.memory_reserved() >= 4 << 20
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() == before
    with pytest.raises(torch.OutOfMemoryError, match=r"npu:0 out of memory"):
        torch.empty(1 << 45, device="npu", dtype=torch.uint8)
    assert torch.npu.memory_stats()["num_ooms"] == 1


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match="there is no npu:7; this process simulates 1"):
        torch.ones(2, device="npu:7")


@pytest.mark.feature("torch_npu", "simulated device: sparse and quantized tensors", "refused")
def test_sparse_and_quantized_tensors_are_refused() -> None:
    x = torch.eye(3)
    for make in (
        lambda: x.to_sparse().npu(),
        lambda: x.npu().to_sparse(),
        lambda: x.to_sparse_csr().npu()._nnz(),
        lambda: torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], device="npu"),
    ):
        with pytest.raises(NotImplementedError, match=r"no sparse tensors. Use a dense one"):
            make()
    for make in (
        lambda: torch.quantize_per_tensor(x.npu(), 0.1, 0, torch.qint8),
        lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).npu(),
    ):
        with pytest.raises(NotImplementedError, match=r"no quantized tensors. Use torch.fake"):
            make()
    with pytest.raises(NotImplementedError, match=r"no nested tensors .*=torch.jagged"):
        torch.nested.nested_tensor([x, x]).npu()
    assert torch.fake_quantize_per_tensor_affine(x.npu(), 0.1, 0, -128, 127).is_npu
