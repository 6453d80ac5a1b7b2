"""A mesh of two by two ranks: groups by name, two of them in one program. Four ranks."""

from __future__ import annotations

import os
import pathlib

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from compute import compiled
from harness import CHECKS, check, main, raised
from models import MLP, Block, grads_equal, split_block, split_mlp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torchgraft as graft
from torchgraft.errors import RanksDiffer

WANTED = ("transformer_block", "send_and_receive")
"""What `compute` has checked on two ranks and is checked on four, too."""
for name in set(CHECKS) - set(WANTED):
    del CHECKS[name]


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@check
def groups_by_name() -> None:
    """torch numbers the groups of a mesh; the plan is the same on every rank."""
    grid = mesh()
    tp, dp = grid.get_group("tp"), grid.get_group("dp")

    def fn(x: Tensor) -> Tensor:
        y = functional.all_reduce(x + 1, "sum", tp)
        z = functional.all_reduce(x * 2, "sum", dp)
        return y.cos() + z

    x = torch.arange(4.0) + dist.get_rank()
    run, programs = compiled(fn)
    torch.testing.assert_close(run(x), fn(x))
    plan = programs[0].plan
    assert [(s.group, s.stream) for s in plan.collectives] == [("tp", "comm:tp"), ("dp", "comm:dp")]
    plans: list[str] = [""] * 4
    dist.all_gather_object(plans, str(plan))
    assert len(set(plans)) == 1
    names: list[str] = [""] * 4
    dist.all_gather_object(names, tp.group_name)
    assert len(set(names)) == 2  # which is why


@check
def data_and_tensor_parallel() -> None:
    """A block split over `tp`, its gradients averaged over `dp` in the same graph."""
    grid, rank = mesh(), dist.get_rank()
    whole = Block()
    split = split_block(whole, grid["tp"])
    x = torch.randn(2, 8, 16)
    run, programs = compiled(split)
    run(x[rank // 2 : rank // 2 + 1]).square().sum().backward()
    for weight in split.parameters():
        local = getattr(weight.grad, "_local_tensor", weight.grad)
        dist.all_reduce(local, group=grid.get_group("dp"))
    whole(x).square().sum().backward()
    grads_equal(split, whole)
    assert {step.group for program in programs for step in program.plan.collectives} == {"tp"}


@check
def one_file_serves_every_rank() -> None:
    """Saved by rank 0, whose `tp` is another group of ranks than that of ranks 2 and 3."""
    grid, rank = mesh(), dist.get_rank()
    whole = nn.Sequential(MLP(), nn.ReLU())
    whole[0] = split_mlp(whole[0], grid["tp"])
    x = torch.randn(4, 8) + rank // 2
    torch.manual_seed(0)
    expected = nn.Sequential(MLP(), nn.ReLU())(x)
    compiled = graft.compile(whole, (x,), mode="eager")
    path = pathlib.Path(os.environ["OUT"]) / "mesh.graft"
    if rank == 0:
        compiled.save(path)
    dist.barrier()
    loaded = graft.load(path, weights=whole.state_dict())
    torch.testing.assert_close(loaded(x), expected)
    assert [step.group for step in loaded.plan.collectives] == ["tp"]


@check
def groups_in_another_order() -> None:
    """Ranks 0 and 3 begin with `tp`, the others with `dp`: nobody waits in a circle to agree."""
    grid, rank = mesh(), dist.get_rank()
    tp, dp = grid.get_group("tp"), grid.get_group("dp")

    def fn(x: Tensor) -> Tensor:
        if rank in (0, 3):
            one = functional.all_reduce(x + 1, "sum", tp)
            return one - functional.all_reduce(x * 2, "sum", dp)
        two = functional.all_reduce(x * 2, "sum", dp)
        return functional.all_reduce(x + 1, "sum", tp) - two

    x = torch.full((4,), float(rank))
    run, programs = compiled(fn)
    pair, across = {0: (1, 2), 1: (1, 4), 2: (5, 2), 3: (5, 4)}[rank]
    torch.testing.assert_close(run(x), torch.full((4,), pair + 2.0 - 2 * across))
    assert {step.group for step in programs[0].plan.collectives} == {"tp", "dp"}


@check
def letters_of_unknown_size() -> None:
    """Each even rank gives its neighbour rows, as many as there are at the call; sizes are compared
    by those two, and the other pair may have others."""
    rank = dist.get_rank()

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        if rank % 2 == 0:
            dist.send(y, rank + 1)
            return y
        got = torch.empty_like(x)
        dist.recv(got, rank - 1)
        return got

    run = torch.compile(fn, backend="torchgraft", mode="eager", dynamic=True, fullgraph=True)
    for rows in (3, 5, 4 + rank // 2):
        torch.testing.assert_close(run(torch.ones(rows, 2)), torch.full((rows, 2), 2.0))
    error = raised(lambda: run(torch.ones(3 + rank % 2, 2)), RanksDiffer)
    assert "recv(f32[4, 2]" in error.has, error
    assert "send(f32[3, 2]" in error.other, error


if __name__ == "__main__":
    main()
