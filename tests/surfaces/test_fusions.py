"""Each fusion fires on a realistic module, and on Hugging Face's, and the results agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchgraft as graft
from bench.fusions import CASES
from torchgraft.errors import BadValue, ResultChanged
from torchgraft.passes import fusions
from torchgraft.passes.pipeline import passes_for

transformers = pytest.importorskip("transformers")


def agree(got: Any, want: Any) -> None:
    for one, two in zip(
        got if isinstance(got, tuple) else (got,),
        want if isinstance(want, tuple) else (want,),
        strict=True,
    ):
        far = 1e-5 * max(1.0, two.abs().max().item())
        torch.testing.assert_close(one, two, rtol=1e-4, atol=far)


@pytest.mark.parametrize("name", CASES)
def test_it_fires_and_results_agree(name: str) -> None:
    make, shapes = CASES[name]
    model, args = make().eval(), tuple(torch.randn(shape) for shape in shapes)
    run = graft.compile(model, args, mode="eager", patterns=[fusions.ALL[name]])
    assert run.report.matches == {name: 1}
    with torch.no_grad():
        want = torch.softmax(*args, -1) if name == "softmax_dropout" else model(*args)
        agree(run(*args), want)


GELU = {"root": 0.7978845608028654, "cubic": 0.044715}
GIVEN: dict[str, dict[str, Any]] = {
    "gelu_tanh": GELU,
    "gelu_fast": GELU,
    "conv_bn": {"stride": [1, 1], "padding": [1, 2], "dilation": [1, 1]},
    "patches": {"stride": [2, 2]},
}


@pytest.mark.parametrize("name", [name for name in fusions.ALL if name != "softmax_dropout"])
def test_it_passes_its_own_check(name: str) -> None:
    result = fusions.ALL[name].check(8, **GIVEN.get(name, {}))
    assert result.fired
    assert result.worst <= 1


# --- Those that are on by default ---


@pytest.mark.parametrize("name", ["attention", "rotary"])
def test_it_is_on_by_default_in_generated_code(name: str) -> None:
    make, shapes = CASES[name]
    model, args = make().eval(), tuple(torch.randn(shape) for shape in shapes)
    run = graft.compile(model, args)
    assert run.report.matches == {name: 1}
    agree(run(*args), model(*args))


def test_who_asks_for_an_operator_gets_it() -> None:
    softmax = torch.ops.aten._softmax.default
    needs = {op for ops in fusions.DEFAULT.values() for op in ops} - {"cuda"}

    def chosen(present: Any = needs, **fields: Any) -> list[str]:
        found = passes_for(graft.Config(**fields), present)
        return [one.name for one in found if one in fusions.DEFAULT]

    assert sorted(chosen()) == ["attention", "rotary"]
    assert chosen(needs - {softmax}) == ["rotary"]
    assert chosen(needs - {"cpu"} | {"cuda"}) == ["patches"]  # measured there
    assert chosen(fusions=False) == chosen(mode="eager") == []
    assert chosen(torch_executed_ops=["aten::neg"]) == []
    assert chosen(patterns=[fusions.rotary]) == ["attention"]
    own = graft.converter(softmax, register=False)(lambda net, x, dim, half_to_float: x)
    assert chosen(converters=[own]) == ["rotary"]
    with pytest.raises(BadValue, match=r"Config\.fusions"):
        graft.Config(fusions="all")


def test_a_mask_is_left_as_it_is_unless_it_is_asked_for() -> None:
    def masked(q: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(q @ q.transpose(-2, -1) * 0.125 + mask, -1) @ q

    args = torch.randn(1, 2, 4, 8), torch.full((1, 1, 4, 4), -torch.inf)
    config = graft.Config()
    assert graft.compile(masked, args, config=config).report.matches == {}
    fused = graft.compile(masked, args, mode="eager", patterns=[fusions.attention])
    assert fused.report.matches == {"attention": 1}
    assert masked(*args).isnan().all()
    assert not fused(*args).isnan().any()


# --- Each fusion with a mistake in it: verification names the pattern and the node ---


def _halves(m: graft.Match) -> tuple[Tensor, Tensor]:
    return m.x.chunk(2, -1)


def _normed(m: graft.Match, x: Tensor) -> Tensor:
    return F.rms_norm(x, m.weight.shape, m.weight, m.eps)


def _conv(m: graft.Match) -> Tensor:
    scale = m.gamma * torch.rsqrt(m.var + m.eps)
    return F.conv2d(m.x, m.weight * scale.reshape(-1, 1, 1, 1), m.beta, m.stride, m.padding)


MISTAKES: dict[str, Any] = {
    "rms_norm": lambda m: _normed(m, m.x - m.x.mean(-1, keepdim=True)),
    "residual_norm": lambda m: (_normed(m, m.x), m.x + m.y),
    "rotary": lambda m: m.x * m.cos + torch.cat(_halves(m)[::-1], -1) * m.sin,
    "swiglu": lambda m: F.linear(m.x, m.gate) * F.silu(F.linear(m.x, m.up)),
    "qkv": lambda m: tuple(F.linear(m.x, w) for w in (m.wk, m.wq, m.wv)),
    "qkv_bias": lambda m: tuple(F.linear(m.x, w, m.bq) for w in (m.wq, m.wk, m.wv)),
    "gelu_tanh": lambda m: F.gelu(m.x),
    "attention": lambda m: F.scaled_dot_product_attention(m.q, m.k, m.v, m.mask, scale=1.0),
    "dequantize_matmul": lambda m: F.linear(m.x, m.weight.to(m.x.dtype)),
    "conv_bn": _conv,
    "patches": lambda m: F.conv2d(m.x, m.weight.flip(-1), m.bias, m.stride),
    "softmax_dropout": fusions.softmax_dropout.replacement,  # a change, if on purpose
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_in_it_is_found(name: str) -> None:
    seen: set[str] = set()

    def broken(m: graft.Match) -> Any:
        seen.update(n.name for n in m.nodes if not n.users.keys() <= set(m.nodes))
        return MISTAKES[name](m)

    make, shapes = CASES[name]
    model, args = make().eval(), tuple(torch.randn(shape) for shape in shapes)
    for buffer in model.buffers():  # a new batch norm has a mean of 0
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2)
    patterns = [fusions.ALL[name].using(broken)]
    with pytest.raises(ResultChanged) as info:
        graft.compile(model, args, mode="eager", patterns=patterns, verify="each")
    assert info.value.by.startswith(f"pattern '{name}' (")
    assert info.value.node in seen


# --- Hugging Face, random tiny configs ---


class Hidden(nn.Module):
    """A model's first output, from token ids alone."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.model(ids, **self.options)[0]
        return result


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        attn_implementation="eager",
    )
    return Hidden(transformers.LlamaModel(config), use_cache=False)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=64,
        n_layer=2,
        n_head=4,
        vocab_size=50,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    return Hidden(transformers.GPT2Model(config), use_cache=False)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        vocab_size=50,
        attn_implementation="eager",
    )
    return Hidden(transformers.BertModel(config))


