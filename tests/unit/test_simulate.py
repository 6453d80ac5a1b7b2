"""The model of links and ranks: its arithmetic and what must follow from it; never a time."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchgraft as graft
from bench import scale
from torchgraft.errors import BadValue, UnknownName
from torchgraft.inspect.timeline import predict_together
from torchgraft.plan import Collective, Plan
from torchgraft.simulate import KINDS, Cluster, Link, moves, simulate

LINK = Link(alpha=1.0, beta=0.5)

# Two halves: the first one's sum goes on while the second one is computed.
OVERLAPPED = Plan.parse("""
def plan(b0, b1):
    b2 = launch('main', 'mm', b0)
    record('main', 'e0')
    wait('comm:tp', 'e0')
    b3 = collective('comm:tp', 'ar', b2, 'sum', 'tp', kind='all_reduce', type='f32[2]', nbytes=8)
    record('comm:tp', 'e1')
    b4 = launch('main', 'mm', b1)
    wait('main', 'e1')
    b5 = launch('main', 'add', b3, b4)
    return (b5,)
""")


@pytest.mark.parametrize(
    ("kind", "ring", "tree"),
    [
        ("all_reduce", (6, 12), (4, 16)),
        ("all_gather_into_tensor", (3, 24), (2, 24)),
        ("reduce_scatter_tensor", (3, 6), (2, 6)),
        ("all_to_all_single", (3, 6), (3, 6)),
        ("broadcast", (3, 8), (2, 8)),
        ("send", (1, 8), (1, 8)),
        ("recv", (1, 8), (1, 8)),
        ("all_reduce_coalesced", (6, 12), (4, 16)),
    ],
)
def test_messages_and_bytes_of_eight_bytes_on_four_ranks(
    kind: str, ring: tuple[int, int], tree: tuple[int, int]
) -> None:
    assert moves(kind, 8, 4, "ring") == ring
    assert moves(kind, 8, 4, "tree") == tree


def test_one_rank_talks_to_nobody() -> None:
    assert {Cluster(1, LINK).seconds(kind, 1 << 20) for kind in KINDS} == {0.0}


def test_the_better_algorithm_is_taken() -> None:
    def times(nbytes: int) -> list[float]:
        algorithms = ("ring", "tree", "best")
        return [Cluster(64, LINK, algorithm=a).seconds("all_reduce", nbytes) for a in algorithms]

    ring, tree, best = times(1)
    assert tree == best < ring
    ring, tree, best = times(1 << 30)
    assert ring == best < tree


def test_an_all_reduce_over_nodes_is_done_in_the_node_first() -> None:
    slow = Link(alpha=10.0, beta=5.0)
    cluster = Cluster(8, LINK, node=4, between=slow, algorithm="ring")
    # Reduce-scatter and all-gather of 4 ranks; between them, 2 ranks sum a quarter.
    inside = 2 * LINK.seconds(3, 64 * 3 / 4)
    assert cluster.seconds("all_reduce", 64) == inside + slow.seconds(2, 2 * 16 / 2)
    assert cluster.seconds("reduce_scatter", 64) == inside / 2 + slow.seconds(1, 16 / 2)
    assert cluster.seconds("all_gather", 8) == slow.seconds(1, 8) + LINK.seconds(3, 3 * 16)
    assert cluster.seconds("broadcast", 8) == slow.seconds(1, 8) + LINK.seconds(3, 8)
    assert cluster.seconds("all_to_all", 64) == LINK.seconds(3, 24) + slow.seconds(4, 32)
    assert cluster.seconds("send", 8) == slow.seconds(1, 8)


def test_a_group_lies_where_the_cluster_says() -> None:
    slow = Link(alpha=10.0, beta=5.0)
    groups: dict[str, Any] = {"tp": 4, "dp": (2, 1)}
    cluster = Cluster(8, LINK, node=4, between=slow, groups=groups, algorithm="ring")
    assert cluster.seconds("all_reduce", 64, "tp") == LINK.seconds(6, 2 * 48)
    assert cluster.seconds("all_reduce", 64, "dp") == slow.seconds(2, 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("node", [None, 8])
def test_more_bytes_and_slower_links_never_help(kind: str, node: int | None) -> None:
    def seconds(alpha: float = 2e-6, beta: float = 1e-11, nbytes: int = 1 << 16) -> float:
        between = Link(2 * alpha, 4 * beta) if node else None
        return Cluster(64, Link(alpha, beta), node, between).seconds(kind, nbytes)

    assert seconds() < seconds(alpha=3e-6)
    assert seconds() < seconds(beta=2e-11)
    assert seconds() < seconds(nbytes=1 << 20)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "best"])
def test_more_ranks_never_talk_faster(kind: str, algorithm: str) -> None:
    sizes = [2**i for i in range(11)]
    times = [Cluster(p, LINK, algorithm=algorithm).seconds(kind, 4096) for p in sizes]
    assert all(few <= many for few, many in itertools.pairwise(times))


def test_a_link_is_found_again_from_its_times() -> None:
    link = Link(alpha=3e-5, beta=2e-9)
    kinds = [("all_reduce", 2), ("all_gather", 4), ("broadcast", 3)]
    samples = [
        (kind, nbytes, ranks, link.seconds(*moves(kind, nbytes, ranks, "ring")))
        for kind, ranks in kinds
        for nbytes in (64, 4096, 1 << 20)
    ]
    found = Link.fit(samples)
    assert found.alpha == pytest.approx(link.alpha)
    assert found.beta == pytest.approx(link.beta)


def test_a_fit_never_has_a_negative_cost() -> None:
    falling = [("send", 1, 2, 2.0), ("send", 100, 2, 1.0)]
    rising = [("send", 1, 2, 0.001), ("send", 100, 2, 1.0)]
    assert Link.fit(falling).beta == 0 < Link.fit(falling).alpha
    assert Link.fit(rising).alpha == 0 < Link.fit(rising).beta


def test_a_collective_runs_beside_the_kernels_that_do_not_need_it() -> None:
    cluster = Cluster(2, LINK, algorithm="ring")  # 2 messages, 8 bytes: 6 seconds
    made = simulate(OVERLAPPED, cluster, [5.0, 0.0, 4.0, 1.0])
    assert (made.kernels, made.collectives, made.serial) == (10.0, 6.0, 16.0)
    assert made.seconds == 5 + 6 + 1
    assert made.hidden == pytest.approx(4 / 6)
    assert [s.start for s in made.timeline.spans] == [0, 5, 5, 11]
    assert (
        str(made).splitlines()[0] == "2 ranks: 12000000.0 us a call, 16000000.0 us without overlap"
    )


def test_without_times_of_kernels_the_links_are_left() -> None:
    made = simulate(OVERLAPPED, Cluster(2, LINK))
    assert (made.kernels, made.seconds, made.serial) == (0.0, 6.0, 6.0)


def test_overlap_never_costs() -> None:
    for ranks in (1, 2, 8, 64, 1024):
        made = simulate(OVERLAPPED, Cluster(ranks, LINK), [5.0, 9.0, 4.0, 1.0])
        assert max(made.kernels, made.collectives) <= made.seconds <= made.serial


def test_times_come_from_a_profile() -> None:
    compiled = graft.compile(nn.Linear(4, 4), (torch.randn(2, 4),), mode="eager")
    profile = compiled.profile((torch.randn(2, 4),), repeat=1)
    made = simulate(compiled.plan, Cluster(8, LINK), profile)
    assert made.seconds == pytest.approx(sum(kernel.seconds for kernel in profile.kernels))
    assert made.hidden is None
    with pytest.raises(BadValue, match="a profile of this plan"):
        simulate(OVERLAPPED, Cluster(8, LINK), profile)


DYNAMIC = Plan.parse(str(OVERLAPPED).replace("nbytes=8", "nbytes=None"))
STRANGE = Plan.parse(str(OVERLAPPED).replace("'all_reduce'", "'all_reduse'"))


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda: Link(-1.0, 0.0), BadValue, "Link.alpha: expected seconds, 0 or more, got -1.0"),
        (lambda: Link(0.0, float("nan")), BadValue, "Link.beta"),
        (lambda: Link.fit([]), BadValue, "two sizes"),
        (lambda: Link.fit([("send", 1, 2, 0.0)]), BadValue, "seconds"),
        (lambda: Cluster(0, LINK), BadValue, "Cluster.ranks: expected a number of ranks"),
        (lambda: Cluster(2, 1e-6), BadValue, "a graft.Link"),  # type: ignore[arg-type]
        (lambda: Cluster(8, LINK, node=4), BadValue, "node and between"),
        (lambda: Cluster(9, LINK, node=4, between=LINK), BadValue, "a multiple of 4"),
        (lambda: Cluster(8, LINK, groups={"tp": 16}), BadValue, "1 to 8"),
        (lambda: Cluster(8, LINK, algorithm="rings"), UnknownName, "Did you mean 'ring'"),
        (lambda: simulate("plan", Cluster(2, LINK)), BadValue, "a plan"),  # type: ignore[arg-type]
        (lambda: simulate(OVERLAPPED, 8), BadValue, "a graft.Cluster"),  # type: ignore[arg-type]
        (lambda: simulate(OVERLAPPED, Cluster(2, LINK), [1.0]), BadValue, "4 times"),
        (lambda: simulate(OVERLAPPED, Cluster(2, LINK), [-1.0] * 4), BadValue, "kernels"),
        (lambda: simulate(OVERLAPPED, Cluster(2, LINK), [[1.0] * 4]), BadValue, "2 ranks"),
        (
            lambda: simulate(OVERLAPPED, Cluster(2, LINK, groups={"tp": 1}), [[1.0] * 4] * 2),
            BadValue,
            "group 'tp': expected all ranks",
        ),
        (lambda: simulate(DYNAMIC, Cluster(2, LINK)), BadValue, "known before a call"),
        (lambda: simulate(STRANGE, Cluster(2, LINK)), UnknownName, "Did you mean 'all_reduce'"),
    ],
)
def test_wrong_arguments_say_what_was_expected(
    wrong: Callable[[], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        wrong()


# --- The page of what it says about many GPUs, and the bench that checks it here ---

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "scale.md").read_text()


@pytest.mark.parametrize("case", scale.CASES)
def test_the_page_says_what_the_model_says(case: str) -> None:
    assert scale.table(scale.rows(scale.CASES[case])) in PAGE


def test_the_page_says_what_the_assumptions_do() -> None:
    assert scale.variants() in PAGE


@pytest.mark.slow
def test_two_gloo_ranks_run_the_plan_that_is_on_paper() -> None:
    found = scale.measure(2, scale.Size(batch=2, length=128, width=256, blocks=1, calls=3))
    plan = Plan.parse(found.overlap.plan)
    made = simulate(plan, found.cluster(Link(1e-4, 1e-9)), found.overlap.launches[0])
    paper = dataclasses.replace(scale.CASES["decode"], blocks=1).simulated(2, parts=2)
    nbytes = 128 * 256 * 4
    assert [(t.kind, t.ranks) for t in made.talks] == [(t.kind, t.ranks) for t in paper.talks]
    assert [talk.nbytes for talk in made.talks] == [nbytes] * 4
    assert made.hidden > 0
    assert made.seconds < made.serial
    assert [(ranks, nbytes) for ranks, nbytes, _ in found.sums] == [(2, n) for n in scale.SIZES]
    for run in (found.overlap, found.serial):
        check_bounds(run)


def check_bounds(run: scale.Run) -> None:
    """Whatever the machine did meanwhile: ranks are no faster than their kernels."""
    plan = Plan.parse(run.plan)
    talks = {i for i, step in enumerate(plan.launches) if isinstance(step, Collective)}
    for ranks in run.launches:
        # A collective cannot have lasted longer than for the rank that came to it last.
        rows = [
            [min(r[i] for r in ranks) if i in talks else own[i] for i in range(len(own))]
            for own in ranks
        ]
        least = max(line.seconds for line in predict_together(plan, rows, {}))
        kernels = max(sum(t for i, t in enumerate(own) if i not in talks) for own in ranks)
        assert kernels <= least + 1e-9


def test_a_collective_begins_when_the_last_rank_has_come() -> None:
    cluster = Cluster(2, LINK, algorithm="ring")  # 2 messages, 8 bytes: 6 seconds
    made = simulate(OVERLAPPED, cluster, [[5.0, 0.0, 4.0, 1.0], [7.0, 0.0, 9.0, 1.0]])
    # The sum goes on from 7 to 13; the second rank has computed until 16.
    assert (made.seconds, made.kernels) == (17.0, 17.0)
    assert made.serial == 7 + 6 + 9 + 1
    quick = simulate(OVERLAPPED, cluster, [[5.0, 0.0, 4.0, 1.0], [7.0, 0.0, 0.0, 1.0]])
    assert quick.seconds == 14.0  # both wait for the sum
    alike = simulate(OVERLAPPED, cluster, [[5.0, 0.0, 4.0, 1.0]] * 2)
    assert alike.seconds == simulate(OVERLAPPED, cluster, [5.0, 0.0, 4.0, 1.0]).seconds
