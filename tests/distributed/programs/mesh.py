"""A mesh of two by two ranks: groups by name, two of them in one program. Four ranks."""

from __future__ import annotations

import os
import pathlib

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from compute import compiled
from harness import CHECKS, check, main
from models import MLP, Block, grads_equal, split_block, split_mlp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torchgraft as graft

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


if __name__ == "__main__":
    main()
