"""A training script whose rank 1 kills itself at a chosen step of the first launch. Each rank traces its boundaries.

Each step trains the GPT of `rank.model` and lasts at least `STEP_SECONDS`. Each boundary adds a line to
`$BENCH_TRACE/rank<r>` with these values:

- number of the launch (generation)
- number of finished steps
- monotonic seconds of the machine
- seconds for which the session blocked the script in this step
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch.distributed as dist

import everstep.training
from benchmarks.command import pause
from benchmarks.durable.rank.model import Training
from benchmarks.durable.rank.sizes import ModelSize

settings = everstep.training.hyperparameters(steps=100, kill_at=60, layers=2, width=256, step_seconds=0.1)
rank, generation = int(os.environ["RANK"]), int(os.environ["EVERSTEP_GENERATION"])
dist.init_process_group("gloo")
training = Training(ModelSize(layers=settings.layers, width=settings.width), seed=7)
session = everstep.training.init(model=training.model, optimizer=training.optimizer)
session.restore()
with (Path(os.environ["BENCH_TRACE"]) / f"rank{rank}").open("a", buffering=1) as trace:
    step = session.step - 1
    while step < settings.steps:
        begun = time.monotonic()
        training.forward_and_backward()
        pause(max(0.0, begun + settings.step_seconds - time.monotonic()))
        ready = time.monotonic()
        session.fence()  # wait here until the snapshot is copied, and not in the optimizer's step, to time the wait
        held = time.monotonic() - ready
        training.step()
        ready = time.monotonic()
        control = session.boundary()
        step = control.step
        now = time.monotonic()
        trace.write(f"{generation} {control.step} {now:.6f} {held + now - ready:.6f}\n")
        if generation == 1 and rank == 1 and control.step == settings.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if control.stop:
            break
session.close()
dist.destroy_process_group()
