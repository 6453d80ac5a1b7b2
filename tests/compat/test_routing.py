"""A mixture of experts with torch_npu's operators, against loops in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from torchgraft.errors import NotOnThisDevice

TRIED = (
    "npu_moe_gating_top_k_softmax",
    "npu_moe_gating_top_k_softmax_v2",
    "npu_moe_gating_top_k",
    "npu_moe_init_routing",
    "npu_moe_init_routing_v2",
    "npu_moe_compute_expert_tokens",
    "npu_moe_finalize_routing",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
    "npu_moe_re_routing",
    "npu_grouped_matmul",
    "npu_grouped_matmul.List",
    "npu_dequant_swiglu_quant",
)
ROWS, EXPERTS, CHOICES, SIZE = 7, 6, 3, 4


def routed() -> tuple[Tensor, Tensor, Tensor]:
    """Rows, the experts of each and their weights. One expert has nothing to do."""
    x, logits = torch.randn(ROWS, SIZE).double(), torch.randn(ROWS, EXPERTS).double()
    logits[:, 2] = -50
    weights, experts = logits.softmax(-1).topk(CHOICES, -1)
    return x, experts.int(), weights


def pairs(experts: Tensor, first: int = 0, last: int = EXPERTS) -> list[tuple[int, int]]:
    """(row, choice), expert by expert."""
    found = [(int(experts[r, c]), r, c) for r in range(len(experts)) for c in range(CHOICES)]
    return [(r, c) for e, r, c in sorted(found) if first <= e < last]


def test_gates(ascend: Path) -> None:
    import torch_npu

    x = torch.randn(5, 8).double()
    every = x.softmax(-1)
    best, experts, places = torch_npu.npu_moe_gating_top_k_softmax(x, k=2)
    torch.testing.assert_close(best, every.sort(-1, True)[0][:, :2])
    assert torch.equal(experts.long(), x.topk(2, -1)[1])
    assert places.tolist() == [[r, 5 + r] for r in range(5)]
    finished = torch.tensor([False, True, False, False, True])
    _, marked, _ = torch_npu.npu_moe_gating_top_k_softmax(x, finished, 2)
    assert marked[finished].unique().tolist() == [8]
    assert torch.equal(marked[~finished], experts[~finished])

    same, _, shown = torch_npu.npu_moe_gating_top_k_softmax_v2(x, k=2, output_softmax=True)
    torch.testing.assert_close(same, best)
    torch.testing.assert_close(shown, every.float())
    normal, again, none = torch_npu.npu_moe_gating_top_k_softmax_v2(x, k=2, renorm=1)
    torch.testing.assert_close(normal, best / best.sum(-1, True))
    assert torch.equal(again, experts)
    assert none.numel() == 0


@pytest.mark.parametrize("mode", [0, 1])
def test_gates_of_groups(ascend: Path, mode: int) -> None:
    import torch_npu

    x, bias = torch.randn(9, 12).double(), torch.rand(12).double()
    weights, experts, scores = torch_npu.npu_moe_gating_top_k(
        x, 3, bias=bias, k_group=2, group_count=4, group_select_mode=mode, norm_type=mode,
        renorm=1 - mode, routed_scaling_factor=2.5,
    )  # fmt: skip
    plain = x.sigmoid() if mode else x.softmax(-1)
    torch.testing.assert_close(scores, plain.float())
    for row in range(9):
        rated = (plain[row] + bias).tolist()
        groups = [sorted(rated[g : g + 3], reverse=True) for g in range(0, 12, 3)]
        strength = [sum(group[: 1 + mode]) for group in groups]
        open_to = sorted(range(4), key=lambda g: -strength[g])[:2]
        wanted = sorted((e for e in range(12) if e // 3 in open_to), key=lambda e: -rated[e])[:3]
        assert experts[row].tolist() == wanted
        chosen = plain[row, wanted]
        torch.testing.assert_close(weights[row], chosen / chosen.sum() * 2.5)


def test_a_way_there_and_back(ascend: Path) -> None:
    """Every pair of operators that takes rows to experts and back sums up the same."""
    import torch_npu

    x, experts, weights = routed()
    factor = torch.arange(1, EXPERTS + 1).double()
    expected = (x.unsqueeze(1) * (factor[experts.long()] * weights).unsqueeze(-1)).sum(1)

    _, _, places = torch_npu.npu_moe_gating_top_k_softmax(torch.randn(ROWS, EXPERTS), k=CHOICES)
    there, back, sorted_ = torch_npu.npu_moe_init_routing(x, places, experts, ROWS)
    assert torch.equal(there, x[[r for r, _ in pairs(experts)]])
    ends = torch_npu.npu_moe_compute_expert_tokens(sorted_, EXPERTS)
    assert ends.tolist() == [len(pairs(experts, 0, e + 1)) for e in range(EXPERTS)]
    made = there * factor[sorted_.long()].unsqueeze(-1)
    finalize = torch_npu.npu_moe_finalize_routing
    torch.testing.assert_close(finalize(made, None, None, None, weights, back, experts), expected)
    bias = torch.randn(EXPERTS, SIZE).double()
    extra = (bias[experts.long()] * weights.unsqueeze(-1)).sum(1)
    found = finalize(made, x, 2 * x, bias, weights, back, experts)
    torch.testing.assert_close(found, expected + extra + 3 * x)

    rows, back = torch_npu.npu_moe_token_permute(x, experts)
    torch.testing.assert_close(rows, there)
    assert back.tolist() == [
        pairs(experts).index((r, c)) for r in range(ROWS) for c in range(CHOICES)
    ]
    torch.testing.assert_close(
        torch_npu.npu_moe_token_unpermute(made, back, probs=weights), expected
    )
    torch.testing.assert_close(
        finalize(made, None, None, None, weights, back, experts, 2), expected
    )
    kept, back = torch_npu.npu_moe_token_permute(x, experts, -5)
    assert torch.equal(kept, there[:-5])
    late = set(pairs(experts)[-5:])
    less = torch.tensor([[(r, c) not in late for c in range(CHOICES)] for r in range(ROWS)])
    torch.testing.assert_close(
        torch_npu.npu_moe_token_unpermute(kept, back, probs=weights),
        (x.unsqueeze(1) * (weights * less).unsqueeze(-1)).sum(1),
    )


@pytest.mark.parametrize(("first", "last"), [(0, EXPERTS), (1, 4)])
def test_routing_of_some_experts(ascend: Path, first: int, last: int) -> None:
    import torch_npu

    x, experts, _ = routed()
    order, total = pairs(experts, first, last), ROWS * CHOICES
    scale = torch.rand(ROWS)

    def route(**given: Any) -> Any:
        return torch_npu.npu_moe_init_routing_v2(
            x.float(), experts, active_num=total, expert_num=EXPERTS, expert_tokens_num_flag=True,
            active_expert_range=[first, last], **given,
        )  # fmt: skip

    counts = [sum(int(experts[p]) == e for p in order) for e in range(first, last)]
    rows, places, tally, scales = route(scale=scale, expert_tokens_num_type=1)
    assert torch.equal(rows[: len(order)], x.float()[[r for r, _ in order]])
    assert not rows[len(order) :].any()
    assert torch.equal(scales[: len(order)], scale[[r for r, _ in order]])
    assert tally.tolist() == counts
    for r in range(ROWS):
        for c in range(CHOICES):
            there = order.index((r, c)) if (r, c) in order else -1
            assert places[r * CHOICES + c] == there
    _, places, tally, _ = route(row_idx_type=1)
    assert places[: len(order)].tolist() == [r * CHOICES + c for r, c in order]
    assert tally.tolist() == torch.tensor(counts).cumsum(0).tolist()
    _, _, tally, _ = route(expert_tokens_num_type=2)
    some = [[e, n] for e, n in zip(range(first, last), counts, strict=True) if n]
    assert tally.tolist() == some + [[0, 0]] * (EXPERTS - len(some))

    smooth = torch.rand(last - first, SIZE) + 0.5
    small, _, _, scales = route(quant_mode=1, scale=smooth)
    assert small.dtype == torch.int8
    for i, (r, c) in enumerate(order):
        wanted = x[r] * smooth[int(experts[r, c]) - first]
        torch.testing.assert_close(
            small[i] * scales[i].double(), wanted, rtol=0, atol=float(scales[i])
        )
    with pytest.raises(NotOnThisDevice, match=r"quant_mode=.*int8"):
        route(quant_mode=3)


def test_slots_of_experts(ascend: Path) -> None:
    """Those over an expert's capacity are left out, on the way there and back."""
    import torch_npu

    x, experts, weights = routed()
    slots, places, tally, _ = torch_npu.npu_moe_init_routing_v2(
        x, experts, expert_num=EXPERTS, expert_capacity=2, drop_pad_mode=1,
        expert_tokens_num_type=1, expert_tokens_num_flag=True,
    )  # fmt: skip
    assert slots.shape == (EXPERTS, 2, SIZE)
    kept: list[tuple[int, int]] = []
    for e in range(EXPERTS):
        mine = pairs(experts, e, e + 1)
        assert tally[e] == len(mine)
        for i in range(2):
            assert torch.equal(slots[e, i], x[mine[i][0]] if i < len(mine) else x[0] * 0)
        kept += mine[:2]
    assert len(kept) < ROWS * CHOICES
    there = torch.tensor([[(r, c) in kept for c in range(CHOICES)] for r in range(ROWS)])
    assert torch.equal(places.reshape(ROWS, CHOICES) >= 0, there)
    torch.testing.assert_close(
        torch_npu.npu_moe_finalize_routing(slots, None, None, None, weights, places, experts, 3),
        (x.unsqueeze(1) * (weights * there).unsqueeze(-1)).sum(1),
    )


