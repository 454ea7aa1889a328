"""A miniature of the loop of MosaicML Composer's `Trainer`, as docs/adopting-frameworks.md adopts it.

Read: `Trainer._train_loop`, `_train_batch`, `_train_microbatches`, `_iter_dataloader` and `fit` of
composer/trainer/trainer.py, `Timestamp` of composer/core/time.py, and `EMA` of composer/algorithms, version 0.32.1.
`Kept` and `EverstepBatches` are the code of the document.
"""

from __future__ import annotations

import datetime
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import everstep.training
from everstep.integrations.base import StepBatches
from tests.integration.training.adopted_scripts import ADOPTED, Augmented, Steps, adopted, original

__all__ = ["ADOPTED"]

BATCH, MICROBATCH = 4, 2
COUNTS = ("epoch", "batch", "sample", "batch_in_epoch", "sample_in_epoch")


class Time(int):
    """A count with its `value`, as Composer's class."""

    @property
    def value(self) -> int:
        return int(self)


class Timestamp:
    """The counts and the wall-clock time of training. Each batch makes a new object."""

    def __init__(self, *counts: int, total_wct: datetime.timedelta = datetime.timedelta()) -> None:
        self.epoch, self.batch, self.sample, self.batch_in_epoch, self.sample_in_epoch = map(Time, counts or [0] * 5)
        self.total_wct = total_wct

    def state_dict(self) -> dict[str, Any]:
        return {name: int(getattr(self, name)) for name in COUNTS} | {"total_wct": self.total_wct}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in COUNTS:
            setattr(self, name, Time(state[name]))
        if "total_wct" in state:
            self.total_wct = state["total_wct"]

    def to_next_batch(self, samples: int, duration: datetime.timedelta) -> Timestamp:
        within = (self.batch_in_epoch + 1, self.sample_in_epoch + samples)
        return Timestamp(
            self.epoch, self.batch + 1, self.sample + samples, *within, total_wct=self.total_wct + duration
        )

    def to_next_epoch(self) -> Timestamp:
        return Timestamp(self.epoch + 1, self.batch, self.sample, 0, 0, total_wct=self.total_wct)


@dataclass
class State:
    """The state that Composer passes to each callback."""

    model: Any
    optimizers: Sequence[torch.optim.Optimizer]
    max_epochs: int
    dataloader: Any = None
    dataloader_len: int = 0
    schedulers: Sequence[torch.optim.lr_scheduler.LRScheduler] = ()
    algorithms: Sequence[Any] = ()
    callbacks: Sequence[Any] = ()
    timestamp: Timestamp = field(default_factory=Timestamp)
    batch: Any = None
    total_loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))


class Callback:
    """A method for each event."""

    def run_event(self, event: str, state: State) -> None:
        getattr(self, event, lambda _state, _logger: None)(state, None)


class EMA(Callback):
    """Composer's algorithm: averages of parameters and buffers, which an evaluation swaps with those of the model.

    The averages begin again after the first step, when DDP has changed the names of the parameters.
    """

    def __init__(self) -> None:
        self.ema_started = False
        self.averages: dict[str, torch.Tensor] = {}

    def init(self, state: State, _logger: Any) -> None:
        self.averages = {name: each.data.clone() for name, each in state.model.state_dict().items()}

    @torch.no_grad()
    def batch_end(self, state: State, logger: Any) -> None:
        if not self.ema_started:
            self.init(state, logger)
            self.ema_started = True
        for name, value in state.model.state_dict().items():
            self.averages[name].copy_(self.averages[name] * 0.9 + value * (1.0 - 0.9))

    @torch.no_grad()
    def eval_start(self, state: State, _logger: Any) -> None:
        for name, value in state.model.state_dict().items():
            own = value.clone()
            value.copy_(self.averages[name])
            self.averages[name].copy_(own)

    eval_end = eval_start

    def state_dict(self) -> dict[str, Any]:
        return {"repr": repr(self), "ema_model": self.averages, "ema_started": self.ema_started}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.averages, self.ema_started = state["ema_model"], state["ema_started"]


