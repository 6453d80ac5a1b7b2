"""Gradients, training and mixed precision on the device, against the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.feature(
    "torch_npu", "simulated device: gradients, training, autocast, checkpointing"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.up = nn.ConvTranspose2d(8, 4, 2, groups=2)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4, 6)
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.rnn = nn.LSTM(6, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norm(self.up(F.relu(self.conv(x)))))
        x = self.out(x.flatten(2).transpose(1, 2))
        x = self.attend(x, x, x)[0]
        return F.log_softmax(self.rnn(x)[0], -1)


def test_training_is_the_same_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    host = Net()
    there = copy.deepcopy(host).npu()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (host, there)]
    for step in range(3):
        x = torch.randn(2, 3, 8, 8)
        losses = []
        for model, optimizer, input in ((host, optimizers[0], x), (there, optimizers[1], x.npu())):
            optimizer.zero_grad()
            loss = -model(input)[..., 1].mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) < 1e-4, step
    for (name, one), other in zip(host.named_parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(other.cpu(), one, msg=name, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(there.norm.running_mean.cpu(), host.norm.running_mean)


def test_gradcheck() -> None:
    x = torch.randn(3, 4, dtype=torch.float64).npu().requires_grad_()
    y = torch.randn(4, 2, dtype=torch.float64).npu().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: torch.sigmoid(a @ b).cumsum(0), (x, y))
    assert torch.autograd.gradgradcheck(lambda a: (a.sin() ** 3).sum(), (x,))


def test_the_function_transforms() -> None:
    x = torch.randn(5, 3)
    expected = torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)
    found = torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x.npu())
    torch.testing.assert_close(found.cpu(), expected)
    assert torch.func.jacrev(torch.sin)(x[0].npu()).is_npu


def test_backward_is_on_the_stream_of_forward() -> None:
    side = torch.npu.Stream()
    x = torch.randn(64, 64, device="npu", requires_grad=True)
    seen = []
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = (x @ x).sum()
        y.register_hook(lambda grad: seen.append(torch.npu.current_stream()))
    torch.npu.current_stream().wait_stream(side)
    y.backward()
    assert seen == [side]
    expected = torch.autograd.grad((z := x.detach().cpu().requires_grad_()).mm(z).sum(), z)[0]
    torch.testing.assert_close(x.grad.cpu(), expected)


def test_mixed_precision() -> None:
    model, x = nn.Linear(8, 8).npu(), torch.randn(4, 8, device="npu")
    with torch.npu.amp.autocast():
        assert model(x).dtype == torch.float16
        assert F.softmax(model(x), -1).dtype == torch.float32
    with torch.autocast("npu", torch.bfloat16):
        assert (x @ x.t()).dtype == torch.bfloat16
    scaler = torch.npu.amp.GradScaler()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model.weight.detach().clone()
    with torch.autocast("npu", torch.float16):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.weight, before)


def test_inference_mode_and_no_grad() -> None:
    with torch.inference_mode():
        x = torch.randn(4, device="npu")
        x.add_(1)[:2].mul_(2)
        assert x.is_inference()
        assert x.sum().isfinite()
    with torch.no_grad():
        assert not (torch.ones(2, device="npu", requires_grad=True) * 2).requires_grad


def test_checkpointing_draws_the_same_numbers() -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(200, device="npu", requires_grad=True)
    y = checkpoint(lambda a: F.dropout(a, 0.5) * 1.0, x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(y.detach(), x.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_halves_are_as_exact_as_on_the_cpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 5, dtype=dtype)
    for host in (nn.LayerNorm(5), nn.GroupNorm(3, 6), nn.BatchNorm1d(6)):
        host = host.to(dtype)
        there = copy.deepcopy(host).npu()
        results = []
        for model, given in ((host, x), (there, x.npu())):
            given = given.clone().requires_grad_()
            made = model(given)
            made.float().square().sum().backward()
            results.append((made.detach().cpu(), given.grad.cpu(), model.weight.grad.cpu()))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(other, one)
