"""Trains a GPT-2 with a transformers Trainer, saves each step with the selected system, and measures each step."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from everstep.training import hyperparameters, output_dir

settings = hyperparameters(system="plain", steps=40, settle_steps=10)
set_seed(1)
spent: dict[str, float] = defaultdict(float)
"""Seconds of Everstep in the training thread in the current step, by part."""


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """A dataset whose sequences count up from a random token, modulo 512."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = torch.randint(512, (1,), generator=torch.Generator().manual_seed(index))
        tokens = (start + torch.arange(64)) % 512
        return {"input_ids": tokens, "labels": tokens}


class Clock(TrainerCallback):  # type: ignore[misc]
    """Records the end of each step, and Everstep's operations in it."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.parts: dict[str, list[float]] = defaultdict(list)
        self.snapshots: list[int] = []
        """Number of snapshots at the end of each step."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())
        for name in ("boundary", "loop state", "data position", "wait for the copy"):
            self.parts[name].append(spent[name])
        self.snapshots.append(snapshot_count())
        spent.clear()

    def result(self) -> dict[str, Any]:
        """Return the durations after the warm-up, of steps and of Everstep's operations."""
        first = settings.settle_steps
        steps = [end - begin for begin, end in zip(self.ends[first - 1 :], self.ends[first:], strict=False)]
        parts = {name: values[first:] for name, values in self.parts.items()}
        inside = zip(parts["boundary"], parts["loop state"], parts["data position"], strict=True)
        parts["capture"] = [boundary - state - position for boundary, state, position in inside]
        del parts["boundary"]
        return {"steps": steps, "parts": parts if settings.system == "everstep" else {}}


class Replicated(TrainerCallback):  # type: ignore[misc]
    """Stores each step in both nodes' memory, with lm-resiliency."""

    def __init__(self) -> None:
        sys.path.append(os.environ["BENCH_LIBRARY"])
        from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig

        folder = str(output_dir() / "disk")
        config = InMemoryCkptConfig(
            interval=1, replication_jump=1, disk_flush_interval=0, disk_folder=folder, run_id="bench"
        )
        self._create: Callable[[], Any] = lambda: InMemoryCheckpointManager(config)
        self._keeper: Any = None

    def on_step_end(self, _: Any, state: Any, __: Any, **objects: Any) -> None:
        if self._keeper is None:
            self._keeper = self._create()
        optimizer = getattr(objects["optimizer"], "optimizer", objects["optimizer"])
        tree = {"model": objects["model"].state_dict(), "optimizer": optimizer.state_dict(), "step": state.global_step}
        self._keeper.save(tree, state.global_step)


def snapshot_count() -> int:
    """Return Everstep's snapshots, 0 with another system."""
    return len(integration.session_of(trainer).blocked_seconds) if settings.system == "everstep" else 0


def timed(owner: Any, method: str, part: str) -> None:
    """Replace a method by one that adds its duration to `spent[part]`."""
    function = getattr(owner, method)

    def measured(*given: Any, **more: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*given, **more)
        finally:
            spent[part] += time.perf_counter() - begun

    setattr(owner, method, measured)


arguments: dict[str, Any] = {"save_strategy": "no"}
if settings.system == "own_saves":
    arguments = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
args = TrainingArguments(
    output_dir="saves",
    max_steps=settings.settle_steps + settings.steps,
    per_device_train_batch_size=4,
    logging_steps=10,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    **arguments,
)
model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=160, n_layer=4, n_head=4))
trainer = Trainer(model=model, args=args, train_dataset=Tokens())
clock = Clock()
if settings.system == "everstep":
    import everstep.integrations.transformers as integration
    from everstep.training import TrainingSession
    from everstep.training.data import DataStream

    timed(integration.LoopState, "state_dict", "loop state")
    timed(DataStream, "state_dict", "data position")
    timed(TrainingSession, "boundary", "boundary")
    timed(TrainingSession, "fence", "wait for the copy")
    integration.attach(trainer)
if settings.system == "lm_resiliency":
    trainer.add_callback(Replicated())
trainer.add_callback(clock)
trainer.train()
state_bytes = 12 * sum(parameter.numel() for parameter in model.parameters())
result = {
    **clock.result(),
    "snapshots": clock.snapshots[-1] - clock.snapshots[settings.settle_steps - 1],
    "state_bytes": state_bytes,
}
(output_dir() / "times.json").write_text(json.dumps(result))
dist.destroy_process_group()
