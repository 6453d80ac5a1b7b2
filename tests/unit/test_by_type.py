"""Weights in the key of Inductor's cache, as on CUDA; here on the CPU."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import torchgraft as graft
from torchgraft._torch import generator


class Looked(nn.Module):
    """Nothing in it is packed."""

    def __init__(self, seed: int, rows: int = 40) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.gain = nn.Embedding(rows, 24), nn.Parameter(torch.randn(24))

    def forward(self, x: Tensor) -> Tensor:
        return (self.table(x) * self.gain.sin()).cos()


@pytest.mark.slow
def test_code_is_found_for_other_weights_and_bound_to_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(generator, "by_type", functools.partial(generator.by_type, device="cpu"))
    x, hits = torch.tensor([3, 7]), []
    for model in (Looked(0), Looked(1), Looked(2, rows=50)):
        before = generator.cache_hits()
        compiled = graft.compile(model, (x,), inductor={"fx_graph_cache": True})
        torch.testing.assert_close(compiled(x), model(x))
        hits.append(generator.cache_hits() - before)
        assert not any(hasattr(weight, "_is_frozen_param") for weight in model.parameters())
    assert hits == [0, 1, 0]
