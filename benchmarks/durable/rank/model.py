"""The model that the measured jobs train: the GPT of `examples/char_gpt`, sharded over the ranks by FSDP2."""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.durable.rank.sizes import ModelSize
from benchmarks.machine import ROOT

sys.path.insert(0, str(ROOT / "examples" / "char_gpt"))
from model import GPT, GPTConfig

VOCABULARY, HEADS, CONTEXT = 128, 4, 64
LEARNING_RATE = 1e-3


def freeze_imports() -> None:
    """Exclude all objects after the imports from garbage collections, as in warm ranks of Everstep."""
    # Otherwise, single collections pause a rank for up to 0.6 s on a busy machine.
    gc.collect()
    gc.freeze()


class Training:
    """A model under AdamW, on random tokens. All ranks create it together, with the same seed."""

    def __init__(self, size: ModelSize, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = GPT(GPTConfig(VOCABULARY, size.layers, size.width, HEADS, CONTEXT, 0.0))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, foreach=True)
        self._batch = size.batch
        self._generator = torch.Generator().manual_seed(dist.get_rank())

    def forward_and_backward(self) -> None:
        """Compute the gradients of one batch."""
        tokens = torch.randint(VOCABULARY, (self._batch, CONTEXT + 1), generator=self._generator)
        self.optimizer.zero_grad()
        self.model(tokens[:, :-1], tokens[:, 1:]).backward()

    def step(self) -> None:
        """Run one optimizer step."""
        self.optimizer.step()

    @property
    def state_bytes(self) -> int:
        """Bytes of this rank's parameters and AdamW's two moments."""
        return 3 * sum(each.to_local().nbytes for each in self.model.parameters())  # type: ignore[attr-defined]
