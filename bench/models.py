"""The models that are measured: seeded, random weights, plain tensors in and out, batch 1.

`MODELS[name]()` builds a `Case`; `build(name)` builds it, or one of the zoo's, once a process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Args = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model (module or plain function), and inputs by seed: `make(1)` differs from `make(0)`.

    `tolerance` is what a float32 peer may be off by: the error's norm over the norm of the
    reference's variation (see `measure.error`).
    """

    model: Callable[..., Any]
    make: Callable[[int], Args]
    tolerance: float = 1e-5

    @property
    def args(self) -> Args:
        return self.make(0)

    def to(self, device: str, dtype: torch.dtype) -> Case:
        """The same case elsewhere; integer inputs keep their dtype. Moves the module in place."""
        if isinstance(self.model, nn.Module):
            self.model.to(device=device, dtype=dtype)

        def moved(seed: int) -> Args:
            return tuple(
                t.to(device, dtype if t.is_floating_point() else t.dtype) for t in self.make(seed)
            )

        return Case(self.model, moved, self.tolerance)


def noise(*shapes: tuple[int, ...]) -> Callable[[int], Args]:
    def make(seed: int) -> Args:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(shape, generator=generator) for shape in shapes)

    return make


def tokens(rows: int, length: int, vocabulary: int) -> Callable[[int], Args]:
    def make(seed: int) -> Args:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randint(vocabulary, (rows, length), generator=generator),)

    return make


# ---------------------------------------------------------------- small ones


class Empty(nn.Module):
    """One addition on one element: what is left is the cost of a call."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def _add_one(x: Tensor) -> Tensor:
    return x + 1


class Quantise(nn.Module):
    """Scale, shift, round and clamp to int8's range: one fused loop, or four."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.clamp(torch.round(x * 31.7 + 3.0), -128, 127)


class Experts(nn.Module):
    """A router and eight experts, all run on all rows and mixed by the router's weights."""

    def __init__(self, width: int = 256, hidden: int = 512, experts: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        mixed = torch.stack([expert(x) for expert in self.experts], -1)
        return (mixed * weights.unsqueeze(1)).sum(-1)


class Towers(nn.Module):
    """Eight towers of four layers over one input."""

    def __init__(self, towers: int = 8, layers: int = 4, width: int = 256) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())))
            for _ in range(towers)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([tower(x) for tower in self.towers], 1).sum(1)


class Dlrm(nn.Module):
    """Dense features and 26 embedding tables, pairwise dot products, a top MLP."""

    def __init__(self, tables: int = 26, rows: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(),
            nn.Linear(256, width), nn.ReLU(),
        )  # fmt: skip
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.pairs: Tensor
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(),
            nn.Linear(256, 1),
        )  # fmt: skip

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        looked_up = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([bottom, *looked_up], 1)
        products = features @ features.transpose(1, 2)
        crossed = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, crossed], 1)).sigmoid()


def _dlrm_inputs(seed: int) -> Args:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(1, 13, generator=generator)
    return dense, torch.randint(1000, (1, 26), generator=generator)


# ---------------------------------------------------------------- convolutions


class Conv(nn.Sequential):
    """Convolution, batch norm and, unless told not to, ReLU. Sizes stay, unless `pad` is given."""

    def __init__(
        self,
        cin: int,
        cout: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        *,
        pad: int | None = None,
        relu: bool = True,
    ) -> None:
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (high // 2, wide // 2) if pad is None else pad
        conv = nn.Conv2d(cin, cout, (high, wide), stride, padding, bias=False)
        super().__init__(conv, nn.BatchNorm2d(cout), *([nn.ReLU()] if relu else []))


def trained_looking(model: nn.Module) -> nn.Module:
    """Weights that keep the signal alive and norms that do something, so folding them can fail."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.uniform_(module.weight, 0.6, 1.2)
            nn.init.normal_(module.bias, std=0.1)
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.7, 1.4)
    return model


class Bottleneck(nn.Module):
    """ResNet's 1×1, 3×3, 1×1 with a shortcut."""

    def __init__(self, cin: int, width: int, stride: int) -> None:
        super().__init__()
        cout = 4 * width
        self.body = nn.Sequential(
            Conv(cin, width, 1), Conv(width, width, 3, stride), Conv(width, cout, 1, relu=False)
        )
        same = stride == 1 and cin == cout
        self.shortcut = nn.Identity() if same else Conv(cin, cout, 1, stride, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.body(x))


def _resnet50() -> nn.Module:
    layers: list[nn.Module] = [Conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    cin = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            layers.append(Bottleneck(cin, width, 2 if stage and not block else 1))
            cin = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, 1000)]
    return trained_looking(nn.Sequential(*layers))


