"""Against things we did not write: torch's operator database, Hugging Face models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import torchgraft as graft

# torch's own aot_eager backend fails on these, too (2.13): nothing of ours is involved.
UPSTREAM = {"linalg.pinv", "linalg.pinv.singular", "pinverse"}


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "count", "seed"), [("eager", 60, 1), ("default", 12, 2)])
def test_a_sample_of_the_operator_database(mode: str, count: int, seed: int) -> None:
    opdb = pytest.importorskip("bench.opdb")
    for grad in (False, True):
        results = opdb.sweep(opdb.operators("", count, seed), "float32", mode, grad)
        failed = [r for r in results if r.status == "failed" and r.op not in UPSTREAM]
        assert not failed, failed
        assert sum(r.status == "passed" for r in results) > count // 3


def hugging_face(name: str) -> tuple[nn.Module, dict[str, Any]]:
    hf = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = torch.randint(0, 50, (2, 7))
    if name == "bert":
        config = hf.BertConfig(vocab_size=50, intermediate_size=48, **small)
        return hf.BertModel(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "gpt2":
        config = hf.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, use_cache=False)
        return hf.GPT2LMHeadModel(config), {"input_ids": ids}
    if name == "llama":
        config = hf.LlamaConfig(vocab_size=50, intermediate_size=48, use_cache=False, **small)
        return hf.LlamaForCausalLM(config), {"input_ids": ids}
    config = hf.ViTConfig(image_size=16, patch_size=4, intermediate_size=48, **small)
    return hf.ViTModel(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit"])
def test_hugging_face_models_both_doors(name: str) -> None:
    model, kwargs = hugging_face(name)
    model.eval()
    with torch.no_grad():
        want = model(**kwargs)
    compiled = graft.compile(model, (), kwargs, mode="eager")
    got = compiled(**kwargs)
    assert type(got) is type(want)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)
    twin = copy.deepcopy(model)
    run = torch.compile(model, backend="torchgraft", mode="eager")
    run(**kwargs)[0].square().mean().backward()
    twin(**kwargs)[0].square().mean().backward()
    for (key, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        # torch.compile gives zeros where the loss does not see an output (the pooler).
        want = theirs.grad if theirs.grad is not None else torch.zeros_like(theirs)
        torch.testing.assert_close(ours.grad, want, rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.slow
def test_a_hugging_face_model_in_generated_code() -> None:
    model, kwargs = hugging_face("llama")
    model.eval()
    compiled = graft.compile(model, (), kwargs)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(**kwargs).logits, model(**kwargs).logits, rtol=1e-4, atol=1e-4
        )
    assert compiled.report.coverage == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_the_other_modes_on_the_cpu(mode: str) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).eval()
    x = torch.randn(3, 16)
    compiled = graft.compile(model, (x,), mode=mode)
    torch.testing.assert_close(compiled(x), model(x).detach())
    assert compiled.report.coverage == 1
