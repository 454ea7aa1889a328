"""A training script with a state of a chosen size, which measures the cost of a snapshot.

    floors ──▶ steps with snapshots, "wait" then "matmul" ──▶ the same floors again

Parameters have a transformer's shapes (fp32) under Adam, with fixed gradients. "wait" is a timed wait in place of
forward and backward, which leaves the CPU free; "matmul" computes on one thread. The floors are a plain memcpy of the
state, and a step without Everstep.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import everstep.training

WIDTH = 256
SPAN_COPIES = 3
"""Duration of the replacement of forward and backward, as a multiple of a copy of the state."""
MIN_SPAN_SECONDS = 0.05
MAX_STEPS = 5000
"""Largest number of steps per measurement, even with fewer snapshots than requested."""

settings = everstep.training.hyperparameters(state_mib=64, snapshots=30, floor_steps=12)


def blocks(size: int) -> torch.nn.ParameterList:
    """Return the parameters of as many transformer blocks as come closest to `size` bytes."""
    shapes = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH), (WIDTH,), (WIDTH,)]
    bytes_of_block = 3 * 4 * sum(math.prod(shape) for shape in shapes)
    return torch.nn.ParameterList(
        torch.randn(shape) for _ in range(max(1, round(size / bytes_of_block))) for shape in shapes
    )


def agreed(value: float, operation: dist.ReduceOp.RedOpType) -> float:
    """Return the largest or smallest of all ranks' values."""
    if world_size == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, operation)
    return float(tensor)


def copy_seconds(count: int) -> list[float]:
    """Time copies of the whole state into warm shared memory, tensor by tensor on one thread."""
    state = [
        *(parameter.detach() for parameter in parameters),
        *(value for each in optimizer.state.values() for value in each.values()),
    ]
    size = sum(tensor.nbytes for tensor in state)
    with mmap.mmap(-1, size) as shared:
        memory = torch.frombuffer(shared, dtype=torch.uint8)
        targets, offset = [], 0
        for tensor in state:
            targets.append(memory[offset : offset + tensor.nbytes])
            offset += tensor.nbytes
        taken = []
        # The first two copies are not timed, because the kernel allocates the pages in them.
        for _ in range(count + 2):
            begun = time.perf_counter()
            for source, target in zip(state, targets, strict=True):
                target.copy_(source.reshape(-1).view(torch.uint8))
            taken.append(time.perf_counter() - begun)
        del memory, targets, target
    return taken[2:]


def together() -> None:
    """Synchronize all ranks, as the collectives of a real job's step do."""
    agreed(0.0, dist.ReduceOp.MAX)


def plain_steps(compute: Callable[[], object]) -> list[float]:
    """Return the seconds of steps without a session."""
    taken = []
    for _ in range(settings.floor_steps):
        begun = time.perf_counter()
        compute()
        together()
        optimizer.step()
        taken.append(time.perf_counter() - begun)
    return taken


def floors() -> dict[str, list[float]]:
    """Time plain copies of the state, and steps without a session."""
    return {
        "memcpy": copy_seconds(settings.floor_steps),
        **{kind: plain_steps(compute) for kind, compute in computes.items()},
    }


torch.set_num_threads(1)
world_size = int(os.environ["WORLD_SIZE"])
if world_size > 1:
    dist.init_process_group("gloo")
torch.manual_seed(7)
parameters = blocks(settings.state_mib * 1024**2)
for parameter in parameters:
    parameter.grad = torch.full_like(parameter, 1e-3)
optimizer = torch.optim.AdamW(parameters.parameters(), lr=1e-6, fused=True)
optimizer.step()

span = agreed(max(MIN_SPAN_SECONDS, SPAN_COPIES * sorted(copy_seconds(7))[3]), dist.ReduceOp.MAX)
left, right, product = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH), torch.empty(WIDTH, WIDTH)


def matmuls(count: int) -> None:
    for _ in range(count):
        torch.mm(left, right, out=product)


matmuls(100)
calibrated = time.perf_counter()
matmuls(200)
product_count = int(agreed(math.ceil(span * 200 / (time.perf_counter() - calibrated)), dist.ReduceOp.MIN))
computes: dict[str, Callable[[], object]] = {
    "wait": lambda: threading.Event().wait(span),
    "matmul": lambda: matmuls(product_count),
}

before = floors()
session = everstep.training.init(model=parameters, optimizer=optimizer)
session.restore()
steps: dict[str, list[float]] = {}
counts: dict[str, tuple[int, int]] = {}
# Measurements by kind of computation (`computes`), with one entry per step: the number of snapshots so far, and the
# seconds for which the session blocked the script.
held: dict[str, list[tuple[int, float]]] = {}
for kind, compute in computes.items():
    first = len(session.blocked_seconds)
    taken: list[float] = []
    held[kind] = []
    while (
        agreed(len(session.blocked_seconds) - first, dist.ReduceOp.MIN) < settings.snapshots and len(taken) < MAX_STEPS
    ):
        begun = time.perf_counter()
        compute()
        together()
        ready = time.perf_counter()
        # Wait here until the snapshot is copied, and not in the optimizer's step, so that the script times the wait.
        session.fence()
        fenced = time.perf_counter()
        optimizer.step()
        stepped = time.perf_counter()
        session.boundary()
        ended = time.perf_counter()
        taken.append(ended - begun)
        held[kind].append((len(session.blocked_seconds) - first, fenced - ready + ended - stepped))
    steps[kind], counts[kind] = taken, (first, len(session.blocked_seconds))
session.close()
after = floors()

result = {
    "state_bytes": sum(tensor.nbytes for tensor in session.state_tensors().values()),
    "span_seconds": span,
    "before": before,
    "after": after,
    "steps": steps,
    "held": held,
    "blocked": {kind: list(session.blocked_seconds)[begin:end] for kind, (begin, end) in counts.items()},
}
(everstep.training.output_dir() / "result.json").write_text(json.dumps(result))
if world_size > 1:
    dist.destroy_process_group()