class Branches(nn.ModuleList):
    """Branches over one input, concatenated; each is a layer or a list of layers."""

    def __init__(self, *branches: nn.Module | list[nn.Module]) -> None:
        super().__init__(b if isinstance(b, nn.Module) else nn.Sequential(*b) for b in branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


def _inception(cin: int, widths: tuple[int, int, int, int, int, int]) -> Branches:
    """GoogLeNet's block."""
    one, three_in, three, five_in, five, pool = widths
    return Branches(
        Conv(cin, one, 1),
        [Conv(cin, three_in, 1), Conv(three_in, three, 3)],
        [Conv(cin, five_in, 1), Conv(five_in, five, 3)],
        [nn.MaxPool2d(3, 1, 1), Conv(cin, pool, 1)],
    )


def _googlenet() -> nn.Module:
    pool = nn.MaxPool2d(3, 2, 1)
    return trained_looking(
        nn.Sequential(
            Conv(3, 64, 7, 2), pool, Conv(64, 64, 1), Conv(64, 192, 3), pool,
            _inception(192, (64, 96, 128, 16, 32, 32)),
            _inception(256, (128, 128, 192, 32, 96, 64)), pool,
            _inception(480, (192, 96, 208, 16, 48, 64)),
            _inception(512, (160, 112, 224, 24, 64, 64)),
            _inception(512, (128, 128, 256, 24, 64, 64)),
            _inception(512, (112, 144, 288, 32, 64, 64)),
            _inception(528, (256, 160, 320, 32, 128, 128)), pool,
            _inception(832, (256, 160, 320, 32, 128, 128)),
            _inception(832, (384, 192, 384, 48, 128, 128)),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000),
        )
    )  # fmt: skip


def _pooled(cin: int, cout: int) -> list[nn.Module]:
    return [nn.AvgPool2d(3, 1, 1), Conv(cin, cout, 1)]


def _mixed(cin: int, pool: int) -> Branches:
    return Branches(
        Conv(cin, 64, 1),
        [Conv(cin, 48, 1), Conv(48, 64, 5)],
        [Conv(cin, 64, 1), Conv(64, 96, 3), Conv(96, 96, 3)],
        _pooled(cin, pool),
    )


def _mixed_of_sevens(width: int) -> Branches:
    across, down = (1, 7), (7, 1)
    return Branches(
        Conv(768, 192, 1),
        [Conv(768, width, 1), Conv(width, width, across), Conv(width, 192, down)],
        [
            Conv(768, width, 1), Conv(width, width, down), Conv(width, width, across),
            Conv(width, width, down), Conv(width, 192, across),
        ],
        _pooled(768, 192),
    )  # fmt: skip


def _mixed_wide(cin: int) -> Branches:
    def split() -> Branches:
        return Branches(Conv(384, 384, (1, 3)), Conv(384, 384, (3, 1)))

    return Branches(
        Conv(cin, 320, 1),
        [Conv(cin, 384, 1), split()],
        [Conv(cin, 448, 1), Conv(448, 384, 3), split()],
        _pooled(cin, 192),
    )


def _inception_v3() -> nn.Module:
    pool = nn.MaxPool2d(3, 2)
    return trained_looking(
        nn.Sequential(
            Conv(3, 32, 3, 2, pad=0), Conv(32, 32, 3, pad=0), Conv(32, 64, 3), pool,
            Conv(64, 80, 1), Conv(80, 192, 3, pad=0), pool,
            _mixed(192, 32), _mixed(256, 64), _mixed(288, 64),
            Branches(
                Conv(288, 384, 3, 2, pad=0),
                [Conv(288, 64, 1), Conv(64, 96, 3), Conv(96, 96, 3, 2, pad=0)],
                pool,
            ),
            *map(_mixed_of_sevens, (128, 160, 160, 192)),
            Branches(
                [Conv(768, 192, 1), Conv(192, 320, 3, 2, pad=0)],
                [
                    Conv(768, 192, 1), Conv(192, 192, (1, 7)), Conv(192, 192, (7, 1)),
                    Conv(192, 192, 3, 2, pad=0),
                ],
                pool,
            ),
            _mixed_wide(1280), _mixed_wide(2048),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000),
        )
    )  # fmt: skip


