"""A small `Trainer` of transformers, attached to Everstep. The tests of the integration kill and resume it.

The model has dropout, the collator masks random tokens, and the trainer logs and evaluates between steps. Each of these
draws random numbers in the training process.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

TOKENS, LENGTH, SAMPLES = 37, 8, 44
"""Size of the vocabulary, length of a sample, and number of samples. An epoch ends in the middle of an accumulation."""


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Random tokens from a fixed seed."""

    def __init__(self) -> None:
        self.tokens = torch.randint(TOKENS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index]}


def mask(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate samples and replace random tokens, with torch's generator of the process."""
    tokens = torch.stack([sample["input_ids"] for sample in samples])
    masked = torch.where(torch.rand(tokens.shape) < 0.2, torch.zeros_like(tokens), tokens)
    return {"input_ids": masked, "labels": tokens}


def run(directory: str, arguments: dict[str, Any]) -> int:
    """Train, and write losses, digests and the next random draws."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "ACCELERATE_USE_CPU": "true"}
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    import transformers.trainer
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    import everstep.integrations.transformers as integration
    from tests.integration.training.scripts import digest

    # The log history is part of the state, so it must contain no durations.
    transformers.trainer.speed_metrics = lambda *_, **__: {}
    torch.use_deterministic_algorithms(True)
    options = arguments.get("options", {})
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=TOKENS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2)
    args = TrainingArguments(
        output_dir=f"{directory}/output",
        max_steps=arguments["until"],
        per_device_train_batch_size=2,
        gradient_accumulation_steps=options.get("accumulate", 1),
        learning_rate=1e-2,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=4,
        logging_steps=options.get("logging", 2),
        eval_strategy="steps" if options.get("evaluates") else "no",
        eval_steps=3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=options.get("bf16", False),
        dataloader_num_workers=options.get("workers", 0),
        **options.get("arguments", {}),
    )
    data = Samples()
    trainer = Trainer(GPT2LMHeadModel(config), args, data_collator=mask, train_dataset=data, eval_dataset=data)
    integration.attach(trainer)
    random.seed(300 + rank)
    np.random.seed(200 + rank)
    begun: list[int] = []

    class Begin(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, _: object, state: Any, *__: object, **___: object) -> None:
            begun.append(state.global_step)

    trainer.add_callback(Begin())
    trainer.train()
    session = integration.session_of(trainer)
    result = {
        "rank": rank,
        "begun": begun[0],
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "history": trainer.state.log_history,
        "digest": digest(session),
        "draws": [torch.rand(()).item().hex(), float(np.random.rand()).hex(), random.random().hex()],
    }
    Path(directory, f"result-{rank}.json").write_text(json.dumps(result))
    if world > 1:
        dist.destroy_process_group()
    return 0
