"""Miniatures of training loops of three frameworks, as docs/adopting-frameworks.md adopts them.

Each script has the loop and the state of its original:

    diffusers  train_unconditional.py of huggingface/diffusers, commit 58eb52c
    timm       huggingface/pytorch-image-models train.py, commit aa4b585
    composer   mosaicml/composer 0.32.1, in `adopted_composer`

`ADOPTED` contains these scripts besides those of `adopted_scripts`.
"""

from __future__ import annotations

import copy
import math
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import everstep.training
from tests.integration.training import adopted_composer
from tests.integration.training.adopted_scripts import (
    EPOCHS,
    Augmented,
    AverageMeter,
    Steps,
    adopted,
    original,
    rehearse,
    run,
)

__all__ = ["ADOPTED", "rehearse", "run"]

ADOPTED = adopted_composer.ADOPTED


# -- diffusers: accelerate, own loops over epochs and batches, averaged weights, and samples from these averages

TIMESTEPS, IMAGES_PER_BATCH, STEPS_PER_EPOCH = 50, 2, 4


class Images(Dataset[dict[str, torch.Tensor]]):
    """Images with a random flip, as the script's transforms make them."""

    def __init__(self, count: int) -> None:
        self.images = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image = self.images[index]
        return {"input": image.flip(-1) if torch.rand(()) < 0.5 else image}


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)
        self.time, self.drop = nn.Embedding(TIMESTEPS, 4), nn.Dropout(0.1)

    def forward(self, sample: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.conv_in(sample) + self.time(timesteps)[:, :, None, None])
        return cast(torch.Tensor, self.conv_out(self.drop(hidden)))


