"""The work that all systems do: a small GPT, batches that depend on the step alone, and a line for every finished step.

Imported by the scripts beside it from their own folder, also in virtual environments that know nothing of Everstep.
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
"""The least that a step takes: on two cores a system that keeps every step is to have the time to."""
MANY_STEPS = 1_000_000
"""Never reached: the job is stopped when all has been measured."""
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": BATCH,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000, "reduce_bucket_size": 1_000_000},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 2**31,
}


def prepare() -> None:
    """Set torch up as every system has it: one thread, the same weights on every rank."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    torch.set_num_threads(1)
    torch.manual_seed(7)


def make_model() -> torch.nn.Module:
    """Return the model."""
    return GPT(GPTConfig(VOCABULARY, 2, 128, 4, CONTEXT, 0.0))


def make_optimizer(model: torch.nn.Module) -> AdamW:
    """Return the optimizer."""
    return AdamW(model.parameters(), lr=1e-3)


class Batches:
    """What the steps work on.

    A batch comes `STEP_SECONDS` after the one before, or later: the wait stands for more computing.
    """

    def __init__(self) -> None:
        self._came_at = float("-inf")

    def of(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of one step: tokens int64[BATCH, CONTEXT], and those that follow them."""
        threading.Event().wait(max(0.0, self._came_at + STEP_SECONDS - time.monotonic()))
        self._came_at = time.monotonic()
        tokens = torch.randint(
            VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(1000 * step + rank)
        )
        return tokens[:, :-1], tokens[:, 1:]


class Trace:
    """Where a rank writes down what it has finished: one line a step, as `benchmarks.traces` reads it.

    The first number grows from process to process: its start in milliseconds of the machine's monotonic clock.
    """

    def __init__(self, rank: int) -> None:
        folder = Path(os.environ["BENCH_TRACE"])
        self._start = int(time.monotonic() * 1000)
        self._file: Any = (folder / f"rank{rank}").open("a", buffering=1)
        scratch = folder / f"rank{rank}.pid.new"
        scratch.write_text(str(os.getpid()))
        scratch.replace(folder / f"rank{rank}.pid")

    def finished(self, step: int) -> None:
        """Write down that a step is finished."""
        self._file.write(f"{self._start} {step} {time.monotonic():.6f}\n")
