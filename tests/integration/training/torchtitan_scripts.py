"""A small trainer of torchtitan on the CPU. `test_torchtitan.py` kills and resumes its ranks.

The loader draws each sample from torch's generator of the process. Validation creates a loader, which draws from the
same generator.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "torchtitan"))
import on_cpu  # noqa: F401
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import GQAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from everstep.integrations.torchtitan import CheckpointManager
from tests.integration.training.faults import reach
from tests.integration.training.scripts import digest

TOKENS, LENGTH = 64, 16
TIMED = ("time", "throughput", "tflops", "mfu", "memory")
"""Parts of the names of logged values that depend on time and memory."""
KEPT = 4
"""Number of last steps whose logged values the result contains."""


class Samples(IterableDataset[Any]):
    """Random tokens from torch's generator of the process, and the number of the sample."""

    def __init__(self, rank: int) -> None:
        self.rank, self.count = rank, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.count += 1
            tokens = (torch.randint(TOKENS, (LENGTH + 1,)) + self.rank + self.count) % TOKENS
            yield {"input": tokens[:-1], "positions": torch.arange(LENGTH)}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Draws(ParallelAwareDataloader):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        infinite: bool = True

    def __init__(
        self, config: Config, *, dp_rank: int, dp_world_size: int, local_batch_size: int, tokenizer: Any, **more: Any
    ) -> None:
        workers = {"num_workers": config.num_workers, "multiprocessing_context": "fork" if config.num_workers else None}
        every = more.get("snapshot_every_n_steps", 1)
        options = {"batch_size": local_batch_size, "snapshot_every_n_steps": every, **workers}
        super().__init__(Samples(dp_rank), dp_rank, dp_world_size, **options)


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return TOKENS


def run(directory: str, arguments: dict[str, Any]) -> int:
    """Train, and write the logged values, a digest of each tensor of the state, and the next random draws."""
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "MASTER_ADDR": "127.0.0.1"}
    rank, options = int(os.environ["RANK"]), arguments.get("options", {})
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for _, attention, _, _ in spec.model.traverse(GQAttention.Config):
        attention.inner_attention = ScaledDotProductAttention.Config()
    config = Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=4, total_steps=40, decay_type="cosine"),
        training=TrainingConfig(
            local_batch_size=2,
            global_batch_size=options.get("global_batch", -1),
            seq_len=LENGTH,
            steps=arguments["until"],
            mixed_precision_param=options.get("dtype", "float32"),
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **options.get("parallelism", {})),
        metrics=MetricsProcessor.Config(log_freq=1),
        dataloader=Draws.Config(num_workers=options.get("workers", 0)),
        validator=Validator.Config(enable=options.get("validates", True), freq=2, steps=1, dataloader=Draws.Config()),
        tokenizer=NoTokenizer.Config(),
        debug=DebugConfig(seed=1, deterministic=True),
        dump_folder=directory,
        checkpoint=CheckpointManager.Config(),
    )
    trainer = config.build()
    random.seed(300 + rank)
    np.random.seed(200 + rank)
    history: dict[int, dict[str, str]] = {}
    log = trainer.metrics_processor.logger.log

    def record(metrics: dict[str, Any], step: int) -> None:
        kept = {name: float(value).hex() for name, value in metrics.items() if not any(map(name.__contains__, TIMED))}
        history.setdefault(step, {}).update(kept)
        log(metrics, step)

    trainer.metrics_processor.logger.log = record
    begun: list[int] = []
    should_continue = trainer.should_continue_training

    def observed() -> bool:
        begun.append(trainer.step)
        return should_continue()

    trainer.should_continue_training = observed
    save = trainer.checkpointer.save

    def save_and_reach(step: int, **more: Any) -> bool:
        ended: bool = save(step, **more)
        reach(rank, step, arguments.get("points", {}))
        return ended

    trainer.checkpointer.save = save_and_reach
    trainer.train()
    result = {
        "rank": rank,
        "begun": begun[0],
        "step": trainer.step,
        "tokens": trainer.ntokens_seen,
        "history": {str(step): entry for step, entry in history.items() if step > arguments["until"] - KEPT},
        "digest": digest(trainer.checkpointer.session),
        "draws": [torch.rand(()).item().hex(), float(np.random.rand()).hex(), random.random().hex()],
    }
    trainer.close()
    Path(directory, f"result-{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()
    return 0
