"""Small models that the tests share, each with its inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) * 2 + 1)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.conv(x)), inplace=True), 2)
        return self.head(y.mean((2, 3)))


class Quantise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.clamp(torch.round_(x * 8.8 + 1.1), -128, 127)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.table(ids))
        q, k, v = self.qkv(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.softmax(q @ k.transpose(-1, -2) / 2.0, -1)
        return x + self.out((scores @ v).transpose(1, 2).reshape(2, 5, 8))


class Blocks(nn.Module):
    """The same layer several times over: equal operators on equal types, each its own value."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(6))
        for norm in self.norms:
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms)):  # noqa: B905 (TorchScript)
            y = norm(conv(y))
            if i % 2 == 1:
                y = x = F.relu(y + x)
            else:
                y = F.relu(y)
        return F.max_pool2d(F.silu(x), 3, 2, 1).softmax(-1)


class Scalars(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = (x > 0) & (x != 2)
        return torch.where(y, x**2 - 3, 1 - x / 4).cumsum(0).to(torch.float64)


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "mlp": lambda: (Mlp().eval(), (torch.randn(2, 8),)),
    "cnn": lambda: (Cnn().eval(), (torch.randn(2, 3, 8, 8),)),
    "quantise": lambda: (Quantise(), (torch.randn(4, 5),)),
    "attention": lambda: (Attention().eval(), (torch.randint(0, 11, (2, 5)),)),
    "blocks": lambda: (Blocks().eval(), (torch.randn(2, 4, 6, 6),)),
    "scalars": lambda: (Scalars(), (torch.randn(6),)),
}
