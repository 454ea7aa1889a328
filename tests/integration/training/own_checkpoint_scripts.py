"""Scripts that begin from a checkpoint of their framework, as `resume_from_checkpoint` and `ckpt_path` say."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from everstep.training.determinism.digests import digest_of
from tests.integration.training.trainer_scripts import Samples, gpt2

BEFORE = 5
"""Number of steps that the framework's checkpoint contains."""
LR = 1e-2


def run(directory: str, arguments: dict[str, Any]) -> int:
    """Train until a number of steps after the checkpoint, or make the checkpoint. Write the results."""
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "ACCELERATE_USE_CPU": "true"}
    os.chdir(directory)
    options = arguments["options"]
    torch.manual_seed(0)
    train = {"trainer": _trainer, "lightning": _lightning}[options["kind"]]
    until = BEFORE if options.get("makes") else arguments["until"] + options.get("before", BEFORE)
    begun, step, model, optimizer = train(until, options)
    result = {
        "begun": begun - options.get("before", BEFORE),
        "step": step,
        "lr": optimizer.param_groups[0]["lr"],
        "digest": {name: digest_of(each) for name, each in model.state_dict().items()},
    }
    Path(directory, f"result-{os.environ['RANK']}.json").write_text(json.dumps(result))
    return 0


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens = torch.stack([sample["input_ids"] for sample in samples])
    return {"input_ids": tokens, "labels": tokens}


def _trainer(until: int, options: dict[str, Any]) -> tuple[int, int, torch.nn.Module, torch.optim.Optimizer]:
    import transformers

    import everstep.integrations.transformers

    begun: list[int] = []

    class Begin(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, _: object, state: Any, *__: object, **___: object) -> None:
            begun.append(state.global_step)

    args = transformers.TrainingArguments(
        output_dir=options["home"],
        max_steps=until,
        per_device_train_batch_size=4,
        save_strategy="steps" if options.get("makes") else "no",
        save_steps=BEFORE,
        learning_rate=options.get("lr", LR),
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(gpt2(), args, collate, Samples(), callbacks=[Begin()])
    everstep.integrations.transformers.attach(trainer, options_from_script=options.get("from_script", ()))
    trainer.train(resume_from_checkpoint=options["resumes"])
    return begun[0], trainer.state.global_step, trainer.model, trainer.optimizer


def _lightning(until: int, options: dict[str, Any]) -> tuple[int, int, torch.nn.Module, torch.optim.Optimizer]:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from everstep.integrations.lightning import EverstepCallback

    begun: list[int] = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.network(batch["input_ids"].float()).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=options.get("lr", LR))

    class Begin(Callback):
        def on_train_start(self, trainer: Trainer, *_: Any) -> None:
            begun.append(trainer.global_step)

    module, path = Module(), f"{options['home']}/line.ckpt"
    trainer = Trainer(
        callbacks=[EverstepCallback(options_from_script=options.get("from_script", ())), Begin()],
        max_steps=until,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Samples(), batch_size=4, collate_fn=collate)
    trainer.fit(module, loader, ckpt_path=path if options["resumes"] else None)
    if options.get("makes"):
        trainer.save_checkpoint(path)
    return begun[0], trainer.global_step, module, trainer.optimizers[0]
