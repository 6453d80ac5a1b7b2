"""Prefill and decode with a cache that is written in place, an MLP on a stream of its own, and a
pass that moves the embedding to another."""

import torch
import torch_npu
import torchair
from torch import nn
from torchair import ops, scope

WIDTH, HEADS, ROWS, TOKENS = 16, 2, 12, 31


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x, keys, values, at, mask):
        normed, _ = torch_npu.npu_rms_norm(x, self.gain, 1e-6)
        with scope.npu_stream_switch("mlp"):
            mlp = self.down(torch_npu.npu_swiglu(self.up(normed)))
            done = ops.record()
        heads = [part.unflatten(-1, (HEADS, -1)) for part in self.qkv(normed).chunk(3, -1)]
        query, key, value = (part.transpose(1, 2) for part in heads)
        keys.index_copy_(2, at, key)
        values.index_copy_(2, at, value)
        attend = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        x = x + attend.transpose(1, 2).flatten(2)
        ops.wait([done])
        return x + mlp


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids, cache, at, mask):
        x = self.embed(ids)
        for layer, kept in zip(self.layers, cache, strict=True):
            x = layer(x, *kept, at, mask)
        return x[:, -1] @ self.embed.weight.T

    prefill = decode = forward


def embed_aside(gm, example_inputs, config: torchair.CompilerConfig):
    for node in list(gm.graph.nodes):
        if node.target == torch.ops.aten.embedding.default:
            with gm.graph.inserting_before(node):
                label = (["_user_stream_label"], ["embed"])
                gm.graph.call_function(torch.ops.air.scope_enter.default, label)
            with gm.graph.inserting_after(node):
                gm.graph.call_function(torch.ops.air.scope_exit.default)


def generate(prefill, decode):
    shape = (1, HEADS, ROWS, WIDTH // HEADS)
    cache = [(torch.zeros(shape).npu(), torch.zeros(shape).npu()) for _ in range(2)]
    ids, at, found = torch.tensor([[3, 5, 7]]).npu(), torch.arange(3).npu(), []
    with torch.no_grad():
        for step in range(5):
            mask = torch.arange(ROWS).npu() <= at[:, None]
            found.append((prefill if step == 0 else decode)(ids, cache, at, mask))
            ids, at = found[-1].argmax(-1, keepdim=True), at[-1:] + 1
    return torch.cat([*found, *(part.flatten()[None, :TOKENS] for part in cache[1])]).cpu()


torch.manual_seed(0)
model = Model().npu().eval()
expected = generate(model, model)
results = {}
for mode in ("max-autotune", "reduce-overhead"):
    config = torchair.CompilerConfig()
    config.mode = mode
    config.post_grad_custom_pre_pass = embed_aside
    backend = torchair.get_npu_backend(compiler_config=config)
    compiled = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
    results[mode] = generate(compiled, compiled)
cached = [
    torchair.inference.cache_compile(model.prefill, dynamic=True),
    torchair.inference.cache_compile(model.decode, dynamic=False),
]
results["cached"] = generate(*cached)
