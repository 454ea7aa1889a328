"""Trains a small network with Hugging Face accelerate.

The script runs alone, under torchrun or `accelerate launch`, and under Everstep, unchanged.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from everstep.integrations.accelerate import prepare
from everstep.training import hyperparameters, output_dir

settings = hyperparameters(steps=300, learning_rate=1e-2, seed=1)
set_seed(settings.seed)
accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
inputs = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)

keep = prepare(accelerator, model=model, optimizer=optimizer, data=loader)
for features, targets in keep.batches(until_step=settings.steps):
    with accelerator.accumulate(keep.model):
        loss = torch.nn.functional.mse_loss(keep.model(features), targets)
        accelerator.backward(loss)
        keep.optimizer.step()
        keep.optimizer.zero_grad()
    keep.session.log(loss=loss)
keep.close()
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(keep.model).state_dict(), output_dir() / "model.pt")
accelerator.end_training()
