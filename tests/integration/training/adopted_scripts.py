"""Miniatures of five public scripts that own their training loop, as docs/adopting.md adopts them.

Each script has the loop and the state of its original:

    nanogpt         karpathy/nanoGPT train.py
    dcgan           pytorch/examples dcgan/main.py
    imagenet        pytorch/examples imagenet/main.py
    ppo             vwxyzjn/cleanrl cleanrl/ppo.py
    language_model  pytorch/examples word_language_model/main.py

`ADOPTED` keeps all state of the loop. `ORIGINAL` is the same loop with only the model and the optimizer registered.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributions.categorical import Categorical
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import everstep.training
from everstep.training import TrainingSession
from tests.integration.training import replayed
from tests.integration.training.faults import reach
from tests.integration.training.scripts import digest

EPOCHS = 1_000
"""More epochs than any test trains."""


class Events:
    """The events of a test, which a rehearsal does not find among the script's values, because this class has slots."""

    __slots__ = ("of",)

    def __init__(self) -> None:
        self.of: list[list[Any]] = []


@dataclass
class Steps:
    """Begins the session of a script, and records its steps."""

    directory: Path
    until: int
    points: dict[str, Any] = field(default_factory=dict)
    begun: int = 0
    events: Events = field(default_factory=Events)

    @property
    def rank(self) -> int:
        return int(os.environ["RANK"])

    def begin(self, **registered: Any) -> TrainingSession:
        self.session = everstep.training.init(**registered)
        self.begun = self.session.restore()
        return self.session

    def reach(self, session: TrainingSession, loss: torch.Tensor) -> None:
        """Record a finished step, which an integration reports when the loop requests the next batch."""
        if not hasattr(self, "session"):
            self.session, self.begun = session, session.step - 1
        self.events.of.append([session.step, float(loss.item()).hex()])
        reach(self.rank, session.step, self.points)

    def end(self, loss: torch.Tensor) -> None:
        """Report a finished step. Exit as the documented scripts do when the job stops, or after the last step."""
        step = self.session.step
        self.events.of.append([step, float(loss.item()).hex()])
        self.session.log(loss=loss)
        is_stopped = self.session.boundary().stop
        reach(self.rank, step, self.points)
        if is_stopped or step == self.until:
            sys.exit()


Script = Callable[[Steps], None]
ADOPTED: dict[str, Script] = {}
ORIGINAL: dict[str, Script] = {}


def adopted(script: Script) -> Script:
    ADOPTED[script.__name__.removeprefix("adopted_")] = script
    return script


def original(script: Script) -> Script:
    ORIGINAL[script.__name__.removeprefix("original_")] = script
    return script


# -- nanoGPT: fetches the next batch before the boundary, counts iterations, keeps the best loss

TOKENS, BLOCK, ACCUMULATE, EVAL_INTERVAL = 11, 4, 2, 4


class NanoGPT:
    """The model, the batches and the evaluation of nanoGPT."""

    def __init__(self, steps: Steps) -> None:
        torch.manual_seed(1337 + steps.rank)
        self.path = steps.directory / f"tokens-{steps.rank}.bin"
        if not self.path.exists():
            np.random.default_rng(1).integers(0, TOKENS, 200).astype(np.uint16).tofile(self.path)
        layers = (nn.Embedding(TOKENS, 8), nn.Dropout(0.1), nn.LayerNorm(8), nn.Linear(8, TOKENS))
        self.model = DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    def get_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        data = np.memmap(self.path, dtype=np.uint16, mode="r")
        ix = torch.randint(len(data) - BLOCK, (3,))
        x, y = (
            torch.stack([torch.from_numpy(data[i + n : i + n + BLOCK].astype(np.int64)) for i in ix]) for n in (0, 1)
        )
        return x, y

    @torch.no_grad()
    def estimate_loss(self) -> torch.Tensor:
        self.model.eval()
        losses = torch.stack([self.loss(*self.get_batch()) for _ in range(2)])
        self.model.train()  # type: ignore[no-untyped-call]
        return losses.mean()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model = self.model if self.model.training else self.model.module
        return F.cross_entropy(model(x).view(-1, TOKENS), y.view(-1))

    def set_rate(self, iter_num: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * iter_num / 500))

    def update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


