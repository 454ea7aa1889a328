"""Trains a small GPT-2 with the Trainer of Hugging Face transformers.

The script runs alone, under torchrun and under Everstep, unchanged.
"""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import everstep.integrations.transformers
from everstep.training import hyperparameters, output_dir

settings = hyperparameters(steps=200, learning_rate=1e-3, batch_size=4, seed=1)
set_seed(settings.seed)  # Build the same initial weights on every rank and at every start.


class Tokens(Dataset):
    """A dataset of token sequences. Each sequence counts up from a random start, modulo 97."""

    def __len__(self):
        return 2_000

    def __getitem__(self, index):
        start = torch.randint(97, (1,), generator=torch.Generator().manual_seed(index))
        tokens = (start + torch.arange(32)) % 97
        return {"input_ids": tokens, "labels": tokens}


args = TrainingArguments(
    output_dir="output",
    max_steps=settings.steps,
    learning_rate=settings.learning_rate,
    per_device_train_batch_size=settings.batch_size,
    logging_steps=10,
    save_strategy="no",
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
)
model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=32, n_embd=64, n_layer=2, n_head=4))
trainer = Trainer(model=model, args=args, train_dataset=Tokens())
everstep.integrations.transformers.attach(trainer)
trainer.train()
trainer.save_model(output_dir() / "model")
