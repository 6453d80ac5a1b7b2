"""A training loop as it is written for torch_npu: mixed precision, pinned batches, a stream of its
own for copies, events, a checkpoint, and counters at the end."""

import torch
import torch_npu
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.npu.manual_seed_all(0)
torch.npu.set_device(0)
device = torch.device("npu", torch.npu.current_device())
torch.npu.set_compile_mode(jit_compile=False)

wanted = torch.randn(8, 1)
data = torch.randn(96, 8)
loader = DataLoader(TensorDataset(data, data @ wanted), batch_size=16, pin_memory=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
model = model.npu()
optimizer = torch_npu.optim.NpuFusedAdam(model.parameters(), lr=3e-2)
scaler = torch.npu.amp.GradScaler(init_scale=128.0)
copies, start, end = torch.npu.Stream(), torch.npu.Event(enable_timing=True), torch.npu.Event(True)

losses = []
start.record()
for _ in range(12):
    for x, y in loader:
        with torch.npu.stream(copies):
            x, y = x.npu(non_blocking=True), y.to("npu:0", non_blocking=True)
        torch.npu.current_stream().wait_stream(copies)
        for moved in (x, y):
            moved.record_stream(torch.npu.current_stream())
        with torch.npu.amp.autocast(dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), y.half())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    losses.append(loss.item())
end.record()
torch.npu.synchronize()

torch.save(model.state_dict(), "model.pt")
again = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
again.load_state_dict(torch.load("model.pt", map_location="npu:0"))
again.to(device)
x = torch.randn(4, 8, device="npu", generator=torch.Generator("npu").manual_seed(1))
result, expected = again(x).cpu(), model(x).cpu()

print("falls", losses[-1] < losses[0] / 4)
print("time", start.elapsed_time(end) >= 0, isinstance(copies, torch.npu.Stream))
print("peak", torch.npu.max_memory_allocated() >= torch.npu.memory_allocated("npu:0"))
print("kind", x.is_npu, x.device == device, next(model.parameters()).device == device)
state = torch.npu.get_rng_state()
first = torch.rand(3, device="npu")
torch.npu.set_rng_state(state)
print("random", torch.equal(first, torch.rand(3, device="npu")))
