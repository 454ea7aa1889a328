"""A training run that keeps its global batch on any number of ranks. Each rank writes a digest of every parameter."""

from __future__ import annotations

import hashlib
import json
import threading

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep.training

GLOBAL_BATCH, MICRO_BATCH = 16, 4
settings = everstep.training.hyperparameters(steps=16, pace_seconds=0.0, gate="")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
    loader = DataLoader(data, batch_size=MICRO_BATCH, sampler=DistributedSampler(data))
    accumulate = everstep.training.accumulation(GLOBAL_BATCH, MICRO_BATCH)
    session = everstep.training.init(model=model, optimizer=optimizer, data=loader)
    for number, (inputs, targets) in enumerate(session.batches(until_step=settings.steps, accumulate=accumulate), 1):
        (F.mse_loss(model(inputs), targets) / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            threading.Event().wait(settings.pace_seconds)
    steps = session.step - 1
    session.close()
    tensors = {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in model.state_dict().items()
    }
    (everstep.training.output_dir() / "result.json").write_text(json.dumps({"steps": steps, "tensors": tensors}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