def test_rows_of_several_ranks(ascend: Path) -> None:
    import torch_npu

    counts = torch.tensor([[2, 0, 1], [1, 3, 0]])
    names = ["r0e0", "r0e0", "r0e2", "r1e0", "r1e1", "r1e1", "r1e1"]
    tokens = torch.randn(7, SIZE)
    rows, scales, order, total = torch_npu.npu_moe_re_routing(
        tokens, counts, per_token_scales=tokens[:, 0]
    )
    wanted = sorted(range(7), key=lambda i: (names[i][2:], names[i][:2]))
    assert order.tolist() == wanted
    assert torch.equal(rows, tokens[wanted])
    assert torch.equal(scales, tokens[wanted, 0])
    assert total.tolist() == [3, 3, 1]


@pytest.mark.feature("torch_npu", "fused operators: experts' routing and grouped products")
@pytest.mark.parametrize("counted", [True, False])
def test_a_grouped_product(ascend: Path, counted: bool) -> None:
    import torch_npu

    counts = [2, 0, 3, 1]
    x = torch.randn(7, 4).double().requires_grad_()
    weight = torch.randn(4, 4, 5).double().requires_grad_()
    bias = torch.randn(4, 5).double()
    groups = torch.tensor(counts) if counted else torch.tensor(counts).cumsum(0)

    def product(x: Tensor, weight: Tensor, groups: Tensor) -> Tensor:
        found: Tensor = torch_npu.npu_grouped_matmul(
            [x], [weight], bias=[bias], group_list=groups, split_item=2, group_type=0,
            group_list_type=int(counted),
        )[0]  # fmt: skip
        return found

    parts, start = [], 0
    for e, count in enumerate(counts):
        parts.append(x[start : start + count] @ weight[e] + bias[e])
        start += count
    expected = torch.cat([*parts, torch.zeros(1, 5).double()])
    compiled = torch.compile(product, backend="npu", fullgraph=True)
    tangent = torch.randn(7, 5).double()
    wanted = torch.autograd.grad(expected, (x, weight), tangent)
    for run in (product, compiled):
        found = run(x, weight, groups)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, (x, weight), tangent), wanted)

    lists = torch_npu.npu_grouped_matmul([x], list(weight), group_list=[2, 2, 5, 6], split_item=1)
    assert [part.shape[0] for part in lists] == counts
    torch.testing.assert_close(lists[2], x[2:5] @ weight[2])
    several = torch_npu.npu_grouped_matmul([x, x[:2]], [weight[0], weight[1]])
    torch.testing.assert_close(several, [x @ weight[0], x[:2] @ weight[1]])


