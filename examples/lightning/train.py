"""Trains a small network with the Trainer of Lightning.

The script runs alone, under torchrun and under Everstep, unchanged.
"""

import os

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from everstep.integrations.lightning import EverstepCallback
from everstep.training import hyperparameters, output_dir

settings = hyperparameters(steps=300, learning_rate=1e-2, batch_size=16, seed=1)
seed_everything(settings.seed)


class Sums(LightningModule):
    """Learns to add eight numbers."""

    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)]
        self.network = torch.nn.Sequential(*layers)

    def training_step(self, batch):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.network(inputs), targets)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=settings.learning_rate)


inputs = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
module = Sums()
trainer = Trainer(
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
    max_steps=settings.steps,
    log_every_n_steps=10,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    callbacks=[EverstepCallback()],
)
trainer.fit(module, DataLoader(data, batch_size=settings.batch_size, shuffle=True))
if trainer.is_global_zero:
    torch.save(module.state_dict(), output_dir() / "model.pt")
