"""A script for CUDA that was moved over: attention in mixed precision, with a profiler."""

import torch
import torch_npu
from torch import nn
from torch_npu.contrib import transfer_to_npu  # noqa: F401

torch.npu.set_compile_mode(jit_compile=False)
torch.npu.config.allow_internal_format = False
torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
device = torch.device("cuda:0")


class Block(nn.Module):
    def __init__(self, size=32, heads=4):
        super().__init__()
        self.heads, self.gamma = heads, nn.Parameter(torch.ones(size))
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x):
        tokens, size = x.shape[1:]
        q, k, v = self.qkv(torch_npu.npu_rms_norm(x, self.gamma)[0]).chunk(3, -1)
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        seen = torch_npu.npu_fusion_attention(
            q, k, v, self.heads, "BSH", atten_mask=mask, scale=(size // self.heads) ** -0.5,
            keep_prob=1.0, pre_tockens=65536, next_tockens=0, sparse_mode=0,
        )[0]  # fmt: skip
        return x + self.out(seen)


model = nn.Sequential(nn.Embedding(20, 32), Block(), Block(), nn.Linear(32, 20)).cuda().train()
optimizer = torch_npu.optim.NpuFusedAdamW(model.parameters(), lr=1e-2)
scaler = torch.cuda.amp.GradScaler()
ids = (torch.arange(12).repeat(8, 1) + torch.arange(8)[:, None]) % 20
losses = []
with torch_npu.profiler.profile(
    activities=[torch_npu.profiler.ProfilerActivity.CPU, torch_npu.profiler.ProfilerActivity.NPU],
    schedule=torch_npu.profiler.schedule(wait=0, warmup=1, active=1, repeat=1, skip_first=1),
    on_trace_ready=torch_npu.profiler.tensorboard_trace_handler("./trace"),
    experimental_config=torch_npu.profiler._ExperimentalConfig(
        profiler_level=torch_npu.profiler.ProfilerLevel.Level1,
        aic_metrics=torch_npu.profiler.AiCMetrics.AiCoreNone,
    ),
) as profiler:
    for _ in range(30):
        given = ids.to(device, non_blocking=True)
        with torch.cuda.amp.autocast():
            logits = model(given[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), given[:, 1:].flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        profiler.step()
torch.cuda.synchronize()
torch.save(model.state_dict(), "model.pt")
model.load_state_dict(torch.load("model.pt", map_location="cuda:0"))
result, expected = losses[-1] < losses[0] / 2, True
print(logits.dtype, torch.npu.is_available())