@adopted
def adopted_nanogpt(steps: Steps) -> None:
    this = NanoGPT(steps)
    x, y = this.get_batch()
    session = steps.begin(
        model=this.model,
        optimizer=this.optimizer,
        extra={"scaler": this.scaler, "X": x, "Y": y, "best_val_loss": 1e9},
    )
    x, y, best_val_loss = (session.extra[name] for name in ("X", "Y", "best_val_loss"))
    for iter_num in range(steps.begun, steps.until):
        this.set_rate(iter_num)
        if iter_num % EVAL_INTERVAL == 0 and steps.rank == 0:
            best_val_loss = min(this.estimate_loss(), best_val_loss)
        for micro_step in range(ACCUMULATE):
            this.model.require_backward_grad_sync = micro_step == ACCUMULATE - 1
            loss = this.loss(x, y) / ACCUMULATE
            x, y = this.get_batch()
            this.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        this.update()
        session.extra.update(X=x, Y=y, best_val_loss=best_val_loss)
        steps.end(loss)


@original
def original_nanogpt(steps: Steps) -> None:
    this = NanoGPT(steps)
    steps.begin(model=this.model, optimizer=this.optimizer)
    iter_num, best_val_loss = 0, torch.tensor(1e9)
    x, y = this.get_batch()
    while True:
        this.set_rate(iter_num)
        if iter_num % EVAL_INTERVAL == 0 and steps.rank == 0:
            best_val_loss = torch.minimum(best_val_loss, this.estimate_loss())
        for micro_step in range(ACCUMULATE):
            this.model.require_backward_grad_sync = micro_step == ACCUMULATE - 1
            loss = this.loss(x, y) / ACCUMULATE
            x, y = this.get_batch()
            this.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        this.update()
        steps.end(loss)
        iter_num += 1


# -- DCGAN: two models, a fixed noise, and samples at every n-th batch that change batch norm's running means

NOISE = 3


class DCGAN:
    """The two models of the GAN, and one step of both. A restart has another seed, as without `--manualSeed`."""

    def __init__(self) -> None:
        torch.manual_seed(5 + int(os.environ.get("EVERSTEP_GENERATION", "1")))
        images = torch.randn(16, 1, 3, 3, generator=torch.Generator().manual_seed(1))
        self.dataloader = DataLoader(TensorDataset(images), batch_size=4, shuffle=True)
        self.g = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 4, 2), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 1, 2), nn.Tanh()
        )
        self.d = nn.Sequential(nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 2), nn.Sigmoid(), nn.Flatten(0))
        self.fixed_noise = torch.randn(2, NOISE, 1, 1)
        self.optimizer_d = torch.optim.Adam(self.d.parameters(), lr=1e-3, betas=(0.5, 0.999))
        self.optimizer_g = torch.optim.Adam(self.g.parameters(), lr=1e-3, betas=(0.5, 0.999))

    def step(self, real: torch.Tensor) -> torch.Tensor:
        self.d.zero_grad()
        label = torch.ones(len(real))
        F.binary_cross_entropy(self.d(real), label).backward()  # type: ignore[no-untyped-call]
        fake = self.g(torch.randn(len(real), NOISE, 1, 1))
        F.binary_cross_entropy(self.d(fake.detach()), label.fill_(0)).backward()  # type: ignore[no-untyped-call]
        self.optimizer_d.step()
        self.g.zero_grad()
        loss = F.binary_cross_entropy(self.d(fake), label.fill_(1))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer_g.step()
        return loss

    def save_samples(self, i: int) -> torch.Tensor:
        return self.g(self.fixed_noise).detach().sum() if i % 3 == 0 else torch.zeros(())