class Noise(Callback):
    """A callback that draws random numbers at the start of an epoch, and counts epochs."""

    def __init__(self) -> None:
        self.level, self.epochs = torch.zeros(()), 0

    def epoch_start(self, _state: State, _logger: Any) -> None:
        self.level = self.level + torch.rand(())
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level, self.epochs = state["level"], state["epochs"]


class Trainer:
    """Composer's loop."""

    def __init__(
        self,
        model: nn.Module,
        train_dataloader: Any,
        max_epochs: int,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[State], float],
        algorithms: Sequence[Callback],
        callbacks: Sequence[Callback],
    ) -> None:
        self.state = State(model, [optimizer], max_epochs, train_dataloader, len(train_dataloader))
        self.state.algorithms, self.state.callbacks = algorithms, callbacks
        self.run_event("init")
        self.state.model = DistributedDataParallel(model)
        self.eval_data = Augmented(6)

        def scheduler_fn(epoch: int) -> float:
            del epoch
            return schedule(self.state)

        self.state.schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, scheduler_fn)]

    def run_event(self, event: str) -> None:
        for each in (*self.state.algorithms, *self.state.callbacks):
            each.run_event(event, self.state)

    def fit(self) -> None:
        state = self.state
        self.run_event("fit_start")
        state.model.train()
        last_wct = datetime.datetime.now(datetime.UTC)
        while state.timestamp.epoch < state.max_epochs:
            if int(state.timestamp.batch_in_epoch) == 0:
                self.run_event("epoch_start")
            sampler = getattr(state.dataloader, "sampler", None)
            if isinstance(state.dataloader, DataLoader) and isinstance(sampler, DistributedSampler):
                sampler.set_epoch(int(state.timestamp.epoch))
            for state.batch in self._iter_dataloader():
                samples = len(state.batch[0])
                self.run_event("batch_start")
                state.total_loss = self._train_batch()
                now = datetime.datetime.now(datetime.UTC)
                batch_time, last_wct = now - last_wct, now
                for scheduler in state.schedulers:
                    scheduler.step()
                total = torch.tensor(samples)
                dist.all_reduce(total)
                state.timestamp = state.timestamp.to_next_batch(int(total), batch_time)
                self.run_event("batch_end")
                self.run_event("batch_checkpoint")
            state.timestamp = state.timestamp.to_next_epoch()
            self.run_event("epoch_end")
            self._eval_loop()
            self.run_event("epoch_checkpoint")
        self.run_event("fit_end")

    def _iter_dataloader(self) -> Iterator[Any]:
        batches = itertools.islice(self.state.dataloader, self.state.dataloader_len)
        iter_finished = torch.zeros(1, dtype=torch.uint8)
        batch = None
        while True:
            try:
                self.run_event("before_dataloader")
                batch = next(batches)
            except StopIteration:
                iter_finished += 1
            dist.all_reduce(iter_finished, op=dist.ReduceOp.MAX)
            if iter_finished.item() == 1:
                break
            yield batch

    def _train_batch(self) -> torch.Tensor:
        (optimizer,) = self.state.optimizers
        microbatches = list(zip(*(part.split(MICROBATCH) for part in self.state.batch), strict=True))
        total = torch.zeros(())

        def closure() -> float:
            optimizer.zero_grad(set_to_none=True)
            for number, (images, target) in enumerate(microbatches):
                self.state.model.require_backward_grad_sync = number == len(microbatches) - 1
                loss = F.cross_entropy(self.state.model(images), target) * len(target) / BATCH
                loss.backward()  # type: ignore[no-untyped-call]
                total.add_(loss.detach())
            self.run_event("after_train_batch")
            return total.item()

        optimizer.step(closure=closure)
        dist.all_reduce(total)
        return total / dist.get_world_size()

    @torch.no_grad()
    def _eval_loop(self) -> None:
        self.run_event("eval_start")
        self.state.model.eval()
        images, _ = zip(*(self.eval_data[number] for number in range(len(self.eval_data))), strict=True)
        self.state.total_loss = self.state.model.module(torch.stack(images)).sum()
        self.state.model.train()
        self.run_event("eval_end")


# -- the adoption