class EMAModel:
    """The averaged weights of diffusers. Its state is replaced by a restore."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.shadow_params = [each.clone().detach() for each in parameters]
        self.temp_stored_params: list[torch.Tensor] | None = None
        self.optimization_step = 0
        self.cur_decay_value: float | None = None

    @torch.no_grad()
    def step(self, parameters: Iterable[torch.Tensor]) -> None:
        self.optimization_step += 1
        count = max(0, self.optimization_step - 1)
        self.cur_decay_value = 0.0 if count == 0 else min(1 - (1 + count) ** -0.75, 0.9999)
        for shadow, parameter in zip(self.shadow_params, parameters, strict=True):
            shadow.sub_((1 - self.cur_decay_value) * (shadow - parameter))

    def to(self, device: torch.device) -> None:
        self.shadow_params = [each.to(device) for each in self.shadow_params]

    def store(self, parameters: Iterable[torch.Tensor]) -> None:
        self.temp_stored_params = [each.detach().cpu().clone() for each in parameters]

    def copy_to(self, parameters: Iterable[torch.Tensor]) -> None:
        for shadow, parameter in zip(self.shadow_params, parameters, strict=True):
            parameter.data.copy_(shadow.data)

    def restore(self, parameters: Iterable[torch.Tensor]) -> None:
        assert self.temp_stored_params is not None
        for stored, parameter in zip(self.temp_stored_params, parameters, strict=True):
            parameter.data.copy_(stored.data)
        self.temp_stored_params = None

    def state_dict(self) -> dict[str, Any]:
        return {"optimization_step": self.optimization_step, "shadow_params": self.shadow_params}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = copy.deepcopy(state_dict)
        self.optimization_step = state_dict["optimization_step"]
        self.shadow_params = state_dict["shadow_params"]


class Diffusers:
    """The objects of the script before the loop, one batch, and the sample images at the end of an epoch."""

    def __init__(self) -> None:
        os.environ |= {"LOCAL_RANK": os.environ["RANK"], "ACCELERATE_USE_CPU": "true"}
        from accelerate import Accelerator

        torch.manual_seed(0)
        self.accelerator: Any = Accelerator(cpu=True, gradient_accumulation_steps=2)
        self.model: Any = UNet()
        self.ema_model = EMAModel(self.model.parameters())
        self.alphas_cumprod = torch.linspace(0.99, 0.1, TIMESTEPS)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2, betas=(0.95, 0.999))
        dataset = Images(STEPS_PER_EPOCH * 2 * IMAGES_PER_BATCH)
        self.train_dataloader: Any = DataLoader(dataset, batch_size=IMAGES_PER_BATCH, shuffle=True)
        self.lr_scheduler: Any = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)

    @staticmethod
    def rate(step: int) -> float:
        return step / 6 if step < 6 else 0.5 * (1 + math.cos(math.pi * (step - 6) / 1_000))

    def prepare(self) -> None:
        self.model, self.optimizer, self.train_dataloader, self.lr_scheduler = self.accelerator.prepare(
            self.model, self.optimizer, self.train_dataloader, self.lr_scheduler
        )
        self.ema_model.to(self.accelerator.device)

    def train(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        clean_images = batch["input"]
        noise = torch.randn(clean_images.shape)
        timesteps = torch.randint(0, TIMESTEPS, (clean_images.shape[0],))
        alphas = self.alphas_cumprod[timesteps][:, None, None, None]
        noisy_images = alphas.sqrt() * clean_images + (1 - alphas).sqrt() * noise
        with self.accelerator.accumulate(self.model):
            loss = F.mse_loss(self.model(noisy_images, timesteps), noise)
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.lr_scheduler.step()
            self.optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def save_images(self) -> torch.Tensor:
        unet = self.accelerator.unwrap_model(self.model)
        self.ema_model.store(unet.parameters())
        self.ema_model.copy_to(unet.parameters())
        image = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        for timestep in reversed(range(TIMESTEPS)):
            image = image - 0.01 * unet(image, torch.tensor([timestep]))
        self.ema_model.restore(unet.parameters())
        return image

    def logs(self, loss: torch.Tensor, global_step: int) -> torch.Tensor:
        """Return the sum of what the script logs, and of the averages, so that the events of the test contain them."""
        average = torch.stack([each.double().sum() for each in self.ema_model.shadow_params]).sum()
        rate, decay = self.lr_scheduler.get_last_lr()[0], self.ema_model.cur_decay_value or 0.0
        return loss + average + float(rate + decay + global_step)


@adopted
def adopted_diffusers(steps: Steps) -> None:
    from everstep.integrations.accelerate import attach, session_of

    this, finished = Diffusers(), everstep.training.counter()
    attach(this.accelerator, extra={"ema_model": this.ema_model, "finished": finished})
    this.prepare()
    num_epochs = steps.until // STEPS_PER_EPOCH
    for epoch in range(num_epochs):
        this.model.train()
        for batch in this.train_dataloader:
            loss = this.train(batch)
            if this.accelerator.sync_gradients:
                this.ema_model.step(this.model.parameters())
                global_step = next(finished) + 1
                steps.reach(session_of(this.accelerator), this.logs(loss, global_step))
        if finished.value != (epoch + 1) * len(this.train_dataloader) // 2:
            continue
        session = session_of(this.accelerator)
        if epoch == num_epochs - 1:
            session.close()
        else:
            session.fence()
        steps.events.of.append([session.step, "images", float(this.save_images().sum()).hex()])
    this.accelerator.end_training()


@original
def original_diffusers(steps: Steps) -> None:
    from everstep.integrations.accelerate import attach, session_of

    this = Diffusers()
    attach(this.accelerator)
    this.prepare()
    global_step = 0
    for _epoch in range(steps.until // STEPS_PER_EPOCH):
        this.model.train()
        for _step, batch in enumerate(this.train_dataloader):
            loss = this.train(batch)
            if this.accelerator.sync_gradients:
                this.ema_model.step(this.model.parameters())
                global_step += 1
                steps.reach(session_of(this.accelerator), this.logs(loss, global_step))
        this.save_images()
    this.accelerator.end_training()


# -- timm: accumulation within an epoch, Mixup, averages, a scheduler, meters, batch norm's means over all ranks

BATCH, ACCUMULATE = 4, 2


class Mixup:
    """Mixes each batch with its reverse, by draws of numpy's global generator."""

    def __call__(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lam = float(np.random.beta(0.8, 0.8)) if np.random.rand() < 0.9 else 1.0
        one_hot = F.one_hot(target, 3).float()
        x.mul_(lam).add_(x.flip(0).mul_(1.0 - lam))
        return x, one_hot * lam + one_hot.flip(0) * (1.0 - lam)


class ModelEmaV3(nn.Module):
    """The averages of a model's parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        step = max(0, step - 1)
        decay = 0.0 if step <= 0 else min(1 - (1 + step) ** (-2 / 3), 0.9998)
        for ema, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            if ema.is_floating_point():
                ema.lerp_(value, weight=1.0 - decay)
            else:
                ema.copy_(value)


class ClassificationTask(nn.Module):
    """The trained model with its averages, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        self.trainable_module: nn.Module = nn.Sequential(*layers)
        self.trainable_module_ema = ModelEmaV3(self.trainable_module)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.sum(-target * F.log_softmax(self.trainable_module(input), dim=-1), dim=-1).mean()

    def update_ema(self, step: int) -> None:
        self.trainable_module_ema.update(cast(Any, self.trainable_module).module, step)


class PlateauLRScheduler:
    """timm's scheduler with a state of its own. It is not a scheduler of torch, and ignores single updates."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.metric: float | None = None
        self.best = math.inf

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)

    def step(self, epoch: int, metric: float) -> None:
        if epoch > 0 and metric > self.best - 10.0:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5
        self.metric, self.best = metric, min(metric, self.best)

    def step_update(self, num_updates: int, metric: float) -> None:
        pass


class CheckpointSaver:
    """The best epochs of a run, of which timm keeps files."""

    def __init__(self) -> None:
        self.best_metric: float | None = None
        self.best_epoch: int | None = None
        self.checkpoint_files: list[tuple[str, float]] = []

    def save_checkpoint(self, epoch: int, metric: float) -> None:
        files = [*self.checkpoint_files, (f"checkpoint-{epoch}", metric)]
        self.checkpoint_files = sorted(files, key=lambda each: each[1])[:2]
        if self.best_metric is None or metric < self.best_metric:
            self.best_epoch, self.best_metric = epoch, metric


class PrefetchLoader:
    """Fetches one batch ahead of the loop, as timm's loader does to overlap its transfer with the computation."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        ahead: list[Any] = []
        for batch in self.loader:
            ahead.append(batch)
            if len(ahead) > 1:
                yield ahead.pop(0)
        yield from ahead


class Timm:
    """The objects of the script before the loop, and the calls of its functions."""

    def __init__(self) -> None:
        torch.manual_seed(42)
        self.task = ClassificationTask()
        self.optimizer = torch.optim.SGD(self.task.trainable_module.parameters(), 0.1, momentum=0.9, nesterov=True)
        self.task.trainable_module = DistributedDataParallel(self.task.trainable_module)
        self.mixup_fn, self.lr_scheduler, self.saver = Mixup(), PlateauLRScheduler(self.optimizer), CheckpointSaver()
        train = Augmented(7 * BATCH * 2)
        sampler: DistributedSampler[Any] = DistributedSampler(train)
        self.loader_train = DataLoader(train, batch_size=BATCH, sampler=sampler, drop_last=True)
        self.sampler = sampler
        self.updates_per_epoch = (len(self.loader_train) + ACCUMULATE - 1) // ACCUMULATE
        self.loader_eval = Augmented(12)

    def backward(self, input: torch.Tensor, target: torch.Tensor, accum_steps: int, need_update: bool) -> torch.Tensor:
        input, target = self.mixup_fn(input, target)
        if need_update:
            loss = cast(torch.Tensor, self.task(input, target) / accum_steps)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.task.trainable_module.parameters(), 1.0)
            self.optimizer.step()
        else:
            with cast(Any, self.task.trainable_module).no_sync():
                loss = cast(torch.Tensor, self.task(input, target) / accum_steps)
                loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def distribute_bn(self) -> None:
        for module in (cast(Any, self.task.trainable_module).module, self.task.trainable_module_ema):
            for name, buffer in module.named_buffers():
                if "running_mean" in name or "running_var" in name:
                    dist.all_reduce(buffer)
                    buffer /= 2.0

    @torch.inference_mode()
    def validate(self) -> OrderedDict[str, float]:
        images, labels = zip(*(self.loader_eval[index] for index in range(len(self.loader_eval))), strict=True)
        output = self.task.trainable_module_ema.module(torch.stack(images))
        return OrderedDict(loss=F.cross_entropy(output, torch.tensor(labels)).item())

    def end_epoch(self, epoch: int, train_metrics: dict[str, float]) -> None:
        self.distribute_bn()
        latest_metric = self.validate()["loss"] + train_metrics["loss"]
        self.saver.save_checkpoint(epoch, latest_metric)
        self.lr_scheduler.step(epoch + 1, latest_metric)

    def observed(self, loss: torch.Tensor, losses_m: AverageMeter, num_updates: int) -> torch.Tensor:
        """Return the sum of the loop's values, so that the events of the test contain them."""
        saver, rate = self.saver, self.optimizer.param_groups[0]["lr"]
        best = (saver.best_metric or 0.0) + (saver.best_epoch or 0) + sum(each for _, each in saver.checkpoint_files)
        return loss.double() + torch.tensor(losses_m.avg + num_updates + rate + best)


