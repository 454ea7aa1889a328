"""A character-level GPT, trained with DeepSpeed ZeRO-3 on the source code of Python's standard library.

Every machine with Python has this text. The training needs no GPU.

    torchrun --nproc-per-node=2 train.py --steps 20                                      # without Everstep
    everstep jobs submit --name gpt --source-dir . --entry-point train.py --node-count 4  # on Everstep, unchanged

Four calls connect the training to Everstep: `init`, `batches`, `log` and `close`. Helper functions of
`everstep.training` read the hyperparameters and return the output directory.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from model import GPT, GPTConfig
from safetensors_writer import write_safetensors
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import everstep.training

settings = everstep.training.hyperparameters(
    steps=200,
    seed=7,
    layers=2,
    width=128,
    heads=4,
    context=64,
    batch=4,
    global_batch=0,
    dropout=0.1,
    learning_rate=3e-3,
    text_bytes=1_000_000,
)


class StandardLibrary(Dataset):
    """Dataset of text windows from the standard library's top-level modules, in alphabetical order.

    All nodes with the same version of Python have the same data.
    """

    def __init__(self, context: int, size: int):
        text = bytearray()
        for path in sorted(Path(os.__file__).parent.glob("[a-z]*.py")):
            text += path.read_bytes()
            if len(text) >= size:
                break
        self.text = torch.frombuffer(text[:size], dtype=torch.uint8).clamp(max=127).long()
        self.context = context

    def __len__(self):
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index):
        window = self.text[index * self.context : (index + 1) * self.context + 1]
        return window[:-1], window[1:]


class Losses:
    """The loss of every step. The list is part of the saved state, so it stays complete across interruptions."""

    def __init__(self):
        self.values = []

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


def warm_up_then_cosine(step: int) -> float:
    """Return the factor of the learning rate: a linear rise over 20 steps, then half a cosine down to a tenth."""
    warm_up = 20
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warm_up) / max(1, settings.steps - warm_up)))


# Hide the warnings that torch prints because DeepSpeed calls collectives by deprecated names.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
# Without this line, DeepSpeed compiles collectives over shared memory for a minute. Only its own launcher uses them.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(settings.seed)

# Keep the global batch size if the job continues on fewer ranks: each rank then accumulates more batches per step.
accumulate = everstep.training.accumulation(settings.global_batch, settings.batch) if settings.global_batch else 1
config = {
    "train_micro_batch_size_per_gpu": settings.batch,
    "gradient_accumulation_steps": accumulate,
    "gradient_clipping": 1.0,
    # Use small buckets for the small model, because the default reserves 2 GB on every rank.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000, "reduce_bucket_size": 1_000_000},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 2**31,
}
with deepspeed.zero.Init(config_dict_or_path=config):
    model = GPT(GPTConfig(128, settings.layers, settings.width, settings.heads, settings.context, settings.dropout))
optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_cosine)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)

dataset = StandardLibrary(settings.context, settings.text_bytes)
sampler = DistributedSampler(dataset, world_size, rank, seed=settings.seed, drop_last=True)
loader = DataLoader(dataset, batch_size=settings.batch, sampler=sampler, drop_last=True)
losses = Losses()
torch.manual_seed(settings.seed + rank)  # Each rank draws different dropout masks.

session = everstep.training.init(engine=engine, data=loader, extra={"losses": losses})
for inputs, targets in session.batches(until_step=settings.steps):
    loss = engine(inputs, targets)
    engine.backward(loss)
    engine.step()
    losses.values.append(loss.item())
    session.log(loss=loss)
    if rank == 0 and session.step % 10 == 0:
        print(f"step {session.step:5d}  loss {losses.values[-1]:.4f}", flush=True)
session.close()

output = everstep.training.output_dir()
write_safetensors(output / f"state-rank{rank}.safetensors", session.state_tensors())
(output / f"losses-rank{rank}.json").write_text(json.dumps({"losses": losses.values}))
if rank == 0:
    print(
        f"{len(losses.values)} steps, loss {losses.values[0]:.4f} to {losses.values[-1]:.4f}, results in {output}",
        flush=True,
    )
dist.destroy_process_group()