@adopted
def adopted_dcgan(steps: Steps) -> None:
    this = DCGAN()
    session = steps.begin(
        model={"G": this.g, "D": this.d},
        optimizer={"G": this.optimizer_g, "D": this.optimizer_d},
        data=this.dataloader,
        extra={"fixed_noise": this.fixed_noise},
    )
    stream = session.data["data"]
    for _epoch in range(stream.epoch, EPOCHS):
        for data in stream:
            i = stream.batch
            loss = this.step(data[0])  # type: ignore[index]
            steps.end(loss + this.save_samples(i))


@original
def original_dcgan(steps: Steps) -> None:
    this = DCGAN()
    steps.begin(model={"G": this.g, "D": this.d}, optimizer={"G": this.optimizer_g, "D": this.optimizer_d})
    for _epoch in range(EPOCHS):
        for i, data in enumerate(this.dataloader, 0):
            loss = this.step(data[0])
            steps.end(loss + this.save_samples(i))


# -- ImageNet: a distributed sampler, random augmentation, a scheduler per epoch, meters, evaluation, the best accuracy


class AverageMeter:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.val = self.avg = self.sum = self.count = 0.0

    def update(self, val: float, n: int) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def state_dict(self) -> dict[str, float]:
        return {"val": self.val, "avg": self.avg, "sum": self.sum, "count": self.count}

    def load_state_dict(self, state: dict[str, float]) -> None:
        vars(self).update(state)


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, count: int) -> None:
        self.images = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index] + 0.1 * torch.rand(6), index % 3


class ImageNet:
    """The model, the loaders and the evaluation."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.7)
        train, val = Augmented(24), Augmented(12)
        self.sampler: DistributedSampler[Any] = DistributedSampler(train)
        self.train_loader = DataLoader(train, batch_size=3, sampler=self.sampler)
        self.val_loader = DataLoader(val, batch_size=3, sampler=DistributedSampler(val, shuffle=False))

    def step(self, images: torch.Tensor, target: torch.Tensor, losses: AverageMeter) -> torch.Tensor:
        loss = F.cross_entropy(self.model(images), target)
        losses.update(loss.item(), len(images))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach() + losses.avg  # so that the events of the test contain the mean

    @torch.no_grad()
    def validate(self) -> torch.Tensor:
        self.model.eval()
        hits = torch.stack([(self.model(images).argmax(1) == target).sum() for images, target in self.val_loader]).sum()
        dist.all_reduce(hits)
        return hits


@adopted
def adopted_imagenet(steps: Steps) -> None:
    this, losses = ImageNet(), AverageMeter()
    session = steps.begin(
        model=this.model,
        optimizer=this.optimizer,
        scheduler=this.scheduler,
        data=this.train_loader,
        extra={"losses": losses, "best_acc1": torch.tensor(0)},
    )
    best_acc1, stream = session.extra["best_acc1"], session.data["data"]
    for epoch in range(stream.epoch, EPOCHS):
        this.sampler.set_epoch(epoch)
        this.model.train()  # type: ignore[no-untyped-call]
        for images, target in cast("Iterable[Any]", stream):
            if stream.batch == 0:
                losses.reset()
            loss = this.step(images, target, losses)
            session.extra["best_acc1"] = best_acc1
            steps.end(loss)
        acc1 = this.validate()
        this.scheduler.step()
        best_acc1 = max(acc1, best_acc1)


@original
def original_imagenet(steps: Steps) -> None:
    this, losses = ImageNet(), AverageMeter()
    steps.begin(model=this.model, optimizer=this.optimizer)
    best_acc1 = torch.tensor(0)
    for epoch in range(EPOCHS):
        this.sampler.set_epoch(epoch)
        this.model.train()  # type: ignore[no-untyped-call]
        losses.reset()
        for images, target in this.train_loader:
            steps.end(this.step(images, target, losses))
        acc1 = this.validate()
        this.scheduler.step()
        best_acc1 = max(acc1, best_acc1)


# -- PPO: environments whose state lives outside of torch, and observations that the next rollout continues

ENVS, ROLLOUT = 2, 6


class VectorEnv:
    """Environments whose state consists of arrays and a generator, as gymnasium's `CartPoleVectorEnv`."""

    def __init__(self, seed: int = 3) -> None:
        self.np_random = np.random.default_rng(seed)
        self.state = self.np_random.uniform(-0.05, 0.05, (ENVS, 2))
        self.steps = np.zeros(ENVS, dtype=np.int32)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self.state = self.state + 0.1 * np.stack([self.state[:, 1], action - 0.5], axis=1)
        self.steps = self.steps + 1
        done = (np.abs(self.state[:, 0]) > 0.1) | (self.steps > 9)
        self.state[done] = self.np_random.uniform(-0.05, 0.05, (int(done.sum()), 2))
        self.steps[done] = 0
        return self.state.astype(np.float32), np.ones(ENVS, dtype=np.float32), done

    def first(self) -> np.ndarray:
        return self.state.astype(np.float32)