def _tiny_cnn() -> nn.Module:
    return trained_looking(
        nn.Sequential(
            Conv(3, 16, 3), nn.MaxPool2d(2), Conv(16, 32, 3), nn.MaxPool2d(2), Conv(32, 32, 3),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )
    )  # fmt: skip


# ---------------------------------------------------------------- transformers


class Returns(nn.Module):
    """A Hugging Face model that takes one tensor and returns one: the named field."""

    def __init__(self, inner: nn.Module, field: str, **kwargs: object) -> None:
        super().__init__()
        self.inner, self.field, self.kwargs = inner, field, kwargs

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.inner(x, **self.kwargs), self.field)


class Gpt2Decode(nn.Module):
    """One token through GPT-2's own layers; the cache, [layer, 1, head, slot, 64], in and out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self, token: Tensor, slot: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        body: Any = self.inner.transformer
        x = body.wte(token) + body.wpe(slot)
        heads, slots, width = keys.shape[2:]
        seen = (torch.arange(slots, device=slot.device) <= slot).view(1, 1, 1, slots)
        new_keys, new_values = [], []
        for layer, block in enumerate(body.h):
            q, k, v = block.attn.c_attn(block.ln_1(x)).chunk(3, -1)
            q, k, v = (t.view(1, 1, heads, width).transpose(1, 2) for t in (q, k, v))
            k = keys[layer].index_copy(2, slot, k)
            v = values[layer].index_copy(2, slot, v)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            x = x + block.attn.c_proj(attended.transpose(1, 2).reshape(1, 1, heads * width))
            x = x + block.mlp(block.ln_2(x))
            new_keys.append(k)
            new_values.append(v)
        head: Any = self.inner.lm_head
        return head(body.ln_f(x)), torch.stack(new_keys), torch.stack(new_values)


def _decode_inputs(seed: int) -> Args:
    generator = torch.Generator().manual_seed(seed)
    cache = (12, 1, 12, 128, 64)
    keys, values = (torch.randn(cache, generator=generator) for _ in range(2))
    token = torch.randint(50257, (1, 1), generator=generator)
    return token, torch.tensor([77 + seed]), keys, values


def _with_sdpa(config: Any) -> Any:
    config._attn_implementation = "sdpa"
    return config


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(_with_sdpa(GPT2Config(use_cache=False)))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    inner = BertModel(_with_sdpa(BertConfig()), add_pooling_layer=False)
    return Returns(inner, "last_hidden_state")


def _vit_s() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536)
    return Returns(ViTModel(_with_sdpa(config), add_pooling_layer=False), "last_hidden_state")


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)
    )


def case(
    model: Callable[[], nn.Module], make: Callable[[int], Args], tolerance: float = 1e-5
) -> Callable[[], Case]:
    def builder() -> Case:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Case(model().eval().requires_grad_(False), make, tolerance)

    return builder


_IMAGE = noise((1, 3, 224, 224))

MODELS: dict[str, Callable[[], Case]] = {
    "empty": case(Empty, noise((1,))),
    "empty_function": lambda: Case(_add_one, noise((1,))),
    "mlp": case(_mlp, noise((1, 64))),
    "tiny_cnn": case(_tiny_cnn, noise((1, 3, 32, 32))),
    "moe": case(Experts, noise((8, 256))),
    "moe_64": case(Experts, noise((64, 256))),
    "towers": case(Towers, noise((64, 256))),
    "dlrm": case(Dlrm, _dlrm_inputs),
    # Rounding may go the other way where x·s+o is next to a half: a few elements in 2^20.
    "quantise": case(Quantise, noise((1024, 1024)), 1e-4),
    "resnet50": case(_resnet50, _IMAGE, 1e-4),
    "googlenet": case(_googlenet, _IMAGE, 1e-4),
    "inception_v3": case(_inception_v3, noise((1, 3, 299, 299)), 1e-4),
    "vit_s": case(_vit_s, _IMAGE, 1e-4),
    "bert": case(_bert, tokens(1, 128, 30522), 1e-4),
    "gpt2_prefill": case(lambda: Returns(_gpt2(), "logits"), tokens(1, 64, 50257), 1e-4),
    "gpt2_decode": case(lambda: Gpt2Decode(_gpt2()), _decode_inputs, 1e-4),
}


@lru_cache(maxsize=1)
def build(name: str) -> Case:
    """The model of that name, once; a forked worker finds what its parent built."""
    from bench.zoo import ZOO

    return (MODELS | ZOO)[name]()
