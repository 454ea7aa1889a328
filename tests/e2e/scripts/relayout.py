"""A training script that keeps its global batch with every adapter and on any number of ranks.

With the hyperparameter `idle`, the script makes no optimizer step after it has loaded its state. Its checkpoint then
contains the loaded tensors, which tests compare with the tensors of the earlier job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep.training

GLOBAL_BATCH, MICRO_BATCH = 48, 4
settings = everstep.training.hyperparameters(adapter="zero3", idle=0, pace_seconds=0.1, gate="")


def network() -> nn.Sequential:
    """Return a model with tensors that 3, 4 or 6 ranks can only divide into parts of different sizes."""
    return nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 7), nn.LayerNorm(7), nn.Linear(7, 1))


def of_fsdp() -> tuple[dict[str, Any], Callable[[Any, bool], None]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(batch: Any, is_last: bool) -> None:
        inputs, targets = batch
        F.mse_loss(model(inputs), targets).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer}, train


def of_deepspeed(accumulate: int) -> tuple[dict[str, Any], Callable[[Any, bool], None]]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": accumulate,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 64},
    }
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", dist_init_required=False)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def train(batch: Any, is_last: bool) -> None:
        inputs, targets = batch
        engine.backward(F.mse_loss(engine(inputs), targets))
        engine.step()

    return {"engine": engine}, train


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # The initial weights of each run differ, so that equal digests can only come from the load.
    torch.manual_seed(10 * dist.get_world_size() + settings.idle)
    accumulate = everstep.training.accumulation(GLOBAL_BATCH, MICRO_BATCH)
    parts, train = of_fsdp() if settings.adapter == "fsdp2" else of_deepspeed(accumulate)
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(480, 8, generator=generator), torch.randn(480, 1, generator=generator))
    loader = DataLoader(data, batch_size=MICRO_BATCH, sampler=DistributedSampler(data))
    session = everstep.training.init(data=loader, **parts)
    if settings.idle:
        session.restore()
        while not session.boundary().stop:
            threading.Event().wait(settings.pace_seconds)
    else:
        for number, batch in enumerate(session.batches(until_step=100_000, accumulate=accumulate), 1):
            train(batch, number % accumulate == 0)
            threading.Event().wait(settings.pace_seconds / accumulate)
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