class Simulator:
    """The same environments behind an interface that gives no access to their state, as a program in C."""

    def __init__(self) -> None:
        self.reset(3)

    def reset(self, seed: int) -> None:
        self._simulation = self._simulate(seed)
        self._first = next(self._simulation)

    def step(self, action: np.ndarray) -> Any:
        return self._simulation.send(action)

    def first(self) -> np.ndarray:
        return self._first  # type: ignore[no-any-return]

    @staticmethod
    def _simulate(seed: int) -> Generator[Any, np.ndarray]:
        envs = VectorEnv(seed)
        action = yield envs.first()
        while True:
            action = yield envs.step(action)


class PlainEnvs:
    """The state of the environments, for `init(extra=…)`."""

    def __init__(self, envs: VectorEnv) -> None:
        self.envs = envs

    def state_dict(self) -> dict[str, Any]:
        generator = self.envs.np_random.bit_generator.state
        return {"state": self.envs.state, "steps": self.envs.steps, "generator": generator}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.envs.state, self.envs.steps = state["state"], state["steps"]
        self.envs.np_random.bit_generator.state = state["generator"]


class PPO:
    """The agent, one rollout and one update."""

    def __init__(self, envs: VectorEnv | Simulator) -> None:
        np.random.seed(1)
        torch.manual_seed(1)
        self.envs = envs
        self.agent = nn.ModuleDict({"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)})
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=1e-3, eps=1e-5)
        self.obs = torch.zeros(ROLLOUT, ENVS, 2)
        self.actions, self.logprobs, self.rewards, self.dones, self.values = torch.zeros(5, ROLLOUT, ENVS)

    def anneal(self, iteration: int) -> None:
        self.optimizer.param_groups[0]["lr"] = (1.0 - (iteration - 1.0) / 500) * 1e-3

    def rollout(self, next_obs: torch.Tensor, next_done: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for step in range(ROLLOUT):
            self.obs[step], self.dones[step] = next_obs, next_done
            with torch.no_grad():
                policy: Any = Categorical(logits=self.agent["actor"](next_obs))
                action = policy.sample()
                self.values[step] = self.agent["critic"](next_obs).flatten()
            self.actions[step], self.logprobs[step] = action, policy.log_prob(action)
            observed, reward, done = self.envs.step(action.numpy())
            self.rewards[step] = torch.tensor(reward)
            next_obs, next_done = torch.tensor(observed), torch.tensor(done, dtype=torch.float32)
        return next_obs, next_done

    def update(self, next_obs: torch.Tensor, next_done: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            following, returns = self.agent["critic"](next_obs).flatten() * (1 - next_done), torch.zeros(ROLLOUT, ENVS)
            for t in reversed(range(ROLLOUT)):
                returns[t] = following = self.rewards[t] + 0.99 * following
                following = following * (1 - self.dones[t])
        b_obs, b_actions, b_logprobs = self.obs.view(-1, 2), self.actions.view(-1), self.logprobs.view(-1)
        b_returns, b_advantages = returns.view(-1), (returns - self.values).view(-1)
        b_inds, loss = np.arange(ROLLOUT * ENVS), torch.zeros(())
        for _epoch in range(2):
            np.random.shuffle(b_inds)
            for mb_inds in np.split(b_inds, 2):
                policy: Any = Categorical(logits=self.agent["actor"](b_obs[mb_inds]))
                ratio = (policy.log_prob(b_actions[mb_inds]) - b_logprobs[mb_inds]).exp()
                advantages = b_advantages[mb_inds]
                gained = torch.min(advantages * ratio, advantages * ratio.clamp(0.8, 1.2)).mean()
                value = self.agent["critic"](b_obs[mb_inds]).flatten()
                loss = -gained + 0.5 * F.mse_loss(value, b_returns[mb_inds]) - 0.01 * policy.entropy().mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
                self.optimizer.step()
        return loss


@adopted
def adopted_ppo(steps: Steps) -> None:
    envs = VectorEnv()
    _train_ppo(steps, PPO(envs), {"envs": PlainEnvs(envs)})


@adopted
def adopted_seeded_ppo(steps: Steps) -> None:
    simulator = Simulator()
    this = PPO(simulator)
    steps.begin(model=this.agent, optimizer=this.optimizer)
    for iteration in range(steps.begun + 1, 1_000):
        this.anneal(iteration)
        simulator.reset(1 + iteration)
        next_obs, next_done = this.rollout(torch.tensor(simulator.first()), torch.zeros(ENVS))
        steps.end(this.update(next_obs, next_done))


@original
def original_simulator(steps: Steps) -> None:
    _train_ppo(steps, PPO(Simulator()), {})


def _train_ppo(steps: Steps, this: PPO, extra: dict[str, Any]) -> None:
    next_obs, next_done = torch.tensor(this.envs.first()), torch.zeros(ENVS)
    session = steps.begin(
        model=this.agent,
        optimizer=this.optimizer,
        extra={**extra, "next_obs": next_obs, "next_done": next_done},
    )
    next_obs, next_done = session.extra["next_obs"], session.extra["next_done"]
    for iteration in range(steps.begun + 1, 1_000):
        this.anneal(iteration)
        next_obs, next_done = this.rollout(next_obs, next_done)
        loss = this.update(next_obs, next_done)
        session.extra.update(next_obs=next_obs, next_done=next_done)
        steps.end(loss)


@original
def original_ppo(steps: Steps) -> None:
    this = PPO(VectorEnv())
    steps.begin(model=this.agent, optimizer=this.optimizer)
    next_obs, next_done = torch.tensor(this.envs.first()), torch.zeros(ENVS)
    for iteration in range(1, 1_000):
        this.anneal(iteration)
        next_obs, next_done = this.rollout(next_obs, next_done)
        steps.end(this.update(next_obs, next_done))


# -- word language model: a hidden state between batches, updates without an optimizer, a rate that follows the loss

WORDS, BPTT = 9, 3


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1111)
        self.encoder, self.drop = nn.Embedding(WORDS, 5), nn.Dropout(0.2)
        self.rnn, self.decoder = nn.LSTM(5, 6), nn.Linear(6, WORDS)
        generator = torch.Generator().manual_seed(1)
        self.train_data, self.val_data = (torch.randint(WORDS, (13, n), generator=generator) for n in (4, 2))

    def forward(self, words: torch.Tensor, hidden: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, Any]:
        output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).view(-1, WORDS), dim=1), hidden

    def init_hidden(self, count: int) -> tuple[torch.Tensor, ...]:
        return torch.zeros(1, count, 6), torch.zeros(1, count, 6)

    def step(
        self, i: int, hidden: tuple[torch.Tensor, ...], lr: float
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        self.zero_grad()
        output, hidden = self(self.train_data[i : i + BPTT], tuple(each.detach() for each in hidden))
        loss = F.nll_loss(output, self.train_data[i + 1 : i + 1 + BPTT].view(-1))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters(), 0.25)
        for p in self.parameters():
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-lr)
        return loss, hidden

    @torch.no_grad()
    def evaluate(self) -> float:
        self.eval()
        hidden, total = self.init_hidden(2), 0.0
        for i in range(0, 12, BPTT):
            output, hidden = self(self.val_data[i : i + BPTT], hidden)
            total += BPTT * F.nll_loss(output, self.val_data[i + 1 : i + 1 + BPTT].view(-1)).item()
        return total / 12