def test_a_grouped_product_of_int8(ascend: Path) -> None:
    import torch_npu

    counts = torch.tensor([3, 1])
    x = torch.randint(-128, 128, (4, 8), dtype=torch.int8)
    weight = torch.randint(-128, 128, (2, 8, 6), dtype=torch.int8)
    scale, rows = torch.rand(2, 6), torch.rand(4)
    own = [0, 0, 0, 1]
    whole = torch.stack([x[i].double() @ weight[e].double() for i, e in enumerate(own)])
    same: dict[str, Any] = {"group_list": counts, "group_list_type": 1, "split_item": 3}
    same |= {"group_type": 0}
    [raw] = torch_npu.npu_grouped_matmul([x], [weight], output_dtype=torch.int32, **same)
    assert torch.equal(raw.double(), whole)
    [y] = torch_npu.npu_grouped_matmul(
        [x], [weight], scale=[scale], per_token_scale=[rows], output_dtype=torch.bfloat16, **same
    )
    expected = whole * scale.double()[own] * rows.double()[:, None]
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=0)
    small, scales = torch_npu.npu_dequant_swiglu_quant(
        raw, weight_scale=scale / 1000, activation_scale=rows, group_index=counts,
        activate_left=True, quant_mode=1,
    )  # fmt: skip
    left, right = (expected / 1000).chunk(2, -1)
    wanted = functional.silu(left) * right
    assert small.dtype == torch.int8
    torch.testing.assert_close(
        small * scales.double()[:, None], wanted, rtol=0, atol=float(scales.max())
    )
    [kept] = torch_npu.npu_grouped_matmul(
        [x.float()], [weight], antiquant_scale=[scale], antiquant_offset=[scale], **same
    )
    wide = (weight.double() + scale.double()[:, None]) * scale.double()[:, None]
    expected = torch.stack([x[i].double() @ wide[e] for i, e in enumerate(own)])
    torch.testing.assert_close(kept.double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"act_type": 5}, NotOnThisDevice, "act_type=.*activation to the result"),
        ({"group_type": 2}, NotOnThisDevice, "group_type=.*columns"),
        ({"scale": [torch.ones(2, 3, dtype=torch.int64)]}, NotOnThisDevice, "not packed"),
        ({"x": 2}, ValueError, "group_list divides one x, and 2 are given"),
        ({"group_list": None}, ValueError, "1 x for 2 weights, and no group_list"),
    ],
)
def test_a_grouped_product_that_is_not(
    ascend: Path, given: dict[str, Any], error: type[Exception], said: str
) -> None:
    import torch_npu

    x = [torch.ones(4, 3)] * given.pop("x", 1)
    weight = [torch.ones(3, 2)] * 2
    with pytest.raises(error, match=said):
        torch_npu.npu_grouped_matmul(x, weight, **{"group_list": torch.tensor([2, 4]), **given})