@adopted
def adopted_timm(steps: Steps) -> None:
    this = Timm()
    saver = this.saver
    session = steps.begin(
        model=this.task,
        optimizer=this.optimizer,
        scheduler=this.lr_scheduler,
        data=this.loader_train,
        extra={"epoch": -1, "num_updates": 0, "losses_m": {}, "saver": {}},
    )
    kept, stream = session.extra, session.data["data"]
    vars(saver).update(kept["saver"])

    def train_one_epoch(epoch: int, loader: DataLoader[Any]) -> OrderedDict[str, float]:
        losses_m = AverageMeter()
        this.task.trainable_module.train()
        accum_steps = ACCUMULATE
        last_accum_steps = len(loader) % accum_steps
        num_updates = epoch * this.updates_per_epoch
        last_batch_idx = len(loader) - 1
        last_batch_idx_to_accum = len(loader) - last_accum_steps
        this.optimizer.zero_grad()
        if kept["epoch"] == epoch:
            num_updates = kept["num_updates"]
            vars(losses_m).update(kept["losses_m"])
        for input, target in cast("Iterable[Any]", stream):
            batch_idx = stream.batch
            need_update = batch_idx == last_batch_idx or (batch_idx + 1) % accum_steps == 0
            if batch_idx >= last_batch_idx_to_accum:
                accum_steps = last_accum_steps
            loss = this.backward(input, target, accum_steps, need_update)
            losses_m.update(loss.item() * accum_steps, input.shape[0])
            if not need_update:
                continue
            num_updates += 1
            this.optimizer.zero_grad()
            this.task.update_ema(step=num_updates)
            this.lr_scheduler.step_update(num_updates=num_updates, metric=losses_m.avg)
            kept.update(epoch=epoch, num_updates=num_updates, losses_m=vars(losses_m), saver=vars(saver))
            steps.end(this.observed(loss, losses_m, num_updates))
        return OrderedDict(loss=losses_m.avg)

    for epoch in range(stream.epoch, EPOCHS):
        this.sampler.set_epoch(epoch)
        train_metrics = train_one_epoch(epoch, this.loader_train)
        session.fence()
        this.end_epoch(epoch, train_metrics)


