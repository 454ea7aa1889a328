"""The training work under every system: a small GPT, batches by step and rank, and a trace.

Scripts import it from their own folder, because some run in environments without Everstep.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from model import GPT, GPTConfig
from torch.optim import AdamW

BATCH, CONTEXT, VOCABULARY = 4, 64, 128
STEP_SECONDS = 0.1
"""Shortest step. On two cores, a system needs this time to store every step."""
MANY_STEPS = 1_000_000
"""A number that no run reaches. The benchmark stops the job."""
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": BATCH,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000, "reduce_bucket_size": 1_000_000},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 2**31,
}


def prepare() -> None:
    """Configure torch alike for every system: one thread, and the same initial weights."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    torch.set_num_threads(1)
    torch.manual_seed(7)


def make_model() -> torch.nn.Module:
    return GPT(GPTConfig(VOCABULARY, 2, 128, 4, CONTEXT, 0.0))


def make_optimizer(model: torch.nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=1e-3)


class Batches:
    """Yields batches, at least `STEP_SECONDS` apart, in place of the computation of a larger model."""

    def __init__(self) -> None:
        self._came_at = float("-inf")

    def of(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a step's tokens int64[BATCH, CONTEXT], and the next token of each."""
        threading.Event().wait(max(0.0, self._came_at + STEP_SECONDS - time.monotonic()))
        self._came_at = time.monotonic()
        tokens = torch.randint(
            VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(1000 * step + rank)
        )
        return tokens[:, :-1], tokens[:, 1:]


class Trace:
    """A rank's trace file in the format of `benchmarks.traces`.

    The first number of a line is the start of the rank's process in monotonic milliseconds, larger after a restart.
    """

    def __init__(self, rank: int) -> None:
        folder = Path(os.environ["BENCH_TRACE"])
        self._start = int(time.monotonic() * 1000)
        self._file: Any = (folder / f"rank{rank}").open("a", buffering=1)
        scratch = folder / f"rank{rank}.pid.new"
        scratch.write_text(str(os.getpid()))
        scratch.replace(folder / f"rank{rank}.pid")

    def finished(self, step: int) -> None:
        """Record that a step is finished."""
        self._file.write(f"{self._start} {step} {time.monotonic():.6f}\n")
