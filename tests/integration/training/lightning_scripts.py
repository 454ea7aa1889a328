"""A small module that a Lightning `Trainer` trains. `test_lightning.py` kills and resumes its ranks.

The model has dropout, the collator adds noise, and validation draws random numbers. The module logs values of steps and
of epochs, and a metric. Callbacks monitor the values.
"""

from __future__ import annotations

import json
import logging
import os
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

WIDTH, SAMPLES = 8, 44
"""Width of the model, and number of samples. An epoch ends before its last accumulation is complete."""


class Samples(Dataset[torch.Tensor]):
    """Random vectors from a fixed seed."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.rows = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def with_noise(samples: list[torch.Tensor]) -> torch.Tensor:
    """Collate samples, and add noise from torch's generator of the process."""
    rows = torch.stack(samples)
    return rows + 0.1 * torch.randn(rows.shape)


def hexed(values: dict[str, float]) -> dict[str, str]:
    return {name: float(value).hex() for name, value in sorted(values.items())}


def run(directory: str, arguments: dict[str, Any]) -> int:
    """Train, and write the logged values, a digest of each tensor of the state, and the next random draws."""
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1"}
    warnings.simplefilter("ignore")
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback, EarlyStopping, EMAWeightAveraging, ModelCheckpoint
    from lightning.pytorch.loggers.logger import Logger
    from torchmetrics import MeanMetric

    from everstep.integrations.lightning import EverstepCallback
    from tests.integration.training.faults import reach
    from tests.integration.training.lightning_strategies import precision_of, strategy_of
    from tests.integration.training.scripts import digest

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.use_deterministic_algorithms(True)
    options = arguments.get("options", {})
    kind = options.get("kind", "one")
    torch.manual_seed(0)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = [torch.nn.Linear(WIDTH, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, WIDTH)]
            self.network = torch.nn.Sequential(*layers)
            self.mean_norm = MeanMetric()
            self.automatic_optimization = not options.get("manual", False)
            self.difficulty = 0.0

        def configure_model(self) -> None:
            if kind == "fsdp":
                from torch.distributed.fsdp import fully_shard

                fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

        def on_train_epoch_start(self) -> None:
            self.difficulty = 0.01 * self.current_epoch
            self.log("difficulty", self.difficulty)

        def loss(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.network(rows), rows.flip(1)) + self.difficulty

        def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.loss(rows)
            self.mean_norm.update(rows.norm().detach().float())
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            self.log("norm", self.mean_norm, on_step=False, on_epoch=True)
            self.log("largest", rows.max(), on_step=False, on_epoch=True, reduce_fx="max")
            if index == 1:
                self.log("rare", loss, on_step=False, on_epoch=True)
            if not self.automatic_optimization:
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
                    self.manual_backward(self.loss(rows))
                    optimizer.step()
            return loss

        def validation_step(self, rows: torch.Tensor, index: int) -> None:
            self.log("val_loss", self.loss(rows + 0.1 * torch.randn_like(rows)), sync_dist=True)

        def configure_optimizers(self) -> Any:
            if options.get("manual"):
                return [
                    torch.optim.SGD(self.network[0].parameters(), 0.1),
                    torch.optim.Adam(self.network[3].parameters()),
                ]
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            if options.get("validates"):
                plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class History(Callback):
        """Collects everything that the trainer logs, and numbers that the callback draws."""

        def __init__(self) -> None:
            self.entries: list[Any] = []

        def on_train_start(self, *_: Any) -> None:
            torch.rand(3)  # A resumed launch repeats this draw, which must not change its later draws.

        def on_train_epoch_end(self, trainer: Trainer, _: Any) -> None:
            self.entries.append(["epoch", trainer.global_step, hexed(trainer.callback_metrics), random.random().hex()])

        def state_dict(self) -> dict[str, Any]:
            return {"entries": json.dumps(self.entries)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.entries = json.loads(state["entries"])

    history = History()

    class Log(Logger):
        name, version = "log", 0

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            history.entries.append(["log", step, hexed(metrics)])

        def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    keep = EverstepCallback()

    class Begin(Callback):
        """Records the number of finished steps at which this launch began."""

        def on_train_start(self, *_: Any) -> None:
            begun.append(keep.session.step - 1)

    class Points(Callback):
        """Calls `reach` after each finished step, so that the test can make this rank wait between two steps."""

        count = 0

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            model: Any = trainer.strategy.model
            count = model.global_steps if kind == "zero" else trainer.global_step
            if count != self.count:
                self.count = count
                reach(rank, count, arguments.get("points", {}))

    begun: list[int] = []
    callbacks = [keep, history, Begin(), Points()]
    if options.get("validates"):
        callbacks.append(EarlyStopping("val_loss", patience=1_000, check_on_train_epoch_end=False))
    if options.get("averages"):
        callbacks.append(EMAWeightAveraging(decay=0.9))
    if options.get("saves"):
        callbacks.append(ModelCheckpoint(f"{directory}/saved", monitor="val_loss", mode="max", save_top_k=2))
    trainer = Trainer(
        **strategy_of(kind, world, options),
        **precision_of(options.get("precision", "32-true")),
        # Lightning adds up the steps of both optimizers of the manual optimization.
        max_steps=arguments["until"] * (2 if options.get("manual") else 1),
        accumulate_grad_batches=options.get("accumulate", 1),
        log_every_n_steps=2,
        val_check_interval=3 if options.get("validates") else 1.0,
        limit_val_batches=2 if options.get("validates") else 0,
        limit_train_batches=options.get("limit", 1.0),
        callbacks=callbacks,
        logger=Log() if options.get("validates") else False,
        enable_checkpointing=bool(options.get("saves")),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    workers = options.get("workers", 0)
    loader = DataLoader(Samples(), batch_size=2, shuffle=True, collate_fn=with_noise, num_workers=workers)
    random.seed(300 + rank)
    np.random.seed(200 + rank)
    trainer.fit(Module(), loader, DataLoader(Samples(6), batch_size=2))
    result = {
        "rank": rank,
        "strategy": type(trainer.strategy).__name__,
        "begun": begun[0] if begun else None,
        "step": keep.session.step - 1,
        "epoch": trainer.current_epoch,
        "history": history.entries,
        "digest": digest(keep.session),
        "draws": [torch.rand(()).item().hex(), float(np.random.rand()).hex(), random.random().hex()],
    }
    for each in trainer.checkpoint_callbacks:
        result["best"] = sorted(float(score).hex() for score in each.best_k_models.values())
    Path(directory, f"result-{rank}.json").write_text(json.dumps(result))
    if world > 1:
        dist.destroy_process_group()
    return 0