@original
def original_timm(steps: Steps) -> None:
    this = Timm()
    steps.begin(model=this.task.trainable_module, optimizer=this.optimizer)

    def train_one_epoch(epoch: int, loader: PrefetchLoader) -> OrderedDict[str, float]:
        losses_m = AverageMeter()
        this.task.trainable_module.train()
        accum_steps = ACCUMULATE
        last_accum_steps = len(loader) % accum_steps
        num_updates = epoch * this.updates_per_epoch
        last_batch_idx = len(loader) - 1
        last_batch_idx_to_accum = len(loader) - last_accum_steps
        this.optimizer.zero_grad()
        for batch_idx, (input, target) in enumerate(loader):
            need_update = batch_idx == last_batch_idx or (batch_idx + 1) % accum_steps == 0
            if batch_idx >= last_batch_idx_to_accum:
                accum_steps = last_accum_steps
            loss = this.backward(input, target, accum_steps, need_update)
            losses_m.update(loss.item() * accum_steps, input.shape[0])
            if not need_update:
                continue
            num_updates += 1
            this.optimizer.zero_grad()
            this.task.update_ema(step=num_updates)
            this.lr_scheduler.step_update(num_updates=num_updates, metric=losses_m.avg)
            steps.end(this.observed(loss, losses_m, num_updates))
        return OrderedDict(loss=losses_m.avg)

    for epoch in range(EPOCHS):
        this.sampler.set_epoch(epoch)
        this.end_epoch(epoch, train_one_epoch(epoch, PrefetchLoader(this.loader_train)))
