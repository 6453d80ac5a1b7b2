"""Results: what compiled programs with collectives give, on any number of ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import check, main
from models import MLP, Block, grads_equal, split_block, split_mlp, split_sequence
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchgraft as graft
from torchgraft.program import Program


def compiled(fn: object, mode: str = "eager") -> tuple[object, list[Program]]:
    programs: list[Program] = []
    backend = graft.backend(graft.Config(mode=mode), on_program=programs.append)
    return torch.compile(fn, backend=backend, fullgraph=True), programs


def kinds(programs: list[Program]) -> list[str]:
    return [step.kind for program in programs for step in program.plan.collectives]


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


@check
def mlp_by_hand() -> None:
    """Columns, then rows, then a sum over the ranks: functional collectives, forward and backward,
    in generated code."""
    rank, size = world()
    up, down = torch.randn(8, 16), torch.randn(16, 8)
    own = [up.chunk(size, 1)[rank].clone(), down.chunk(size, 0)[rank].clone()]
    own = [w.requires_grad_() for w in own]
    x = torch.randn(4, 8)

    def forward(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y = torch.relu(x @ up) @ down
        return functional.all_reduce(y, "sum", dist.group.WORLD)

    run, programs = compiled(forward, mode="default")
    y = run(x, *own)
    y.sum().backward()
    whole = [up.requires_grad_(), down.requires_grad_()]
    expected = torch.relu(x @ whole[0]) @ whole[1]
    expected.sum().backward()
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
    for dim, own_weight, weight in zip((1, 0), own, whole, strict=True):
        wanted = weight.grad.chunk(size, dim)[rank] * size  # each rank's loss is the whole one's
        torch.testing.assert_close(own_weight.grad, wanted, atol=1e-4, rtol=1e-4)
    assert kinds(programs) == ["all_reduce", "all_reduce"]
    assert programs[0].report.regions  # the rest is generated


@check
def mlp_of_dtensors() -> None:
    _, size = world()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    whole = MLP()
    split = split_mlp(whole, mesh)
    x = torch.randn(4, 8)
    run, programs = compiled(split)
    y = run(x)
    y.square().sum().backward()
    expected = whole(x)
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    grads_equal(split, whole)
    assert kinds(programs) == ["all_reduce"]


@check
def transformer_block() -> None:
    _, size = world()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    whole = Block()
    split = split_block(whole, mesh)
    x = torch.randn(2, 8, 16)
    run, programs = compiled(split)
    given = x.clone().requires_grad_()
    y = run(given)
    y.square().sum().backward()
    original = x.clone().requires_grad_()
    expected = whole(original)
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(given.grad, original.grad, atol=1e-4, rtol=1e-4)
    grads_equal(split, whole)
    assert kinds(programs[:1]) == ["all_reduce"] * 2
    for program in programs:
        assert not program.plan.hazards()
        assert {step.stream for step in program.plan.collectives} <= {"comm:world"}


@check
def sequence_parallel_block() -> None:
    rank, size = world()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    whole = Block()
    split = split_sequence(whole, mesh)
    x = torch.randn(2, 8, 16)
    run, programs = compiled(split)
    y = run(x.chunk(size, 1)[rank].clone())
    y.square().sum().backward()
    expected = whole(x)
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected.chunk(size, 1)[rank], atol=1e-5, rtol=1e-5)
    for name in ("attention.q", "mlp.up", "mlp.down", "attention.out"):
        grad = split.get_submodule(name).weight.grad.full_tensor()
        wanted = whole.get_submodule(name).weight.grad
        torch.testing.assert_close(grad, wanted, atol=1e-4, rtol=1e-4)
    assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= set(kinds(programs))


@check
def in_place_collectives() -> None:
    """`torch.distributed` as model code writes it, each in one graph without a break."""
    rank, size = world()

    def all_reduce(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    def all_gather_into_tensor(x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0] * size, x.shape[1])
        dist.all_gather_into_tensor(out, x)
        return out + x.sum()

    def reduce_scatter_tensor(x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0] // size, x.shape[1])
        dist.reduce_scatter_tensor(out, x)
        return out * 2

    def all_to_all_single(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out - 1

    def broadcast(x: Tensor) -> Tensor:
        y = x + rank
        dist.broadcast(y, size - 1)
        return y * 2

    x = torch.randn(4, 3) + rank
    for fn in (
        all_reduce,
        all_gather_into_tensor,
        reduce_scatter_tensor,
        all_to_all_single,
        broadcast,
    ):
        expected = fn(x)
        run, programs = compiled(fn)
        torch.testing.assert_close(run(x), expected)
        assert kinds(programs) == [fn.__name__], fn.__name__
        ahead = graft.compile(fn, (x,), mode="eager")
        torch.testing.assert_close(ahead(x), expected)
        assert [step.kind for step in ahead.plan.collectives] == [fn.__name__], fn.__name__


@check
def uneven_all_to_all() -> None:
    """Each rank gives each other rank another number of rows."""
    rank, size = world()
    gives = [1 + (rank + other) % 2 for other in range(size)]

    def exchange(x: Tensor) -> Tensor:
        out = torch.empty(sum(gives), 2)  # the counts are symmetric
        dist.all_to_all_single(out, x, gives, gives)
        return out * 2

    x = torch.arange(2.0 * sum(gives)).view(-1, 2) + 100 * rank
    run, _ = compiled(exchange)
    torch.testing.assert_close(run(x), exchange(x))

    def routed(x: Tensor, counts: list[int]) -> Tensor:
        """As a router does it: how many rows go where is known at the call."""
        out = torch.empty(sum(counts), 2)
        dist.all_to_all_single(out, x, counts, counts)
        return out * 2

    run = torch.compile(routed, backend="torchgraft", mode="eager", dynamic=True)
    for more in range(3):
        counts = [2 + (rank + other + more) % 3 for other in range(size)]
        x = torch.arange(2.0 * sum(counts)).view(-1, 2) + 100 * rank
        torch.testing.assert_close(run(x, counts), routed(x, counts))


@check
def send_and_receive() -> None:
    """A ring: even ranks send first, odd ones receive first."""
    rank, size = world()
    after, before = (rank + 1) % size, (rank - 1) % size

    def ring(x: Tensor) -> Tensor:
        y, got = x * 2, torch.empty_like(x)
        if rank % 2 == 0:
            dist.send(y, after)
            dist.recv(got, before)
        else:
            dist.recv(got, before)
            dist.send(y, after)
        return got + x

    x = torch.full((3,), float(rank))
    run, programs = compiled(ring)
    torch.testing.assert_close(run(x), x + 2 * before)
    assert sorted(kinds(programs)) == ["recv", "send"]
    ahead = graft.compile(ring, (x,), mode="eager")
    torch.testing.assert_close(ahead(x), x + 2 * before)


@check
def fsdp_training() -> None:
    """FSDP2 trains to the weights of one process; its collectives are its hooks' own."""
    rank, size = world()
    whole, split = nn.Sequential(MLP(), MLP()), nn.Sequential(MLP(), MLP())
    split.load_state_dict(whole.state_dict())
    programs: list[Program] = []
    for block in split:
        block.compile(backend=graft.backend(graft.Config(mode="eager"), on_program=programs.append))
        fully_shard(block)
    fully_shard(split)
    one = torch.optim.SGD(whole.parameters(), 0.1)
    two = torch.optim.SGD(split.parameters(), 0.1)
    for _ in range(2):
        x = torch.randn(2 * size, 8)
        whole(x).square().mean().backward()
        split(x.chunk(size)[rank]).square().mean().backward()
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
    for name, weight in split.named_parameters():
        expected = whole.get_parameter(name)
        torch.testing.assert_close(weight.full_tensor(), expected, atol=1e-5, rtol=1e-5)
    assert any("addmm" in str(program.plan) for program in programs)


if __name__ == "__main__":
    main()
