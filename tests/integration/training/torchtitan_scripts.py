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
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.tensor import DTensor, Partial, Replicate
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
from torchtitan.models import llama3, qwen3
from torchtitan.models.common.attention import GQAttention, ScaledDotProductAttention
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


class GatheredAttention(ScaledDotProductAttention):  # type: ignore[misc]
    """Gathers all keys and values before attention, because torch's ring of ranks has no kernel for the CPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):  # type: ignore[misc]
        pass

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        mesh = q.device_mesh
        whole = [each.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]) for each in (k, v)]
        attended = super().forward(q.to_local(), *whole, **options | {"is_causal": False})
        return DTensor.from_local(attended, mesh, q.placements, run_check=False)


def step_microbatches(
    schedule: Any,
    *,
    arg_mbs: Any,
    kwarg_mbs: Any,
    target_mbs: Any,
    losses: Any,
    loss_kwargs: Any,
    return_outputs: bool,
) -> None:
    """Run one step of a pipeline from microbatches, as torchtitan 0.3 requests it from a torch newer than 2.13."""
    for stage in vars(schedule).get("_stages") or [vars(schedule)["_stage"]]:
        stage.has_backward = True
        stage.clear_runtime_states()
    schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)


PipelineScheduleSingle.step = PipelineScheduleMulti.step = step_microbatches


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
    spec = qwen3.model_registry("debugmodel_moe") if options.get("experts") else llama3.model_registry("debugmodel")
    spec.model.layers = spec.model.layers[: options.get("layers", 2)]
    is_divided = options.get("parallelism", {}).get("context_parallel_degree", 1) > 1
    inner = GatheredAttention if is_divided else ScaledDotProductAttention
    for _, attention, _, _ in spec.model.traverse(GQAttention.Config):
        attention.inner_attention = inner.Config()
    config = Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=4, total_steps=40, decay_type="cosine"),
        training=TrainingConfig(
            local_batch_size=options.get("batch", 2),
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