class Kept:
    """The state of an object of Composer, without what differs from run to run."""

    def __init__(self, owner: Any, name: str = "") -> None:
        self.owner, self.name = owner, name

    def current(self) -> Any:
        return getattr(self.owner, self.name) if self.name else self.owner

    def state_dict(self) -> dict[str, Any]:
        state = self.current().state_dict().items()
        return {key: each for key, each in state if key != "repr" and not isinstance(each, datetime.timedelta)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.current().load_state_dict(state)


class EverstepBatches(Callback):
    """The batches of Composer's loop: its `train_dataloader` and its last callback."""

    def __init__(self, loader: Any, *callbacks: Any) -> None:
        self.loader, self.batch_size, self.callbacks = loader, loader.batch_size, callbacks

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.batches, len(self.loader) - self.state.timestamp.batch_in_epoch.value)

    def fit_start(self, state: State, logger: Any) -> None:
        self.state = state
        kept = {f"kept/{number}": Kept(each) for number, each in enumerate((*state.algorithms, *self.callbacks))}
        self.session = everstep.training.init(
            model=state.model,
            optimizer=state.optimizers[0],
            scheduler={str(number): each for number, each in enumerate(state.schedulers)},
            data=self.loader,
            extra={"timestamp": Kept(state, "timestamp"), **kept},
        )
        self.batches = StepBatches(self.session, self.end_step, None)
        if self.session.restore() and state.timestamp.batch_in_epoch.value == 0:
            self.batches.begin_next_epoch()
        self.reported = state.timestamp.batch.value

    def end_step(self) -> bool:
        if self.state.timestamp.batch.value != self.reported:
            self.reported = self.state.timestamp.batch.value
            if self.session.boundary().stop:
                sys.exit()
        return False

    def epoch_checkpoint(self, state: State, logger: Any) -> None:
        self.end_step()

    def fit_end(self, state: State, logger: Any) -> None:
        self.end_step()
        self.session.close()


# -- the scripts


class Record(Callback):
    """Records the events of the test. Composer's loop calls it after each step and after each evaluation."""

    def __init__(self, steps: Steps, ema: EMA, noise: Noise) -> None:
        self.steps, self.ema, self.noise = steps, ema, noise
        self.session: Callable[[], everstep.training.TrainingSession] | None = None

    def batch_checkpoint(self, state: State, _logger: Any) -> None:
        assert self.session is not None
        average = torch.stack([each.double().sum() for each in self.ema.averages.values()]).sum()
        rate = state.schedulers[0].get_last_lr()[0]
        counts = sum(getattr(state.timestamp, name) for name in COUNTS) + self.noise.epochs
        self.steps.reach(self.session(), state.total_loss + average + rate + counts + self.noise.level)

    def epoch_checkpoint(self, state: State, _logger: Any) -> None:
        self.steps.events.of.append([int(state.timestamp.batch), "eval", float(state.total_loss).hex()])


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(17)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    data = Augmented(32)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    return model, torch.optim.AdamW(model.parameters(), 1e-2), DataLoader(data, batch_size=BATCH, sampler=sampler)


def schedule(state: State) -> float:
    return 0.99 ** int(state.timestamp.batch)


@adopted
def adopted_composer(steps: Steps) -> None:
    model, optimizer, loader = parts()
    ema, noise = EMA(), Noise()
    record = Record(steps, ema, noise)
    batches = EverstepBatches(loader, noise)
    record.session = lambda: batches.session
    Trainer(model, batches, steps.until // 4, optimizer, schedule, [ema], [noise, record, batches]).fit()


class Reported(Callback):
    """Only reports the steps."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def fit_start(self, state: State, _logger: Any) -> None:
        self.session = self.steps.begin(model=state.model, optimizer=state.optimizers[0])

    def batch_checkpoint(self, _state: State, _logger: Any) -> None:
        if self.session.boundary().stop:
            sys.exit()


@original
def original_composer(steps: Steps) -> None:
    model, optimizer, loader = parts()
    ema, noise = EMA(), Noise()
    record, reported = Record(steps, ema, noise), Reported(steps)
    record.session = lambda: reported.session
    Trainer(model, loader, steps.until // 4, optimizer, schedule, [ema], [noise, record, reported]).fit()