MODELS = {
    llama: {"residual_norm": 4, "rms_norm": 1, "rotary": 4, "attention": 2, "swiglu": 2, "qkv": 2},
    gpt2: {"gelu_tanh": 2, "attention": 2},
    bert: {"attention": 2, "qkv_bias": 2},
}
FROZEN_ONLY = {"swiglu", "qkv", "qkv_bias"}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("front", ["module", "torch.compile"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_hugging_face(make: Any, front: str, dtype: torch.dtype) -> None:
    model, ids = make().eval().to(dtype), torch.randint(0, 50, (2, 7))
    config = graft.Config(mode="eager", patterns=list(fusions.ALL.values()))
    with torch.no_grad():
        want = model(ids)
        if front == "module":
            run: Any = graft.compile(model, (ids,), config=config)
        else:
            run = torch.compile(model, backend=graft.backend(config))
        got = run(ids)
    matches = {k: v for k, v in graft.reports()[-1].matches.items() if v}
    expected = dict(MODELS[make])
    if dtype is torch.bfloat16 and make is llama:  # its softmax is in float32
        expected["attention_upcast"] = expected.pop("attention")
    if front == "torch.compile":  # weights are the caller's there
        expected = {k: v for k, v in expected.items() if k not in FROZEN_ONLY}
    assert matches == expected, str(graft.reports()[-1])
    far = 1e-4 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(got, want, rtol=far, atol=far)


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_hugging_face_in_generated_code(make: Any) -> None:
    model, ids = make().eval(), torch.randint(0, 50, (2, 7))
    run = graft.compile(model, (ids,), patterns=list(fusions.ALL.values()))
    with torch.no_grad():
        torch.testing.assert_close(run(ids), model(ids), rtol=1e-4, atol=1e-4)


def test_a_kernel_of_ones_own() -> None:
    seen = []

    def kernel(m: graft.Match) -> Tensor:
        seen.append((m.eps, tuple(m.weight.shape)))
        return torch.nn.functional.rms_norm(m.x, m.weight.shape, m.weight, m.eps)

    model, ids = llama().eval(), torch.randint(0, 50, (2, 7))
    run = graft.compile(model, (ids,), mode="eager", patterns=[fusions.rms_norm.using(kernel)])
    assert run.report.matches == {"rms_norm": 5}
    assert seen == [(1e-6, (64,))] * 5
    with torch.no_grad():
        torch.testing.assert_close(run(ids), model(ids), rtol=1e-4, atol=1e-4)
