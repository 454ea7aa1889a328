"""The training script that the other scripts in this directory submit. It prints every step, slowly enough to watch."""

from __future__ import annotations

import threading

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep.training

settings = everstep.training.hyperparameters(steps=100_000, pace=0.05)
torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))

session = everstep.training.init(model=model, optimizer=optimizer, data=loader)
for inputs, targets in session.batches(until_step=settings.steps):
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    session.log(loss=loss)
    print(f"step {session.step} loss {loss:.4f}", flush=True)
    threading.Event().wait(settings.pace)  # Emulate the duration of a real step.
session.close()
torch.save(model.module.state_dict(), everstep.training.output_dir() / "model.pt")
torch.distributed.destroy_process_group()
