"""A small training run with a minimum step time: three gloo ranks average the gradients of a small network.

Its results are the same with and without Everstep. Each rank appends a line after each step to a file in the folder
`trace`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import everstep.training

settings = everstep.training.hyperparameters(name="", seed=3, steps=100, step_seconds=0.0, trace="")
GENERATION = int(os.environ.get("EVERSTEP_GENERATION", "0"))
INPUTS, WIDTH, CLASSES = 16, 32, 8


class Points(Dataset):
    """A data set of random points. Each target is a function of its point."""

    def __init__(self) -> None:
        self.points = torch.randn((512, INPUTS), generator=torch.Generator().manual_seed(settings.seed))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[index], (self.points[index].abs().sum() * 7 + index).long() % CLASSES


class Tracer:
    """Writes a line after each step, with a single write, so that a kill leaves no partial line."""

    def __init__(self, rank: int) -> None:
        self.file = None
        node = re.search(r"i-[0-9a-f]+", os.environ.get("EVERSTEP_OUTPUT_DIR", ""))
        self.who: dict[str, Any] = {
            "job": settings.name,
            "generation": GENERATION,
            "rank": rank,
            "pid": os.getpid(),
            "node": node[0] if node else "",
        }
        if settings.trace:
            self.file = os.open(
                Path(settings.trace) / f"{settings.name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
            )

    def passed(self, step: int) -> None:
        if self.file is not None:
            line = {**self.who, "step": step, "at": time.time(), "monotonic": time.monotonic()}
            os.write(self.file, json.dumps(line).encode() + b"\n")


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(settings.seed)
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(dataset := Points(), world_size, rank, seed=settings.seed, drop_last=True)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, drop_last=True)
    torch.manual_seed(settings.seed + 1 + rank)  # dropout differs between ranks
    session = everstep.training.init(model=model, optimizer=optimizer, data=loader)
    tracer = Tracer(rank)
    tracer.passed(session.restore())
    loss, began = torch.zeros(()), time.monotonic()
    for inputs, targets in session.batches(until_step=settings.steps):
        if session.step > 1:
            tracer.passed(session.step - 1)
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        dist.all_reduce(gradients)
        for parameter, piece in zip(
            model.parameters(), gradients.split([parameter.numel() for parameter in model.parameters()]), strict=True
        ):
            parameter.grad.copy_((piece / world_size).view_as(parameter))
        optimizer.step()
        threading.Event().wait(max(0.0, began + settings.step_seconds - time.monotonic()))
        began = time.monotonic()
    steps = session.step - 1
    tracer.passed(steps)
    session.close()
    tensors = {
        name: hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in session.state_tensors().items()
    }
    result = {"steps": steps, "tensors": tensors, "draw": torch.rand(()).item().hex()}
    (everstep.training.output_dir() / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
