"""Trains a small Llama 3 with torchtitan.

The script runs under torchrun and under Everstep, unchanged.
"""

from dataclasses import dataclass

import on_cpu  # noqa: F401 — for a trial without a GPU
import torch
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import GQAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from everstep.integrations.torchtitan import CheckpointManager
from everstep.training import hyperparameters, output_dir

settings = hyperparameters(steps=200, learning_rate=1e-3, batch_size=4, seed=1)


class Counting(IterableDataset):
    """A dataset of token sequences. Each sequence counts up from a random start, modulo 97.

    Each data-parallel rank has different starts.
    """

    def __init__(self, rank, length):
        self.rank, self.length, self.count = rank, length, 0

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(1_000_000 * self.rank + self.count)
            self.count += 1
            tokens = (torch.randint(97, (1,), generator=generator) + torch.arange(self.length + 1)) % 97
            yield {"input": tokens[:-1], "positions": torch.arange(self.length)}, tokens[1:]

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Numbers(ParallelAwareDataloader):
    """Loads batches of `Counting`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """The loader has no options of its own."""

    def __init__(self, *, dp_rank, dp_world_size, seq_len, local_batch_size, snapshot_every_n_steps=1, **_):
        options = {"batch_size": local_batch_size, "snapshot_every_n_steps": snapshot_every_n_steps}
        super().__init__(Counting(dp_rank, seq_len), dp_rank, dp_world_size, **options)


class NoTokenizer(BaseTokenizer):
    """Replaces the tokenizer that torchtitan requires. The data are numbers, so nothing is tokenized."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """The tokenizer has no options of its own."""

    def __init__(self, **_):
        super().__init__()

    def encode(self, *_, **__):
        raise NotImplementedError

    def decode(self, *_, **__):
        raise NotImplementedError

    def get_vocab_size(self):
        return 97


init_logger()
spec = model_registry("debugmodel")
spec.model.layers = spec.model.layers[:1]  # Use one of the six layers, because this is a trial.
for _, attention, _, _ in spec.model.traverse(GQAttention.Config):
    attention.inner_attention = ScaledDotProductAttention.Config()  # This attention needs no compilation.
config = Trainer.Config(
    model_spec=spec,
    loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
    optimizer=default_adamw(lr=settings.learning_rate),
    lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10),
    training=TrainingConfig(
        local_batch_size=settings.batch_size,
        seq_len=32,
        steps=settings.steps,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    ),
    parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),  # torch 2.13 supports no other backend.
    dataloader=Numbers.Config(),
    tokenizer=NoTokenizer.Config(),
    debug=DebugConfig(seed=settings.seed),
    dump_folder=str(output_dir()),
    checkpoint=CheckpointManager.Config(),
)
trainer = config.build()
try:
    trainer.train()
finally:
    trainer.close()
torch.distributed.destroy_process_group()
