"""A small deterministic training run.

It contains the state that a resume must restore: batch norm, dropout, an embedding, a schedule, and a position in the
middle of an epoch. The script gives the same results with and without Everstep.

A test can make all ranks wait at a *moment*. While the file `<gate>/hold 1:8` exists, the ranks of generation 1 wait
between steps 8 and 9. Each rank writes the digest of every tensor, every loss as hexadecimal, and its next random draw.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import everstep.training

settings = everstep.training.hyperparameters(
    adapter="zero3",
    precision="fp32",
    width=24,
    steps=16,
    seed=3,
    pace_seconds=0.0,
    gate="",
    crash_after=-1,
    waits_after=-1,
    ballast_bytes=0,
    says="",
    fixed_names=False,
)
GENERATION = int(os.environ.get("EVERSTEP_GENERATION", "0"))
TOKENS, LENGTH, WIDTH = 29, 6, settings.width


if settings.fixed_names and Path(os.environ["EVERSTEP_AGENT_SOCKET"]).parent.is_mount():
    # As a library with fixed names: the instance has shared memory of its own, and its agent removes what ranks leave.
    os.close(os.open(f"/dev/shm/of-rank-{os.environ['RANK']}", os.O_CREAT | os.O_EXCL))


class Sentences(Dataset):
    """Random tokens. The target is a function of the tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.tokens = torch.randint(TOKENS, (200, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens[index], (self.tokens[index].sum() + index) % TOKENS


class Flatten(nn.Module):
    def forward(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded.flatten(1)


class Losses:
    def __init__(self) -> None:
        self.values: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


class Ballast(nn.Module):
    """A parameter that makes the state larger than a node's memory for slots.

    The script never reads or writes its elements, so it uses no physical memory.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size // 4), requires_grad=False)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(TOKENS, 8),
        Flatten(),
        nn.Linear(8 * LENGTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, TOKENS),
    )


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5) * 0.98**step)


def of_torch() -> tuple[dict[str, Any], Callable[[Any], float]]:
    """Return the objects and the step function for plain torch with averaged gradients, DDP or FSDP2."""
    is_bf16 = settings.precision == "bf16"
    model: nn.Module = network()
    if settings.adapter == "ddp":
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)
    elif settings.adapter == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
        if is_bf16:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in model:
            if isinstance(module, (nn.Linear, nn.Embedding)):
                fully_shard(module, **options)
            elif isinstance(module, nn.BatchNorm1d):  # full precision, like the batch norm's running statistics
                fully_shard(module, mesh=options["mesh"])
        fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = schedule(optimizer)
    autocasts = is_bf16 and settings.adapter != "fsdp2"

    def step(batch: Any) -> float:
        inputs, targets = batch
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if autocasts else contextlib.nullcontext():
            output = model(inputs)
        loss = F.cross_entropy(output.float(), targets)
        loss.backward()
        if settings.adapter == "plain":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}, step


def of_deepspeed() -> tuple[dict[str, Any], Callable[[Any], float]]:
    import deepspeed

    stage = int(settings.adapter.removeprefix("zero"))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 64,
            "reduce_bucket_size": 4096,
            "allgather_bucket_size": 4096,
        },
        "bf16": {"enabled": settings.precision == "bf16"},
    }
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", dist_init_required=False)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = network()
    if settings.precision == "bf16" and stage < 3:
        model = model.bfloat16()  # DeepSpeed itself would keep the batch norm's statistics in fp32
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule(optimizer), config=config, dist_init_required=False
    )

    def step(batch: Any) -> float:
        inputs, targets = batch
        loss = F.cross_entropy(engine(inputs).float(), targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return {"engine": engine}, step


def stand(finished: int) -> None:
    """Wait while the file exists that makes the ranks wait after step `finished` of this generation."""
    gate, moment = Path(settings.gate), f"{GENERATION}:{finished}"
    while settings.gate and (gate / f"hold {moment}").exists():
        (gate / f"reached {moment} {dist.get_rank()}").touch()
        threading.Event().wait(0.01)


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(settings.seed)
    parts, make_step = of_deepspeed() if settings.adapter.startswith("zero") else of_torch()
    dataset = Sentences()
    sampler = DistributedSampler(dataset, world_size, rank, seed=settings.seed, drop_last=True)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, drop_last=True)
    losses = Losses()
    extra: dict[str, Any] = {"losses": losses}
    if settings.ballast_bytes:
        parts["model"] = {"model": parts["model"], "ballast": Ballast(settings.ballast_bytes)}
    torch.manual_seed(settings.seed + 1 + rank)  # dropout differs between ranks
    session = everstep.training.init(data=loader, extra=extra, **parts)
    print(f"rank {rank} of {world_size}, generation {GENERATION} {settings.says}".rstrip(), flush=True)  # noqa: T201
    for batch in session.batches(until_step=settings.steps):
        stand(session.step - 1)
        if session.step - 1 == settings.crash_after:
            sys.exit(f"the data of step {session.step} are bad")
        if (GENERATION, rank, session.step - 1) == (1, 1, settings.waits_after):
            threading.Event().wait()  # the rank waits forever, while the other ranks enter a collective
        losses.values.append(make_step(batch).hex())
        session.log(loss=float.fromhex(losses.values[-1]))
        threading.Event().wait(settings.pace_seconds)
    stopped_after = session.step - 1
    session.close()
    tensors = {name: hashlib.sha256(memory(tensor)).hexdigest() for name, tensor in session.state_tensors().items()}
    result = {"steps": stopped_after, "losses": losses.values, "tensors": tensors, "draw": torch.rand(()).item().hex()}
    (everstep.training.output_dir() / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def memory(tensor: torch.Tensor) -> bytes:
    header = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return header + tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    main()
