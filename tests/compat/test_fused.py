"""Fused operators of torch_npu against formulas in float64, and what of them is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_routing
import torch
from torch import Tensor
from torch.nn import functional

import torchgraft as graft
from torchgraft.compat import fused
from torchgraft.errors import NotOnThisDevice
from torchgraft.op import plugin
from torchgraft.op.define import named


def rms(x: Tensor, gamma: Tensor, eps: float = 1e-6) -> Tensor:
    return functional.rms_norm(x, gamma.shape, gamma, eps)


def turned(x: Tensor) -> Tensor:
    """Each pair (a, b) as (-b, a)."""
    matrix = torch.zeros(x.shape[-1], x.shape[-1], dtype=x.dtype)
    for i in range(0, x.shape[-1], 2):
        matrix[i + 1, i], matrix[i, i + 1] = -1, 1
    return x @ matrix


def halves(x: Tensor) -> Tensor:
    return torch.roll(x, x.shape[-1] // 2, -1) * torch.tensor([-1.0] * 4 + [1.0] * 4).double()


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


SPLIT = [0, 2, 4, 6, 1, 3, 5, 7]
X, Y, GAMMA, BETA = (torch.randn(*size).double() for size in ((3, 8), (3, 8), (8,), (8,)))
CASES: dict[str, tuple[tuple[Any, ...], Callable[..., Any]]] = {
    "npu_rms_norm": ((X, GAMMA), lambda x, g: rms(x, g)),
    "npu_gemma_rms_norm": ((X, GAMMA), lambda x, g: rms(x, 1 + g)),
    "npu_add_rms_norm": ((X, Y, GAMMA, 1e-3), lambda x, y, g, e: rms(x + y, g, e)),
    "npu_deep_norm": (
        (X, Y, BETA, GAMMA, 0.5),
        lambda x, y, b, g, a: (a * x + y).mean(-1, keepdim=True),
    ),
    "npu_layer_norm_eval": (
        (X, [8], GAMMA, BETA),
        lambda x, shape, g, b: (
            (x - x.mean(-1, True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() * g + b
        ),
    ),
    "npu_group_norm_silu": (
        (X.reshape(3, 4, 2), GAMMA[:4], BETA[:4], 2),
        lambda x, g, b, n: functional.silu(functional.group_norm(x, n, g, b)),
    ),
    "npu_swiglu": ((X, 1), lambda x, dim: x[:, :4] * x[:, :4].sigmoid() * x[:, 4:]),
    "npu_geglu": ((X, -1, 0), lambda x, dim, kind: x[:, :4] * gelu(x[:, 4:])),
    "fast_gelu": ((X,), lambda x: x / (1 + torch.exp(-1.702 * x))),
    "npu_fast_gelu": ((X,), lambda x: x / (1 + torch.exp(-1.702 * x))),
    "npu_silu": ((X,), lambda x: x / (1 + torch.exp(-x))),
    "npu_mish": ((X,), lambda x: x * torch.tanh(torch.log1p(torch.exp(x)))),
    "npu_rotary_mul": ((X, GAMMA, BETA), lambda x, c, s: x * c + halves(x) * s),
    "npu_linear": ((X, Y, GAMMA[:3]), lambda x, w, b: x @ w.T + b),
    "npu_bmmV2": (
        (X[None], Y.T[None].contiguous(), []),
        lambda x, y, sizes: torch.einsum("bij,bjk->bik", x, y),
    ),
    "npu_dtype_cast": ((X, torch.float64), lambda x, dtype: x * 1),
    "npu_confusion_transpose": (
        (X, [1, 0], [4, 6], True),
        lambda x, perm, shape, first: x.T.reshape(4, 6),
    ),
    "npu_transpose": ((X, [1, 0]), lambda x, perm: x.T),
    "npu_broadcast": ((GAMMA, [3, 8]), lambda x, size: torch.stack([x] * 3)),
    "npu_softmax_cross_entropy_with_logits": (
        (X, Y.softmax(-1)),
        lambda x, y: functional.cross_entropy(x, y, reduction="none"),
    ),
    "npu_interleave_rope": (
        (X, GAMMA, BETA),
        lambda x, c, s: x[:, SPLIT] * c + halves(x[:, SPLIT]) * s,
    ),
    "npu_apply_rotary_pos_emb": ((X, Y, GAMMA, BETA), lambda x, y, c, s: x * c + halves(x) * s),
    "npu_scatter_nd_update": (
        (X, torch.tensor([[2], [0]]), Y[:2]),
        lambda x, i, y: torch.stack([y[1], x[1], y[0]]),
    ),
}


@pytest.mark.feature(
    "torch_npu", "fused operators: norms, swiglu, rotary, attention, int8 products; their gradients"
)
@pytest.mark.parametrize("name", CASES)
def test_a_formula_and_its_gradient(ascend: Path, name: str) -> None:
    import torch_npu

    args, formula = CASES[name]
    leaves = [
        [
            x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in args
        ]
        for _ in range(2)
    ]
    found, expected = getattr(torch_npu, name)(*leaves[0]), formula(*leaves[1])
    found = found[0] if isinstance(found, tuple) else found
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    for value in (found, expected):
        (value * weights).sum().backward()
    for mine, theirs in zip(*leaves, strict=True):
        if isinstance(mine, Tensor) and mine.requires_grad and theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad)
    if name != "npu_dtype_cast":  # whose dtype is an argument
        single = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
        result = getattr(torch_npu, name)(*single)
        result = result[0] if isinstance(result, tuple) else result
        torch.testing.assert_close(result.double(), expected.detach(), rtol=2e-5, atol=2e-5)


def test_every_fused_operator_is_tried() -> None:
    tried = {*CASES, *ATTENTION, "npu_dynamic_quant", "npu_quant_matmul"}
    tried |= {"npu_weight_quant_batchmatmul", "npu_quantize"}  # workspaces are in captures.py
    tried |= {"_npu_fused_infer_attention_score_get_max_workspace"}
    tried |= {"scatter_update"}  # in test_torch_npu.py
    assert tried | {*test_routing.TRIED} == set(fused.NAMES)


def test_the_other_results(ascend: Path) -> None:
    import torch_npu

    x, gamma = X.half(), GAMMA.half()
    y, rstd = torch_npu.npu_rms_norm(x, gamma)
    assert (y.dtype, rstd.dtype, rstd.shape) == (torch.float16, torch.float32, (3, 1))
    torch.testing.assert_close(
        rstd.double(), (x.double() ** 2).mean(-1, True).rsqrt(), rtol=1e-5, atol=0
    )
    assert torch.equal(torch_npu.npu_add_rms_norm(x, x, gamma)[2], x + x)
    mean, rstd, y = torch_npu.npu_deep_norm(X, Y, BETA, GAMMA, 0.5)
    assert mean.shape == rstd.shape == (3, 1)
    torch.testing.assert_close(y, functional.layer_norm(0.5 * X + Y, (8,), GAMMA, BETA, 1e-6))
    _, active = torch_npu.npu_geglu(X, activate_left=True)
    torch.testing.assert_close(active, functional.gelu(X[:, :4], approximate="tanh"))
    interleaved = torch_npu.npu_rotary_mul(X, GAMMA, BETA, "interleave")
    torch.testing.assert_close(interleaved, X * GAMMA + turned(X) * BETA)
    with pytest.raises(ValueError, match="rotary_mode is 'quarter'; here it is 'half' or 'inter"):
        torch_npu.npu_rotary_mul(X, GAMMA, BETA, "quarter")
    _, key = torch_npu.npu_apply_rotary_pos_emb(X, Y, GAMMA, BETA)
    torch.testing.assert_close(key, Y * GAMMA + halves(Y) * BETA)


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None = None
) -> Tensor:
    """[batch, heads, tokens, size], in a loop over heads."""
    heads = []
    for h in range(q.shape[1]):
        of = h * k.shape[1] // q.shape[1]
        scores = torch.einsum("bid,bjd->bij", q[:, h], k[:, of]) * scale
        if hidden is not None:
            scores = scores.masked_fill(hidden, -1e300)
        heads.append(scores.softmax(-1) @ v[:, of])
    return torch.stack(heads, 1)


Q, K, V = (torch.randn(2, n, s, 4).double() for n, s in ((4, 5), (2, 5), (2, 5)))
CAUSAL = torch.ones(5, 5).triu(1).bool()
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "BNSD": lambda x: x,
    "BSND": lambda x: x.transpose(1, 2),
    "BSH": lambda x: x.transpose(1, 2).flatten(2),
    "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
}
ATTENTION = (
    "npu_fusion_attention",
    "npu_prompt_flash_attention",
    "npu_incre_flash_attention",
    "npu_fused_infer_attention_score",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_for_training(ascend: Path, layout: str) -> None:
    import torch_npu

    mine, theirs = ([x.clone().requires_grad_() for x in (Q, K, V)] for _ in range(2))
    place = LAYOUTS[layout]
    for mask, mode, hidden in ((None, 0, None), (CAUSAL, 0, CAUSAL), (CAUSAL, 2, CAUSAL)):
        given = [place(x).contiguous() for x in mine]
        out, top, total, _, *numbers = torch_npu.npu_fusion_attention(
            *given, 4, layout, scale=0.5, atten_mask=mask, sparse_mode=mode
        )
        expected = attention(*theirs, 0.5, hidden)
        torch.testing.assert_close(out, place(expected))
        assert numbers == [0, 0, 0]
        assert top.shape == total.shape == (2, 4, 5, 8)
        weights = torch.randn_like(expected)
        (out * place(weights)).sum().backward()
        (expected * weights).sum().backward()
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_a_mask_and_a_band_hide_together(ascend: Path) -> None:
    """Of a whole mask, only what lies between `pre` and `next` tokens is computed (mode 0); in
    mode 1 the mask alone counts."""
    import torch_npu

    same: dict[str, Any] = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD"}
    ahead = torch.arange(5) - torch.arange(5)[:, None]
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[[0, 2, 3, 4], 1] = True
    for before, behind in ((1, 0), (2, 1), (65536, 0)):
        band = (ahead > behind) | (ahead < -before)
        for mode, hidden in ((0, mask | band), (1, mask), (4, band)):
            expected = attention(Q, K, V, 0.5, hidden)
            out = torch_npu.npu_fusion_attention(
                Q, K, V, 4, "BNSD", scale=0.5, atten_mask=mask, sparse_mode=mode,
                pre_tockens=before, next_tockens=behind,
            )[0]  # fmt: skip
            torch.testing.assert_close(out, expected)
            out = torch_npu.npu_prompt_flash_attention(
                Q, K, V, scale_value=0.5, atten_mask=mask, sparse_mode=mode,
                pre_tokens=before, next_tokens=behind, **same,
            )  # fmt: skip
            torch.testing.assert_close(out, expected)


def test_attention_of_sequences_one_after_another(ascend: Path) -> None:
    import torch_npu

    q, k, v = (torch.randn(9, n, 4).double() for n in (4, 2, 2))
    for ends in ([2, 5, 9], [2, 5, 0]):
        out = torch_npu.npu_fusion_attention(
            q, k, v, 4, "TND", scale=0.5, atten_mask=torch.ones(9, 9).triu(1).bool(),
            sparse_mode=3, actual_seq_qlen=ends, actual_seq_kvlen=ends,
        )[0]  # fmt: skip
        begin = 0
        for end in (x for x in ends if x):
            parts = [x[begin:end].transpose(0, 1)[None] for x in (q, k, v)]
            hidden = torch.ones(end - begin, end - begin).triu(1).bool()
            expected = attention(*parts, 0.5, hidden)[0].transpose(0, 1)
            torch.testing.assert_close(out[begin:end], expected)
            begin = end
        assert not out[begin:].any()


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
def test_attention_of_a_prompt_and_of_a_token(ascend: Path, layout: str) -> None:
    import torch_npu

    place = LAYOUTS[layout]
    q, k, v = (place(x).contiguous() for x in (Q, K, V))
    same: dict[str, Any] = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": layout}
    expected = attention(Q, K, V, 0.5, CAUSAL)
    for mode in (0, 3):
        out = torch_npu.npu_prompt_flash_attention(
            q, k, v, atten_mask=CAUSAL, scale_value=0.5, sparse_mode=mode, **same
        )
        torch.testing.assert_close(out, place(expected))
        out, lse = torch_npu.npu_fused_infer_attention_score(
            q, k, v, atten_mask=CAUSAL, scale=0.5, sparse_mode=mode, softmax_lse_flag=True, **same
        )
        torch.testing.assert_close(out, place(expected))
        assert lse.shape == (2, 4, 5, 1)
    scores = torch.einsum("bhid,bhjd->bhij", Q, K.repeat_interleave(2, 1)) * 0.5
    expected_lse = scores.masked_fill(CAUSAL, -1e300).logsumexp(-1, keepdim=True)
    torch.testing.assert_close(lse, expected_lse.float())
    token = place(Q[:, :, :1]).contiguous()
    lengths = [3, 5]
    hidden = torch.arange(5) >= torch.tensor(lengths)[:, None, None]
    expected = attention(Q[:, :, :1], K, V, 0.5, hidden)
    out = torch_npu.npu_incre_flash_attention(
        token, k, v, actual_seq_lengths=lengths, scale_value=0.5, **same
    )
    torch.testing.assert_close(out, place(expected))
    out, lse = torch_npu.npu_fused_infer_attention_score(
        token, k, v, actual_seq_lengths_kv=lengths, scale=0.5, sparse_mode=3, **same
    )
    torch.testing.assert_close(out, place(expected))
    assert lse.tolist() == [0.0]


def test_attention_over_blocks(ascend: Path) -> None:
    """A cache that `_npu_reshape_and_cache` fills, and attention that reads it."""
    import torch_npu

    size, table = 2, torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32)
    caches = [torch.zeros(6, size, 2, 4).double() for _ in range(2)]
    lengths = [3, 5]
    slots = [
        int(table[b, t // size]) * size + t % size for b in range(2) for t in range(lengths[b])
    ]
    rows = [(b, t) for b in range(2) for t in range(lengths[b])]
    keys, values = (torch.stack([x[b, :, t] for b, t in rows]) for x in (K, V))
    torch_npu._npu_reshape_and_cache(keys, values, *caches, torch.tensor(slots, dtype=torch.int32))
    hidden = torch.arange(5) >= torch.tensor(lengths)[:, None, None]
    expected = attention(Q[:, :, :1], K, V, 0.5, hidden)
    flat = [x.flatten(2) for x in caches]
    same: dict[str, Any] = {"num_heads": 4, "num_key_value_heads": 2, "block_table": table}
    same |= {"block_size": size, "scale": 0.5, "actual_seq_lengths_kv": lengths}
    out, _ = torch_npu.npu_fused_infer_attention_score(
        LAYOUTS["BSH"](Q[:, :, :1]), *flat, input_layout="BSH", **same
    )
    torch.testing.assert_close(out, LAYOUTS["BSH"](expected))
    out, _ = torch_npu.npu_fused_infer_attention_score(
        Q[:, :, 0], *flat, input_layout="TND", actual_seq_lengths=[1, 2], **same
    )
    torch.testing.assert_close(out, expected[:, :, 0])


def test_products_of_int8(ascend: Path) -> None:
    import torch_npu

    x, weight = torch.randn(6, 16), torch.randint(-128, 128, (16, 8), dtype=torch.int8)
    scale, bias = torch.rand(8), torch.randint(-99, 99, (8,), dtype=torch.int32)
    small, row_scale = torch_npu.npu_dynamic_quant(x)
    assert (small.dtype, row_scale.shape) == (torch.int8, (6,))
    assert (small.abs().amax(-1) == 127).all()
    torch.testing.assert_close(
        small * row_scale[:, None], x, rtol=0, atol=float(row_scale.max()) / 2
    )
    assert torch_npu.npu_dynamic_quant(torch.zeros(1, 4))[0].tolist() == [[0] * 4]
    found = torch_npu.npu_quant_matmul(
        small, weight, scale, pertoken_scale=row_scale, bias=bias, output_dtype=torch.bfloat16
    )
    whole = small.double() @ weight.double() + bias
    expected = whole * scale.double() * row_scale.double()[:, None]
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=0)
    raw = torch_npu.npu_quant_matmul(small, weight, scale, bias=bias, output_dtype=torch.int32)
    assert torch.equal(raw.double(), whole)
    y = torch_npu.npu_quantize(x, scale[:6], bias[:6], torch.qint8, axis=0)
    expected = x.double() / scale[:6, None].double() + bias[:6, None]
    assert torch.equal(y, expected.round().clamp(-128, 127).to(torch.int8))
    y = torch_npu.npu_quantize(x, scale[:1], None, torch.quint8, -1, False)
    assert torch.equal(y, (x * scale[0]).round().clamp(0, 255).to(torch.uint8))
    with pytest.raises(NotOnThisDevice, match=r"dtype=.*torch\.qint8"):
        torch_npu.npu_quantize(x, scale[:1], None, torch.quint4x2)
    kept = torch_npu.npu_weight_quant_batchmatmul(x, weight, scale, scale, bias=bias.float())
    expected = x.double() @ ((weight.double() + scale.double()) * scale.double()) + bias
    torch.testing.assert_close(kept.double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("npu_fusion_attention", {"pse": Q}, r"pse=\.\.\.\) needs an NPU. Pass it as a mask"),
        ("npu_fusion_attention", {"keep_prob": 0.9}, "keep_prob=.*dropout_p"),
        ("npu_fusion_attention", {"atten_mask": CAUSAL, "sparse_mode": 6}, "sparse_mode=.*whole"),
        ("npu_fused_infer_attention_score", {"key_rope": Q}, "key_rope=.*scaled_dot_product"),
    ],
)
def test_what_the_device_alone_has(
    ascend: Path, name: str, arguments: dict[str, Any], said: str
) -> None:
    import torch_npu

    more = (4, "BNSD") if name == "npu_fusion_attention" else ()
    if not more:
        arguments = {**arguments, "input_layout": "BNSD", "num_heads": 4}
    with pytest.raises(NotOnThisDevice, match=said):
        getattr(torch_npu, name)(Q, Q, Q, *more, **arguments)
    with pytest.raises(ValueError, match="input_layout is 'BSHH'; here it is one of"):
        torch_npu.npu_fusion_attention(Q, Q, Q, 4, "BSHH")
    with pytest.raises(TypeError, match="npu_fusion_attention: key must be a tensor, not None"):
        torch_npu.npu_fusion_attention(Q, None, None, 4, "BNSD")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["npu_rms_norm", "npu_swiglu", "npu_rotary_mul"])
def test_it_is_an_operator_on_every_surface(ascend: Path, name: str) -> None:
    fused.declare()
    op = named(f"npu::{name}")

    @op.samples
    def _(make: graft.Make) -> Any:
        sizes = {"npu_rms_norm": [(4, 8), (8,)], "npu_swiglu": [(4, 8)]}.get(name, [(4, 8)] * 3)
        yield tuple(make(*size) for size in sizes)

    graft.check(op).assert_ok()


def test_it_is_a_node_of_a_graph_that_a_pass_can_find(ascend: Path) -> None:
    import torch_npu
    import torchair

    seen = []

    def look(gm: Any, example_inputs: Any, config: Any) -> None:
        seen.extend(node.target for node in gm.graph.nodes if node.op == "call_function")

    config = torchair.CompilerConfig()
    config.post_grad_custom_pre_pass = look
    model = torch.compile(
        lambda x, g: torch_npu.npu_rms_norm(x, g)[0] * 2,
        backend=torchair.get_npu_backend(compiler_config=config),
        fullgraph=True,
    )
    torch.testing.assert_close(model(X, GAMMA), rms(X, GAMMA) * 2)
    assert torch.ops.npu.npu_rms_norm.default in seen


def test_what_a_file_declares_holds(ascend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Declared alike, it gets its meaning; declared otherwise, it is the file's."""
    for name in ("npu_same", "npu_other"):
        schema = f"{name}(Tensor self) -> Tensor"
        monkeypatch.setitem(fused.NAMES, name, (schema, lambda self: self.sin()))
    (ascend / "functions.yaml").write_text(
        "custom:\n- func: npu_same(Tensor self) -> Tensor\n  op_api: all_version\n"
        "- func: npu_other(Tensor self, float beta) -> Tensor\n  op_api: all_version\n"
    )
    plugin.build([ascend / "functions.yaml"])
    import torch_npu

    torch.testing.assert_close(torch_npu.npu_same(X), X.sin())
    assert [a.name for a in torch.ops.npu.npu_other.default._schema.arguments] == ["self", "beta"]


@pytest.mark.feature("torch_npu", "optim: NpuFusedAdam, NpuFusedAdamW, NpuFusedSGD")
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_a_fused_optimizer_is_the_plain_one(ascend: Path, name: str) -> None:
    import torch_npu

    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    theirs = getattr(torch.optim, name)(models[1].parameters(), lr=0.1)
    mine = getattr(torch_npu.optim, f"NpuFused{name}")(models[0].parameters(), lr=0.1)
    for _ in range(3):
        for model in models:
            model.zero_grad()
            model(torch.ones(4, 3)).square().sum().backward()
        norms = (
            mine.clip_grad_norm_fused_(1.0),
            torch.nn.utils.clip_grad_norm_(models[1].parameters(), 1.0),
        )
        assert torch.equal(*norms)
        mine.step()
        theirs.step()
    assert torch.equal(models[0].weight, models[1].weight)
