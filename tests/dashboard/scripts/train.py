"""Training script of the recorded jobs: a small network on random tokens, with a pause after each step.

`unlabelled_after` makes rank 0 fail: its batch after that step has no labels.
"""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import everstep.training

settings = everstep.training.hyperparameters(learning_rate=3e-3, step_pause=0.2, steps=5000, unlabelled_after=-1)
TOKENS, LENGTH = 29, 6
EVERY_STEPS = 5


class Sentences(Dataset):
    """Random tokens. The label is a function of the tokens."""

    def __init__(self) -> None:
        self.tokens = torch.randint(TOKENS, (4000, LENGTH), generator=torch.Generator().manual_seed(11))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": self.tokens[index], "labels": self.tokens[index].max()}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Embedding(TOKENS, 16), nn.Flatten(), nn.Linear(16 * LENGTH, 64), nn.ReLU(), nn.Linear(64, TOKENS)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    sampler = DistributedSampler(dataset := Sentences(), world_size, rank, drop_last=True)
    session = everstep.training.init(
        model=model, optimizer=optimizer, data=DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)
    )
    print(f"rank {rank} of {world_size}: {sum(each.numel() for each in model.parameters()):,} parameters", flush=True)  # noqa: T201
    begun = time.monotonic()
    for batch in session.batches(until_step=settings.steps):
        if rank == 0 and session.step - 1 == settings.unlabelled_after:
            del batch["labels"]
        loss = F.cross_entropy(model(batch["tokens"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step()
        threading.Event().wait(settings.step_pause)
        now = time.monotonic()
        if rank == 0:
            session.log(loss=loss.item(), step_seconds=now - begun)
        if session.step % EVERY_STEPS == 0:
            print(f"step {session.step:5d}  loss {loss.item():.4f}", flush=True)  # noqa: T201
        begun = now
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
