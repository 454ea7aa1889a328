"""The training program under torchrun, with checkpoints in shared memory. Each start restores the newest.

under_torchrun.py KIND WAY FOLDER EVERY     KIND: ddp, zero3; WAY: torch_save, dcp; EVERY: steps between two
    checkpoints
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import work
from torch.nn.parallel import DistributedDataParallel

kind, way, folder, every = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
newest = folder / "newest"
work.prepare()
if kind == "zero3":
    import deepspeed

    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    with deepspeed.zero.Init(config_dict_or_path=work.DEEPSPEED):
        module = work.make_model()
    model, *_ = deepspeed.initialize(model=module, optimizer=work.make_optimizer(module), config=work.DEEPSPEED)
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(work.make_model())
    optimizer = work.make_optimizer(model)
trace = work.Trace(rank)
batches = work.Batches()


def state() -> dict[str, object]:
    """Return the state as a state dict."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save(step: int) -> None:
    """Save a checkpoint, write its step to `newest`, and remove all but the last two."""
    home = folder / f"step-{step}"
    if kind == "zero3":
        model.save_checkpoint(str(folder), tag=home.name)
    elif way == "dcp":
        dcp.save(state(), checkpoint_id=home)
    elif rank == 0:
        home.mkdir(exist_ok=True)
        torch.save(state(), home / "state.pt")
    if kind == "zero3" or way == "dcp":
        dist.barrier()
    if rank == 0:
        scratch = folder / "newest.new"
        scratch.write_text(str(step))
        scratch.replace(newest)
        shutil.rmtree(folder / f"step-{step - 2 * every}", ignore_errors=True)


def restore() -> int:
    """Restore the newest checkpoint; return its step, or 0 without one."""
    if not newest.exists():
        return 0
    step = int(newest.read_text())
    home = folder / f"step-{step}"
    if kind == "zero3":
        model.load_checkpoint(str(folder), tag=home.name)
        return step
    if way == "dcp":
        # create the optimizer's state tensors, because a new optimizer has none to load into
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        loaded = state()
        dcp.load(loaded, checkpoint_id=home)
    else:
        loaded = torch.load(home / "state.pt", weights_only=True)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    return step


step = restore()
while step < work.MANY_STEPS and not (folder / "stop").exists():
    loss = model(*batches.of(step, rank))
    if kind == "zero3":
        model.backward(loss)
        model.step()
    else:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    step += 1
    trace.finished(step)
    if step % every == 0:
        save(step)
os._exit(0)
