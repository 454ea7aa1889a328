"""A training script with steps of constant duration, and a trace of its boundaries.

Each boundary adds a line to `$BENCH_TRACE/rank<r>` with these values:

- number of finished steps
- monotonic seconds of the machine
- seconds for which the session blocked the script in this step
- the newest committed step on the rank's page
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

import everstep.training
from benchmarks.data_plane.rank.state import State, pause
from everstep.protocol.rank_messages import RANK_WORD_BYTES, read_agent_half
from infra.local_cloud.processes import memory_files

SPAN_COPIES = 3
"""Minimum wait in place of forward and backward, as a multiple of a copy of the state."""
COPIES = 5


def copy_seconds(state: State) -> float:
    """Return the median of a copy of the whole state into warm memory."""
    tensors = [tensor.detach() for _, tensor in state.tensors()]
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    taken = []
    for _ in range(COPIES):
        begun = time.perf_counter()
        for source, target in zip(tensors, targets, strict=True):
            target.copy_(source)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def largest(value: float) -> float:
    """Return the largest of all ranks' values, as the step's collective."""
    word = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(word, dist.ReduceOp.MAX)
    return float(word)


settings = everstep.training.hyperparameters(state_mib=64, span_seconds=0.15)
directory, rank = Path(os.environ["BENCH_TRACE"]), os.environ["RANK"]
dist.init_process_group("gloo")
state = State(settings.state_mib, int(rank))
session = everstep.training.init(model=state.module, optimizer=state.optimizer)
session.restore()
copied = copy_seconds(state)
span = largest(max(settings.span_seconds, SPAN_COPIES * copied))
word = memory_files(os.getpid())[f"{os.environ['EVERSTEP_RUN_ID']}/rank-{rank}.word"]
committed = -1
with word.open("rb") as file, (directory / f"rank{rank}").open("w", buffering=1) as trace:
    page = memoryview(mmap.mmap(file.fileno(), RANK_WORD_BYTES, prot=mmap.PROT_READ))
    (directory / f"copy{rank}").write_text(f"{copied} {span}\n")
    while True:
        pause(span)
        if largest((directory / "finish").exists()):
            break
        begun = time.perf_counter()
        session.fence()  # wait here until the snapshot is copied, and not in the optimizer's step, to time the wait
        held = time.perf_counter() - begun
        state.advance()
        begun = time.perf_counter()
        control = session.boundary()
        held += time.perf_counter() - begun
        half = read_agent_half(page)  # `half` is None while the agent writes its half of the page.
        committed = half.committed if half is not None else committed
        trace.write(f"{control.step} {time.monotonic():.6f} {held:.6f} {committed}\n")
session.close()
dist.destroy_process_group()
