"""Runs a rank that trains in the first generation, and restores this generation's last step in later generations.

Each line on stdin describes a generation, with any number of ranks; the answer is one line. The rank builds its model,
with other weights, before the session begins.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import everstep.training
from benchmarks.durable.rank.model import Training, freeze_imports
from benchmarks.durable.rank.sizes import ModelSize

STEPS = 6
"""Steps in the first generation, whose last step is committed when the script closes the session."""


def digest_of(training: Training) -> str:
    """Return a digest of all parameters and Adam moments. Collective."""
    digest = hashlib.sha256()
    for parameter in training.model.parameters():
        kept = training.optimizer.state[parameter]
        for tensor in (parameter.detach(), kept["exp_avg"], kept["exp_avg_sq"]):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            digest.update(whole.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def launch(size: ModelSize, generation: int) -> dict[str, object]:
    """Run the session of one generation. Return when `restore` returned, and a digest of model and optimizer."""
    training = Training(size, seed=generation)
    session = everstep.training.init(model=training.model, optimizer=training.optimizer)
    base = session.restore()
    restored_at = time.monotonic()
    if generation == 1:
        for _ in range(STEPS):
            training.forward_and_backward()
            training.step()
            session.boundary()
    digest = digest_of(training)
    session.close()
    return {"base": base, "restored_at": restored_at, "digest": digest, "state_bytes": training.state_bytes}


def main() -> None:
    """Run one session per line of stdin, and print its result as JSON."""
    freeze_imports()
    print("{}", flush=True)
    for line in sys.stdin:
        gc.collect()  # Otherwise, a collection of the previous task's garbage could count as part of this load.
        task = json.loads(line)
        environment: Mapping[str, str] = task["environment"]
        os.environ.update(environment)
        dist.init_process_group("gloo")
        found = launch(ModelSize(**task["size"]), int(environment["EVERSTEP_GENERATION"]))
        dist.barrier()
        dist.destroy_process_group()
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