@adopted
def adopted_language_model(steps: Steps) -> None:
    model = LanguageModel()
    session = steps.begin(
        model=model,
        data=list(range(0, len(model.train_data) - 1, BPTT)),
        extra={"hidden": model.init_hidden(4), "total_loss": 0.0, "lr": 20.0, "best_val_loss": None},
    )
    kept, stream = session.extra, session.data["data"]
    lr, best_val_loss = kept["lr"], kept["best_val_loss"]
    for _epoch in range(stream.epoch + 1, EPOCHS):
        model.train()
        hidden, total_loss = model.init_hidden(4), 0.0
        for i in stream:
            if stream.batch > 0:
                hidden, total_loss = kept["hidden"], kept["total_loss"]
            loss, hidden = model.step(cast(int, i), hidden, lr)
            total_loss += loss.item()
            hidden = tuple(each.detach() for each in hidden)
            kept.update(hidden=hidden, total_loss=total_loss, lr=lr, best_val_loss=best_val_loss)
            steps.end(loss)
        val_loss = model.evaluate()
        if not best_val_loss or val_loss < best_val_loss:
            best_val_loss = val_loss
        else:
            lr /= 4.0


@original
def original_language_model(steps: Steps) -> None:
    model = LanguageModel()
    steps.begin(model=model)
    lr, best_val_loss = 20.0, math.inf
    for _epoch in range(1, EPOCHS):
        model.train()
        hidden = model.init_hidden(4)
        for _batch, i in enumerate(range(0, len(model.train_data) - 1, BPTT)):
            loss, hidden = model.step(i, hidden, lr)
            steps.end(loss)
        val_loss = model.evaluate()
        if val_loss < best_val_loss:
            best_val_loss = val_loss
        else:
            lr /= 4.0


# -- the ranks of the tests


def run(directory: str, arguments: dict[str, Any]) -> int:
    """Train an adopted script as a rank that a test may kill."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    _train(ADOPTED[arguments["options"]["name"]], Steps(Path(directory), arguments["until"], arguments["points"]))
    return 0


def rehearse(name: str, directory: str, until: int, is_adopted: bool) -> int:
    """Train a script as a rank whose rehearsals restart it."""
    script = (ADOPTED if is_adopted else ORIGINAL)[name]
    return replayed.run(lambda: _train(script, Steps(Path(directory), until)), Path(directory))


def _train(script: Script, steps: Steps) -> None:
    np.random.seed(200 + steps.rank)
    random.seed(300 + steps.rank)
    with suppress(SystemExit):
        script(steps)
    result = {"begun": steps.begun, "events": steps.events.of, "digest": digest(steps.session)}
    result |= {"draws": [float(torch.rand(()).item()).hex(), float(np.random.rand()).hex(), random.random().hex()]}
    steps.session.close()
    (steps.directory / f"result-{steps.rank}.json").write_text(json.dumps(result))
